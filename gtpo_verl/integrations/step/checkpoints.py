"""Checkpoints of a run: what is saved beside verl's part, which of them stay, and what a restart takes from them.

verl saves TransferQueue for its asynchronous trainers only. With dynamic sampling, a synchronous checkpoint has the
groups carried over in ``global_step_N/sampling.pt``, with every column that the rollout wrote.
"""

import logging
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import transfer_queue as tq
from omegaconf import DictConfig

from gtpo_verl.errors import UserError
from gtpo_verl.files import write_atomically
from gtpo_verl.integrations.entropy_source import entropy_source
from gtpo_verl.integrations.sampling import BudgetedReplayBuffer
from gtpo_verl.integrations.step.records import Records
from gtpo_verl.integrations.temporarily import temporarily
from gtpo_verl.integrations.transfer_queue import TRAIN, is_prompt, listed, uid_of
from gtpo_verl.integrations.vllm import ENTROPIES
from gtpo_verl.runs.checkpoints import link_model, prune
from gtpo_verl.runs.directory import restore_step

logger = logging.getLogger(__name__)

SAMPLING_FILE = "sampling.pt"


class Checkpoints:
    """Saves and restores what verl does not."""

    def __init__(self, config: DictConfig, records: Records) -> None:
        self._trainer = config.trainer
        self._run_dir = Path(config.trainer.run_dir)
        self._records = records
        self._from_rollout = entropy_source(config).from_rollout
        self.saved: int | None = None  # the last step whose checkpoint is complete

    def folder(self, number: int) -> Path:
        return Path(self._trainer.default_local_dir) / f"global_step_{number}"

    def save(
        self, number: int, sampling: BudgetedReplayBuffer | None, verls: Callable[[], Any], newest: int | None = None
    ) -> None:
        """Save a step: the groups that wait in the buffer of dynamic sampling, where it is ours, and then verl's part,
        which ends by naming the checkpoint the latest. newest: the step whose groups are the last to be saved.
        """
        trainer = self._trainer
        keep = 1 if trainer.get("remove_previous_ckpt_in_save") else trainer.get("max_actor_ckpt_to_keep")
        if sampling is not None:
            save_groups(self.folder(number), sampling.last_step, newest)
        self._records.keep_in(self.folder(number), number)
        with ExitStack() as stack:
            # verl removes the old checkpoint before the new one is complete, and forgets those of earlier attempts
            for key in ("max_actor_ckpt_to_keep", "max_critic_ckpt_to_keep", "remove_previous_ckpt_in_save"):
                if trainer.get(key) is not None:
                    stack.enter_context(temporarily(trainer, key, None))
            verls()
        prune(Path(trainer.default_local_dir), keep)
        link_model(self._run_dir)  # now, because the run may be killed
        self.saved = number

    def save_later_prompts(self, number: int, sampling: BudgetedReplayBuffer | None, position: dict[str, Any]) -> None:
        """Add the prompts generated since to a complete checkpoint: their groups, and the position in the data."""
        self.save_position(number, position)
        if sampling is not None:
            save_groups(self.folder(number), sampling.last_step)

    def save_position(self, number: int, position: dict[str, Any]) -> None:
        """Replace the position in the data that a complete checkpoint has."""
        write_atomically(self.folder(number) / "data.pt", lambda path: torch.save(position, path))

    def restore(self, number: int, sampling: BudgetedReplayBuffer | None) -> None:
        """After verl has loaded the checkpoint of a step: log that step if it was not, and restore its groups."""
        trainer = self._trainer
        folder = Path(trainer.resume_from_path) if trainer.resume_mode == "resume_path" else self.folder(number)
        if folder.resolve() == self.folder(number).resolve() and not trainer.del_local_ckpt_after_load:
            self.saved = number
        if restore_step(self._run_dir, folder):
            logger.warning("Step %d had not been logged when the run ended: restored from %s.", number, folder)
        if sampling is None:
            return
        groups, sampling.last_step = restore_groups(folder, with_entropies=self._from_rollout)
        if groups:
            logger.info("Restored %d groups carried over from %s.", groups, folder)


def save_groups(directory: Path, last_step: tuple[int, int], newest: int | None = None) -> int:
    """Save the groups that are in TransferQueue, those generated in step `newest` the last, and the yield of the last
    step; returns the number of groups.
    """
    there = listed(TRAIN)
    prompts = {
        key: tag for key, tag in there.items() if is_prompt(tag) and (newest is None or tag["global_steps"] <= newest)
    }
    rows = {key: tag for key, tag in there.items() if key not in prompts and uid_of(key) in prompts}
    fields = tq.kv_batch_get(keys=list(rows), partition_id=TRAIN) if rows else None
    state = {"last_step": last_step, "prompts": prompts, "rows": rows, "fields": fields}
    write_atomically(directory / SAMPLING_FILE, lambda path: torch.save(state, path))
    return len(prompts)


def restore_groups(directory: Path, *, with_entropies: bool) -> tuple[int, tuple[int, int]]:
    """Put the groups of :func:`save_groups` back into TransferQueue, in their order and with their steps.

    with_entropies: whether this run's rollouts return entropies; every row of a batch must have the same columns.
    Returns the number of groups, and ``last_step``; 0 and (1, 1) where the checkpoint has no such file.
    Raises UserError where the groups of the file and this run's have different columns.
    """
    file = directory / SAMPLING_FILE
    if not file.is_file():
        return 0, (1, 1)
    state: dict[str, Any] = torch.load(file, weights_only=False)
    prompts, rows = state["prompts"], state["rows"]
    if rows and (ENTROPIES in state["fields"]) != with_entropies:
        had, has = ("actor", "rollout or both") if with_entropies else ("rollout or both", "actor")
        raise UserError(
            f"{file} holds groups made with algorithm.entropy.source={had}, and this run has {has}: keep the source, "
            "or remove the file to resume without these groups."
        )
    if prompts:
        tq.kv_batch_put(keys=list(prompts), partition_id=TRAIN, tags=list(prompts.values()))
    if rows:
        tq.kv_batch_put(keys=list(rows), partition_id=TRAIN, fields=state["fields"], tags=list(rows.values()))
    return len(prompts), state["last_step"]
