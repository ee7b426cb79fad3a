"""GRPO and DAPO: one reward a response, normalised in its group (the baselines GTPO and GRPO-S are compared with)."""

from dataclasses import dataclass, replace

import torch

from gtpo_verl.algorithms.batch import AdvantageOutput, Batch
from gtpo_verl.algorithms.checks import check_batch, check_entropies, check_finite, check_tokens
from gtpo_verl.algorithms.groups import groups_of
from gtpo_verl.algorithms.metrics import CreditMetrics
from gtpo_verl.algorithms.normalization import Moments
from gtpo_verl.algorithms.registry import Algorithm, Style


@torch.no_grad()
def grpo_advantages(
    reward: torch.Tensor,
    response_mask: torch.Tensor,
    group: torch.Tensor,
    correct: torch.Tensor | None = None,
    entropy: torch.Tensor | None = None,
) -> AdvantageOutput:
    """Normalise the reward of every response in its group and give it to all its tokens: A = (R - mean) / (std + 1e-6).

    reward: (B,) float; DAPO's is ±1 plus the soft overlong penalty. response_mask: (B, T) bool or 0/1. group: (B,)
    integers.
    correct: (B,) bool, for the metrics alone; without it all count as correct where the reward is positive.
    entropy: (B, T) nats, for the metrics alone, or None.
    Returns advantages (B, T) and `reward` as shaped rewards, float64 for float64 rewards and else float32, and metrics
    by the names of the other arms. A group with equal rewards, or with one response, has advantage 0.
    Raises ValueError for shapes or types that disagree and rewards that are not finite.
    Source: DAPO (arXiv 2503.14476), eq. 9.
    """
    verdict = reward > 0 if correct is None else correct
    check_batch(response_mask, group, reward=reward, correct=verdict)
    if entropy is not None:
        check_tokens(entropy, response_mask)
    dtype = torch.float64 if reward.dtype == torch.float64 else torch.float32
    advantages = torch.zeros(response_mask.shape, dtype=dtype, device=response_mask.device)
    metrics = CreditMetrics()
    for members in groups_of(response_mask, group, verdict):
        metrics.add_group(members.ends, verdict[members.rows])
        if entropy is not None:
            H = torch.where(members.mask, members.take(entropy).double(), 0.0)
            check_entropies(H, members.rows, entropy.dtype)
            metrics.add_entropies(members, H, members.mask)
        check_finite("reward", reward, members.rows)
        R = reward[members.rows, None].double()
        plus, minus = (Moments.of(R[side]) for side in members.sides)
        metrics.add_rewards((plus, minus))
        A = plus.join(minus).advantages(R, torch.finfo(dtype).eps)  # DAPO eq. 9
        metrics.add_sign_flips(members, A, torch.ones_like(A, dtype=torch.bool))
        members.put(torch.where(members.mask, A, 0.0), advantages)
    return AdvantageOutput(advantages, reward.detach().to(dtype), metrics.found())


@dataclass(frozen=True)
class GRPOConfig:
    """GRPO and DAPO have no settings of their own in the advantage."""


def _compute(batch: Batch, config: GRPOConfig) -> AdvantageOutput:
    assert batch.rewards is not None
    rewards = batch.rewards if batch.rewards.is_floating_point() else batch.rewards.float()
    if batch.length_penalty is not None:  # DAPO eq. 13, on every response
        rewards = rewards + batch.length_penalty.to(rewards.dtype)
    return grpo_advantages(rewards, batch.response_mask, batch.group, batch.correct, batch.entropy)


DAPO = Algorithm(
    name="dapo",
    label="DAPO",
    level="outcome",
    needs=frozenset({"rewards"}),
    config=GRPOConfig,
    compute=_compute,
    verl_estimator="grpo",
    guide="alike",
    advantage_ns=18.0,
    style=Style(light="#6a7282", dark="#a9b4c4", marker="square"),
)

GRPO = replace(DAPO, name="grpo", label="GRPO", aggregation="seq-mean-token-mean", style=None)
