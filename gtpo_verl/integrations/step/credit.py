"""Credit assignment in a step of verl's trainer: what the estimator is given, and the metrics of what it returns.

Reads ``config.algorithm`` and the settings of the rollout and its reward manager, and nothing else of a run.
"""

import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf

from gtpo_verl.algorithms import Batch, algorithm_of, credit_metrics
from gtpo_verl.integrations.context import CreditContext, overlong
from gtpo_verl.integrations.entropy_source import entropy_source
from gtpo_verl.integrations.step.columns import Step
from gtpo_verl.runs.correctness import score
from gtpo_verl.verifiers import FAILURES

logger = logging.getLogger(__name__)

SEED_STRIDE = 1_000_003  # between the seeds of two runs: no step of one draws what a step of the other does
# verl's estimators that subtract the mean of the group, and take it to be 0 for a lone response.
GROUP_MEAN_ESTIMATORS = ("grpo", "grpo_vectorized", "rloo", "opo", "gpg", "reinforce_plus_plus_baseline")


class Credit:
    """The settings of credit assignment in a run, and what they make of a step."""

    def __init__(self, config: DictConfig) -> None:
        self._config = config
        # `acc` from which a response is correct, and the column that the advantages are computed from
        self.threshold = float(OmegaConf.select(config, "algorithm.correct_threshold", default=1.0))
        self.entropy_column = entropy_source(config).column

    def context(self, step: Step, number: int, *, guide: bool) -> CreditContext:
        """What the estimator needs in training step ``number`` (from 1) and verl does not pass it."""
        if warning := verdicts_warning(step.correct, step.infos, self.threshold):
            logger.warning("%s", warning)
        method = algorithm_of(self._config)
        reads_log_probs = method is not None and "old_log_probs" in method.needs
        (entropies,) = step.fetch(self.entropy_column)
        several_outputs = len(step.last_output.unique()) < len(step.keys)
        return CreditContext(
            Batch(
                step.padded(step.mask),
                step.of_batch(step.group + 1),  # verl's rows of padding are a group 0
                step.of_batch(step.correct),
                entropy=step.padded(torch.where(step.mask, entropies, 0.0)),
                rewards=None if step.scores is None else step.of_batch(step.scores),
                old_log_probs=step.padded(step.fetch("old_log_probs")[0]) if reads_log_probs else None,
                seed=SEED_STRIDE * (self._config.get("seed") or 0) + number,
                guide=step.of_batch(step.of_guide) if guide else None,
            ),
            overlong(self._config),
            lengths=step.of_batch(torch.tensor(step.lengths)),
            last_output=step.last_row_of_batch() if several_outputs else None,
        )

    def written(self, step: Step) -> None:
        """Take note that verl has written advantages, and with rejection sampling (`rollout_rs`) the mask."""
        step.forget("advantages", "returns")
        if OmegaConf.select(self._config, "algorithm.rollout_correction.rollout_rs") is not None:
            step.forget("response_mask")

    def zero_lone_responses(self, step: Step) -> int:
        """Set the advantage of the only response of a group to 0, as GTPO and GRPO-S do; returns how many there are.

        verl's estimators compare it with 0 instead of a mean, so its advantage would be its whole reward.
        """
        if self._config.algorithm.adv_estimator in GROUP_MEAN_ESTIMATORS:
            zeros = {number: torch.zeros(step.lengths[number]) for number in step.lone.nonzero()[:, 0].tolist()}
            for column in ("advantages", "returns"):
                step.put(column, zeros)
        return int(step.lone.sum())

    @contextmanager
    def without_truncated(self, step: Step, metrics: dict[str, Any]) -> Iterator[None]:
        """Empty the masks of truncated responses inside the block, under ``algorithm.overlong_filtering``."""
        if not OmegaConf.select(self._config, "algorithm.overlong_filtering", default=False):
            yield
            return
        limit = self._config.data.max_response_length
        rows = step.rows(step.fetch("response_mask")[0])
        masks = {number: mask for number, mask in enumerate(rows) if len(mask) >= limit}
        metrics["training/overlong_filtered_share"] = len(masks) / len(step.keys)
        step.put("response_mask", {number: torch.zeros_like(mask) for number, mask in masks.items()})
        try:
            yield
        finally:
            step.put("response_mask", masks)

    def metrics(self, step: Step, context: CreditContext) -> dict[str, float]:
        """``credit/*``, and what the verifier says of the responses; of a session with several outputs, the last."""
        last = step.last_output.unique()
        counts = torch.zeros(len(step.keys), dtype=torch.bool).index_fill(0, last, True)
        method = algorithm_of(self._config)
        alike = method is None or method.guide == "alike"  # rows of a guide are as any other
        mask = (step.mask if alike else step.own_mask) & step.of_tokens(counts)
        (advantages,) = step.fetch("advantages")
        batch = context.batch
        assert batch.entropy is not None
        found = credit_metrics(step.padded(advantages), step.padded(mask), batch.group, batch.correct, batch.entropy)
        found |= context.metrics  # the method's own
        own = step.fetch(self.entropy_column)[0][step.own_mask]
        if len(own):
            found["entropy_all"] = own.mean().item()
        infos = [step.infos[number] for number in last.tolist()]
        accuracy = {"training/accuracy": step.correct[last].float().mean().item()}
        return {f"credit/{name}": value for name, value in found.items()} | verifier_metrics(infos) | accuracy


def verdicts_warning(correct: torch.Tensor, infos: Sequence[Mapping[str, Any]], threshold: float) -> str | None:
    """What to say where the scores of a step differ and its verdicts (R,) do not: methods that read verdicts then learn
    nothing, and every other metric looks healthy.
    """
    scores = [found for info in infos if (found := score(info)) is not None]
    if (correct.any() and not correct.all()) or not scores or min(scores) == max(scores):
        return None
    return (
        f"every response of this step is {'correct' if correct.all() else 'wrong'} by algorithm.correct_threshold="
        f"{threshold:g}, while scores go from {min(scores):g} to {max(scores):g}: verdicts without contrast teach "
        "nothing. Set the threshold to the score of a right answer, or let the reward function return `acc`."
    )


def verifier_metrics(infos: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Shares of the responses for which the verifier failed to give a verdict, by reason, and of those that keep the
    rules of their task, right or wrong; each where the reward function returned ``verifier_failure`` or ``legal``.
    """
    found = {}
    reasons = [info["verifier_failure"] for info in infos if "verifier_failure" in info]
    if reasons:
        counts = Counter(reasons)
        found["verifier/failure_share"] = 1 - counts[""] / len(reasons)
        found |= {f"verifier/{reason}_share": counts[reason] / len(reasons) for reason in FAILURES}
    legal = [float(info["legal"]) for info in infos if "legal" in info]
    if legal:
        found["training/legal_share"] = sum(legal) / len(legal)
    return found
