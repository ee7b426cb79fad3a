"""NaN and infinite values in a batch or its update: which rows, the likely cause, and what is done about it."""

import itertools
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig
from verl.utils.torch_dtypes import PrecisionType

from gtpo_verl.errors import UserError
from gtpo_verl.integrations.step.columns import Step

logger = logging.getLogger(__name__)

DIRECTORY = "not_finite"  # in the run's: a file of tensors for each such step
RESUMES = "The same command resumes from the last checkpoint"
_ACTOR = "the actor's logits are not finite: its weights are damaged, or overflow in their precision"
_VLLM = "vLLM's logits are not finite: it did not get the weights intact, or its precision overflows"
_CAUSES = {
    "rm_scores": "the reward function returned it",
    "old_log_probs": _ACTOR,
    "entropy": _ACTOR,
    "rollout_log_probs": _VLLM,
    "rollout_entropies": _VLLM,
    "advantages": "the settings of the estimator overflow on these rewards and entropies",
}


class NotFiniteError(UserError):
    """A batch has values that are NaN or infinite; nothing was trained on it."""


class NotFinite:
    """Decides about batches and updates with such values, and counts those that were skipped."""

    def __init__(self, config: DictConfig) -> None:
        self._directory = Path(config.trainer.run_dir) / DIRECTORY
        self._guards = config.guards
        actor = config.actor_rollout_ref.actor
        self._applied = actor.strategy == "megatron"
        # with fp16 the scale of verl's loss is raised until a gradient overflows, which is then left out
        mixed = None if self._applied else actor.fsdp_config.get("mixed_precision")
        self._scaled = mixed is not None and PrecisionType.is_fp16(mixed.get("param_dtype"))
        self.skipped = 0

    def batch(self, number: int, step: Step, names: Sequence[str]) -> bool:
        """Look at columns of a batch before its update; returns whether to skip it. Raises NotFiniteError, with the
        cause of the first column with such values at a token of the policy, where the run is to stop.
        """
        for name, values in zip(names, step.fetch(*names), strict=True):
            finite = values.isfinite()
            if finite.all():
                continue
            bad = ~finite if name == "rm_scores" else ~finite & step.mask  # the reward may be at a tool's token
            if bad.any():
                keys = [key for key, row in zip(step.keys, step.rows(bad), strict=True) if row.any()]
                problem = (
                    f"step {number}: {name} of {len(keys)} of {len(step.keys)} responses is NaN or infinite "
                    f"({', '.join(keys[:3])}{', ...' if len(keys) > 3 else ''}); likely cause: {_CAUSES[name]}"
                )
                self._decide(f"{problem}. The batch is kept in {self._keep(number, step, names)}")
                return True
        return False

    def update(self, number: int, step: Step, metrics: Mapping[str, Any]) -> None:
        """Look at the metrics of an update; raises NotFiniteError where one is NaN or infinite, and the run is to stop
        or the actor has applied the gradient.
        """
        looked_at = ("actor/loss", "actor/pg_loss", *(() if self._scaled else ("actor/grad_norm",)))
        found = [name for name in looked_at if not torch.as_tensor(metrics.get(name, 0.0)).isfinite().all()]
        if not found:
            return
        problem = (
            f"step {number}: {', '.join(found)} of the update is NaN or infinite; likely cause: the gradient "
            "overflows, in the actor's precision or for an extreme ratio"
        )
        kept = f"The batch is kept in {self._keep(number, step, ('old_log_probs', 'advantages'))}"
        if self._applied:
            raise NotFiniteError(f"{problem}. Megatron has applied it to the weights. {kept}. {RESUMES}.")
        self._decide(f"{problem}. FSDP left out each mini-batch with such a gradient, and applied others. {kept}")

    def _keep(self, number: int, step: Step, names: Sequence[str]) -> Path:
        file, others = self._directory / f"{number}.pt", itertools.count(2)
        while file.exists():  # of another update of the step, or of an earlier attempt
            file = file.with_name(f"{number}-{next(others)}.pt")
        file.parent.mkdir(parents=True, exist_ok=True)
        columns = {name: step.padded(values) for name, values in zip(names, step.fetch(*names), strict=True)}
        responses = dict(zip(step.keys, step.rows(step.fetch("responses")[0]), strict=True))
        content = {"keys": step.batch.keys, "response_mask": step.padded(step.mask), "responses": responses}
        torch.save(content | columns, file)
        return file

    def _decide(self, problem: str) -> None:
        if self._guards.not_finite == "stop":
            raise NotFiniteError(f"{problem}. {RESUMES}; guards.not_finite=skip leaves such updates out.")
        self.skipped += 1
        most = self._guards.max_skipped_steps
        if self.skipped > most:
            raise NotFiniteError(f"{problem}. More than guards.max_skipped_steps={most} were skipped. {RESUMES}.")
        logger.warning("%s. Counted as skipped, the %d. of this attempt.", problem, self.skipped)
