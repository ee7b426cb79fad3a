"""NaN and infinite values in a batch or its update: which rows, the likely cause, and what is done about it."""

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from gtpo_verl.errors import UserError

logger = logging.getLogger(__name__)

DIRECTORY = "not_finite"  # in the run's: a file of tensors for each such step
_CAUSES = {
    "rm_scores": "the reward function returned it",
    "old_log_probs": "the actor's logits are not finite: its weights are damaged, or overflow in their precision",
    "entropy": "the actor's logits are not finite: its weights are damaged, or overflow in their precision",
    "rollout_log_probs": "vLLM's logits are not finite: it did not get the weights intact, or its precision overflows",
    "rollout_entropies": "vLLM's logits are not finite: it did not get the weights intact, or its precision overflows",
    "advantages": "the settings of the estimator overflow on these rewards and entropies",
}


class NotFiniteError(UserError):
    """A batch has values that are NaN or infinite; nothing was trained on it."""


def rows_not_finite(columns: Mapping[str, torch.Tensor], mask: torch.Tensor) -> dict[str, list[int]]:
    """{column: its rows with a NaN or an infinite value at a token of the policy}, without columns that have none.

    Args:
        columns: (B, T) float each.
        mask: (B, T) bool.
    """
    found = {name: (~values.isfinite() & mask).any(-1).nonzero()[:, 0].tolist() for name, values in columns.items()}
    return {name: rows for name, rows in found.items() if rows}


class NotFinite:
    """Decides about batches and updates with such values, and counts those that were skipped.

    Args:
        run_dir: where the batches are kept.
        action: ``stop``, or ``skip`` the update.
        max_skipped: updates that may be skipped; one more ends the run.
    """

    def __init__(self, run_dir: Path, action: str, max_skipped: int) -> None:
        self._run_dir = run_dir
        self._action = action
        self._max_skipped = max_skipped
        self.skipped = 0

    def batch(
        self,
        step: int,
        keys: list[str],
        columns: Mapping[str, torch.Tensor],
        mask: torch.Tensor,
        contents: Callable[[], dict[str, Any]] = dict,
    ) -> bool:
        """Look at a batch before its update; returns whether to skip it.

        Args:
            step: of the training.
            keys: B names of the rows.
            columns: (B, T) float each; of the first one with such values the cause is named.
            mask: (B, T) bool.
            contents: what else is kept of a bad batch.

        Raises:
            NotFiniteError: it has NaN or infinite values, and the run is to stop.
        """
        found = rows_not_finite(columns, mask)
        if not found:
            return False
        file = self._keep(step, {"keys": keys, "response_mask": mask, **columns, **contents()})
        column, rows = next(iter(found.items()))
        named = ", ".join(keys[row] for row in rows[:3]) + (", ..." if len(rows) > 3 else "")
        self._decide(
            f"step {step}: {column} of {len(rows)} of {len(keys)} responses is NaN or infinite ({named}); likely "
            f"cause: {_CAUSES[column]}. The batch is kept in {file}"
        )
        return True

    def update(self, step: int, metrics: Mapping[str, Any], contents: Callable[[], dict[str, Any]]) -> None:
        """Look at the metrics of an update. verl's FSDP engine leaves out a gradient that is not finite.

        Args:
            step: of the training.
            metrics: of the step.
            contents: of the batch, to be kept.

        Raises:
            UserError: one is NaN or infinite, and the run is to stop.
        """
        found = [name for name in ("actor/grad_norm", "actor/loss", "actor/pg_loss") if _is_bad(metrics.get(name))]
        if not found:
            return
        file = self._keep(step, contents())
        self._decide(
            f"step {step}: {', '.join(found)} of the update is NaN or infinite; likely cause: the gradient overflows, "
            f"in the actor's precision or for an extreme ratio. FSDP did not apply it. The batch is kept in {file}"
        )

    def _keep(self, step: int, content: dict[str, Any]) -> Path:
        file = self._run_dir / DIRECTORY / f"{step}.pt"
        file.parent.mkdir(parents=True, exist_ok=True)
        torch.save(content, file)
        return file

    def _decide(self, problem: str) -> None:
        if self._action == "stop":
            raise NotFiniteError(
                f"{problem}. The same command resumes from the last checkpoint; guards.not_finite=skip leaves such "
                "updates out."
            )
        self.skipped += 1
        if self.skipped > self._max_skipped:
            raise NotFiniteError(
                f"{problem}. More than guards.max_skipped_steps={self._max_skipped} were skipped. The same command "
                "resumes from the last checkpoint."
            )
        logger.warning("%s. Its update is skipped, the %d. of this attempt.", problem, self.skipped)


def _is_bad(value: Any) -> bool:
    return value is not None and not torch.isfinite(torch.as_tensor(value, dtype=torch.float64)).all()
