"""NaN and infinite values in a batch or its update: which rows, the likely cause, and what is done about it."""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from gtpo_verl.errors import UserError
from gtpo_verl.integrations.step.columns import Step

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


def responses_not_finite(step: Step, names: Sequence[str]) -> dict[str, list[int]]:
    """{column: responses with a NaN or an infinite value at a token of the policy}, without columns that have none."""
    found = {}
    for name, values in zip(names, step.fetch(*names), strict=True):
        if (
            values.sum().isfinite()
        ):  # one such value would spoil it; where the sum alone overflows, the next line says so
            continue
        bad = ~values.isfinite() & step.mask
        found[name] = [number for number, row in enumerate(step.rows(bad)) if row.any()]
    return {name: numbers for name, numbers in found.items() if numbers}


class NotFinite:
    """Decides about batches and updates with such values, and counts those that were skipped.

    Args:
        run_dir: where the batches are kept.
        action: ``stop``, or ``skip`` the update.
        max_skipped: updates that may be skipped; one more ends the run.
        applied: whether the actor applies a gradient that is not finite, as Megatron does; FSDP leaves it out.
    """

    def __init__(self, run_dir: Path, action: str, max_skipped: int, *, applied: bool = False) -> None:
        self._run_dir = run_dir
        self._action = action
        self._max_skipped = max_skipped
        self._applied = applied
        self.skipped = 0

    def batch(self, number: int, step: Step, names: Sequence[str]) -> bool:
        """Look at columns of a batch before its update; returns whether to skip it.

        Args:
            number: of the training step.
            step: the responses.
            names: of the columns; of the first one with such values the cause is named.

        Raises:
            NotFiniteError: it has NaN or infinite values, and the run is to stop.
        """
        found = responses_not_finite(step, names)
        if not found:
            return False
        file = self._keep(number, step, names)
        column, bad = next(iter(found.items()))
        named = ", ".join(step.keys[place] for place in bad[:3]) + (", ..." if len(bad) > 3 else "")
        self._decide(
            f"step {number}: {column} of {len(bad)} of {len(step.keys)} responses is NaN or infinite ({named}); likely "
            f"cause: {_CAUSES[column]}. The batch is kept in {file}"
        )
        return True

    def update(self, number: int, step: Step, metrics: Mapping[str, Any]) -> None:
        """Look at the metrics of an update.

        Args:
            number: of the training step.
            step: the responses.
            metrics: of the update.

        Raises:
            NotFiniteError: one is NaN or infinite, and the run is to stop, or the actor has applied the gradient.
        """
        found = [name for name in ("actor/grad_norm", "actor/loss", "actor/pg_loss") if _is_bad(metrics.get(name))]
        if not found:
            return
        file = self._keep(number, step, ("old_log_probs", "advantages"))
        problem = (
            f"step {number}: {', '.join(found)} of the update is NaN or infinite; likely cause: the gradient "
            "overflows, in the actor's precision or for an extreme ratio"
        )
        if self._applied:
            raise NotFiniteError(
                f"{problem}. Megatron has applied it to the weights. The batch is kept in {file}. The same command "
                "resumes from the last checkpoint."
            )
        self._decide(f"{problem}. FSDP did not apply it. The batch is kept in {file}")

    def _keep(self, number: int, step: Step, names: Sequence[str]) -> Path:
        file = self._run_dir / DIRECTORY / f"{number}.pt"
        file.parent.mkdir(parents=True, exist_ok=True)
        columns = {name: step.padded(values) for name, values in zip(names, step.fetch(*names), strict=True)}
        responses = dict(zip(step.keys, step.rows(step.fetch("responses")[0]), strict=True))
        content = {"keys": step.batch.keys, "response_mask": step.padded(step.mask), "responses": responses}
        torch.save(content | columns, file)
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
