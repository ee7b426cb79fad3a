"""Old log-probs as `algorithm.entropy.source` says: the actor's pass, the rollout's own, or both to compare them."""

import time
from collections.abc import Callable
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from transfer_queue import KVBatchMeta

from gtpo_verl.integrations.entropy_source import entropy_source
from gtpo_verl.integrations.step.columns import Step
from gtpo_verl.integrations.temporarily import temporarily
from gtpo_verl.integrations.vllm import ENTROPIES, VERSIONS


class OldLogProbs:
    """Runs verl's old-log-prob pass, once or twice.

    Under ``algorithm.entropy.source=rollout`` the actor's pass is run to compare entropies: on the first two batches of
    a process (the first is warm-up and is not timed) and in the steps 1, 1 + ``check_every``, and so on; with 0 never.
    """

    def __init__(self, config: DictConfig) -> None:
        self._config = config
        self.source = entropy_source(config)
        self._every = OmegaConf.select(config, "algorithm.entropy.check_every", default=0)
        self._runs = 0
        self._seconds_per_token: float | None = None

    def compute(
        self, verl_pass: Callable[[], KVBatchMeta], step: Step, number: int, metrics: dict[str, Any]
    ) -> KVBatchMeta:
        """Write ``old_log_probs``, and the actor's ``entropy`` where its pass is run.

        verl_pass: verl's pass; in bypass mode it takes the rollout's log-probs. number: of the training step, from 1.
        """
        if not self.source.from_rollout:
            return verl_pass()
        tokens = sum(tag["seq_len"] for tag in step.batch.tags)  # of prompts and responses, padding included
        if not self.source.skips_actor_pass:
            return self._compared(verl_pass, step, number, metrics, tokens)
        if not self.is_due(number):
            metrics.update(self.skipped(tokens))
            return verl_pass()
        with temporarily(self._config.algorithm.rollout_correction, "bypass_mode", False):
            self._compared(verl_pass, step, number, metrics, tokens)
        # This step too trains on the rollout's log-probs: this overwrites the actor's with them.
        return verl_pass()

    def _compared(
        self, verl_pass: Callable[[], KVBatchMeta], step: Step, number: int, metrics: dict[str, Any], tokens: int
    ) -> KVBatchMeta:
        """Run the actor's pass, time it, and compare its entropies with the rollout's."""
        started = time.perf_counter()
        batch = verl_pass()
        metrics.update(self.ran(time.perf_counter() - started, tokens))
        actor, rollout, versions = step.fetch("entropy", ENTROPIES, VERSIONS)
        # Weights are sent at the end of a step, with its number; old log-probs are always of those weights.
        metrics.update(agreement(rollout, actor, step.own_mask, current=versions == number - 1))
        return batch

    def is_due(self, step: int) -> bool:
        """Whether the batch of this step (from 1) is compared."""
        return self._every > 0 and (self._runs < 2 or (step - 1) % self._every == 0)

    def ran(self, seconds: float, tokens: int) -> dict[str, float]:
        """Note an actor's pass over so many tokens (prompts and responses) and return its metrics."""
        self._runs += 1
        if self._runs > 1:
            self._seconds_per_token = seconds / tokens
        return {"rollout_entropy/check_s": seconds, "rollout_entropy/time_saved_s": 0.0}

    def skipped(self, tokens: int) -> dict[str, float]:
        """Metrics of a batch of so many tokens without the pass: seconds saved, at the speed of the last timed pass."""
        if self._seconds_per_token is None:
            return {}
        return {"rollout_entropy/time_saved_s": self._seconds_per_token * tokens}


def agreement(
    rollout: torch.Tensor, actor: torch.Tensor, mask: torch.Tensor, current: torch.Tensor
) -> dict[str, float]:
    """How well the rollout's entropies agree with the actor's.

    Of tokens that older weights sampled, the difference is how far the policy has moved, not an error.

    rollout, actor: (N,) float, nats. mask: (N,) bool, tokens of the policy. current: (N,) bool, tokens sampled by the
    actor's current weights. Returns ``rollout_entropy/abs_diff_mean`` and ``abs_diff_max`` of current tokens, where
    there are any, and their ``correlation`` where they differ from each other; ``stale_share`` of the tokens, and their
    ``stale_abs_diff_mean`` where there are any.
    """
    fresh, stale = mask & current, mask & ~current
    found = {"stale_share": 1 - int(fresh.sum()) / int(mask.sum())}
    if fresh.any():
        ours, theirs = rollout[fresh].double(), actor[fresh].double()
        difference = (ours - theirs).abs()
        found["abs_diff_mean"] = difference.mean().item()
        found["abs_diff_max"] = difference.max().item()
        if ours.min() < ours.max() and theirs.min() < theirs.max():
            found["correlation"] = torch.corrcoef(torch.stack((ours, theirs)))[0, 1].item()
    if stale.any():
        found["stale_abs_diff_mean"] = (rollout[stale].double() - actor[stale].double()).abs().mean().item()
    return {f"rollout_entropy/{name}": value for name, value in found.items()}
