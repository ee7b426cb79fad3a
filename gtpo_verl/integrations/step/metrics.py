"""Metrics of a step beside those of the algorithms: the rollout's entropies, the verifier. Needs torch, not verl."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from gtpo_verl.verifiers import FAILURES


def agreement(
    rollout: torch.Tensor, actor: torch.Tensor, mask: torch.Tensor, current: torch.Tensor
) -> dict[str, float]:
    """How well the rollout's entropies agree with the actor's.

    Both are entropies of the same policy only where the token was sampled by the weights that the actor has now. In
    asynchronous training other tokens were sampled by older weights: there the difference is how far the policy has
    moved, not an error.

    Args:
        rollout, actor: (N,) float, nats.
        mask: (N,) bool, tokens of the policy.
        current: (N,) bool, tokens sampled by the actor's current weights.

    Returns:
        ``rollout_entropy/abs_diff_mean``, ``abs_diff_max`` (nats) over current tokens, where there are any, and their
        ``correlation`` where they differ from each other;
        ``stale_share`` of the tokens, and their ``stale_abs_diff_mean`` where there are any.

    Raises:
        ValueError: the columns are not aligned.
    """
    if rollout.shape != actor.shape:
        raise ValueError(
            f"entropies of the rollout {tuple(rollout.shape)} and the actor {tuple(actor.shape)} are not aligned"
        )
    fresh = mask & current
    tokens, fresh_tokens = int(mask.sum()), int(fresh.sum())
    found = {"stale_share": 1 - fresh_tokens / tokens}
    if fresh_tokens:
        ours, theirs = (selected(column, fresh).to(torch.float64, copy=True) for column in (rollout, actor))
        difference = (ours - theirs).abs_()
        found["abs_diff_mean"] = difference.mean().item()
        found["abs_diff_max"] = difference.max().item()
        if ours.min() < ours.max() and theirs.min() < theirs.max():
            ours -= ours.mean()
            theirs -= theirs.mean()
            found["correlation"] = (ours.dot(theirs) / (ours.dot(ours) * theirs.dot(theirs)).sqrt()).item()
    if fresh_tokens < tokens:
        stale = mask & ~current
        found["stale_abs_diff_mean"] = (rollout[stale].double() - actor[stale].double()).abs().mean().item()
    return {f"rollout_entropy/{name}": value for name, value in found.items()}


def selected(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The values (N,) that a mask (N,) marks; no copy where it marks all, as in a run without tools."""
    return values if bool(mask.all()) else values[mask]


class ActorPass:
    """Schedules the actor's old-log-prob pass under ``algorithm.entropy.source=rollout``, and times it.

    There the pass is run to compare entropies: on the first two batches of a process (the first is warm-up and is not
    timed) and in the steps 1, 1 + ``every``, 1 + 2 ``every``, and so on.

    Args:
        every: steps from one comparison to the next; 0 is never.
    """

    def __init__(self, every: int) -> None:
        self.every = every
        self._runs = 0
        self._seconds_per_token: float | None = None

    def is_due(self, step: int) -> bool:
        """Whether the batch of this step (from 1) is compared."""
        return self.every > 0 and (self._runs < 2 or (step - 1) % self.every == 0)

    def ran(self, seconds: float, tokens: int) -> dict[str, float]:
        """Note a pass over so many tokens (prompts and responses) and return its metrics."""
        self._runs += 1
        if self._runs > 1:
            self._seconds_per_token = seconds / tokens
        return {"rollout_entropy/check_s": seconds, "rollout_entropy/time_saved_s": 0.0}

    def skipped(self, tokens: int) -> dict[str, float]:
        """Metrics of a batch of so many tokens without the pass: seconds saved, at the speed of the last timed pass."""
        if self._seconds_per_token is None:
            return {}
        return {"rollout_entropy/time_saved_s": self._seconds_per_token * tokens}


def legal_share(infos: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """``training/legal_share``: the share of responses that keep the rules of their task, right or wrong.

    Args:
        infos: what the reward function returned for each response; nothing where it does not say ``legal``.
    """
    said = [float(info["legal"]) for info in infos if "legal" in info]
    return {"training/legal_share": sum(said) / len(said)} if said else {}


def verifier_failures(infos: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Shares of responses for which the verifier failed to give a verdict, by reason.

    Args:
        infos: what the reward function returned for each response.

    Returns:
        ``verifier/failure_share`` and ``verifier/timeout_share``, ``memory_share``, ``crash_share``, ``error_share``;
        nothing for a reward function that does not say ``verifier_failure``.
    """
    reasons = Counter(info["verifier_failure"] for info in infos if "verifier_failure" in info)
    total = reasons.total()
    if total == 0:
        return {}
    shares = {f"verifier/{reason}_share": reasons[reason] / total for reason in FAILURES}
    return {"verifier/failure_share": 1 - reasons[""] / total} | shares
