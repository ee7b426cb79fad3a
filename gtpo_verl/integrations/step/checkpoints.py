"""Checkpoints of a run: what is saved beside verl's part, which of them stay, and what a restart takes from them."""

import logging
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig

from gtpo_verl.files import write_atomically
from gtpo_verl.integrations.carry_over import restore_groups, save_groups
from gtpo_verl.integrations.sampling import BudgetedReplayBuffer
from gtpo_verl.integrations.step.records import Records
from gtpo_verl.integrations.temporarily import temporarily
from gtpo_verl.runs.checkpoints import link_model, prune

logger = logging.getLogger(__name__)


class Checkpoints:
    """Saves and restores what verl does not.

    Args:
        config: composed.
        records: of the run's steps.
        from_rollout: whether the rollouts return entropies.
    """

    def __init__(self, config: DictConfig, records: Records, *, from_rollout: bool) -> None:
        self._trainer = config.trainer
        self._run_dir = Path(config.trainer.run_dir)
        self._records = records
        self._from_rollout = from_rollout
        self._saved: int | None = None  # the last step whose checkpoint is complete

    def folder(self, number: int) -> Path:
        """Of a step's checkpoint."""
        return Path(self._trainer.default_local_dir) / f"global_step_{number}"

    def is_saved(self, number: int) -> bool:
        """Whether the last complete checkpoint is this step's."""
        return self._saved == number

    def save(self, number: int, sampling: BudgetedReplayBuffer | None, verls: Callable[[], Any]) -> None:
        """Save a step.

        Args:
            number: of the step.
            sampling: the buffer of dynamic sampling, where it is ours.
            verls: saves verl's part, and ends by naming the checkpoint the latest.
        """
        trainer = self._trainer
        keep = 1 if trainer.get("remove_previous_ckpt_in_save") else trainer.get("max_actor_ckpt_to_keep")
        self.save_groups(number, sampling)
        self._records.keep_in(self.folder(number), number)
        with ExitStack() as stack:
            # verl removes the old checkpoint before the new one is complete, and forgets those of earlier attempts
            for key in ("max_actor_ckpt_to_keep", "max_critic_ckpt_to_keep", "remove_previous_ckpt_in_save"):
                if trainer.get(key) is not None:
                    stack.enter_context(temporarily(trainer, key, None))
            verls()
        prune(Path(trainer.default_local_dir), keep)
        link_model(self._run_dir)  # now, because the run may be killed
        self._saved = number

    def save_groups(self, number: int, sampling: BudgetedReplayBuffer | None) -> None:
        """Save the groups that wait in TransferQueue with a step's checkpoint."""
        if sampling is not None:
            save_groups(self.folder(number), "train", sampling.last_step)

    def save_position(self, number: int, position: dict[str, Any]) -> None:
        """Replace the position in the data that a complete checkpoint has, once more prompts were generated."""
        write_atomically(self.folder(number) / "data.pt", lambda path: torch.save(position, path))

    def restore(self, number: int, sampling: BudgetedReplayBuffer | None) -> None:
        """After verl has loaded the checkpoint of a step: log that step if it was not, and restore its groups."""
        trainer = self._trainer
        folder = Path(trainer.resume_from_path) if trainer.resume_mode == "resume_path" else self.folder(number)
        if folder.resolve() == self.folder(number).resolve() and not trainer.del_local_ckpt_after_load:
            self._saved = number
        self._records.restore_from(folder, number)
        if sampling is None:
            return
        groups, sampling.last_step = restore_groups(folder, "train", with_entropies=self._from_rollout)
        if groups:
            logger.info("Restored %d groups carried over from %s.", groups, folder)
