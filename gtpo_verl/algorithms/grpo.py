"""GRPO and DAPO: one reward a response, normalised in its group (the baselines GTPO and GRPO-S are compared with)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from gtpo_verl.algorithms._packed.layout import (
    broadcast_rows,
    check_batch,
    check_tokens,
    one_thread,
    read_layout,
)
from gtpo_verl.algorithms._packed.moments import Moments
from gtpo_verl.algorithms._packed.recorder import Recorder
from gtpo_verl.algorithms._packed.tokens import Workspace, check_entropies
from gtpo_verl.algorithms.batch import AdvantageOutput, Batch
from gtpo_verl.algorithms.normalization import Normalizer
from gtpo_verl.algorithms.registry import Algorithm, Style

LARGEST_REWARD = 1e30  # sums of squares stay in the range of float64, sums in that of float32


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
    with torch.no_grad(), one_thread(response_mask.device):
        layout = read_layout(response_mask, group, verdict)
        dtype = torch.float64 if reward.dtype == torch.float64 else torch.float32
        rewards = reward.detach().tolist()
        check_rewards([reward if end else 0.0 for reward, end in zip(rewards, layout.extents, strict=True)])
        recorder = Recorder(layout)
        if entropy is not None:
            check_tokens(entropy, response_mask)
            workspace = Workspace(layout, response_mask, torch.float32)
            rows = entropy.detach().unbind(0)
            for members in layout.groups:
                sums = check_entropies(workspace.load(members, rows), entropy, response_mask)
                recorder.entropies(members, sums)
        advantages = [0.0] * len(rewards)
        for members in layout.groups:
            plus, minus = members.rows[: members.n], members.rows[members.n :]
            moments = Moments.of([rewards[row] for row in plus]), Moments.of([rewards[row] for row in minus])
            recorder.rewards(*moments)
            by = Normalizer.over(moments[0].join(moments[1]), torch.finfo(dtype).eps)
            for row in members.rows:
                advantages[row] = (rewards[row] - by.mean) * by.scale  # DAPO (9)
            recorder.correct_flips += sum(advantages[row] < 0 for row in plus)
            recorder.wrong_flips += sum(advantages[row] > 0 for row in minus)
        return AdvantageOutput(
            broadcast_rows(advantages, layout, response_mask, dtype), reward.detach().to(dtype), recorder.metrics()
        )


def check_rewards(rewards: Sequence[float]) -> None:
    """Refuse rewards (B,) that are not finite, or so large that their squares leave the range of numbers."""
    for row, reward in enumerate(rewards):
        if not abs(reward) <= LARGEST_REWARD:
            most = f" and at most {LARGEST_REWARD:g} in size" if math.isfinite(reward) else ""
            raise ValueError(f"reward of row {row} is {reward}, it must be finite{most}")


@dataclass(frozen=True)
class GRPOConfig:
    """GRPO and DAPO have no settings of their own in the advantage."""


def _compute(batch: Batch, config: GRPOConfig) -> AdvantageOutput:
    assert batch.rewards is not None
    rewards = batch.rewards if batch.rewards.is_floating_point() else batch.rewards.float()
    if batch.length_penalty is not None:  # DAPO (13), on every response
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
    loss="vanilla",
    aggregation="token-mean",
    guide="alike",
    advantage_ns=8.0,
    style=Style(light="#6a7282", dark="#a9b4c4", marker="s"),
)

GRPO = replace(DAPO, name="grpo", label="GRPO", aggregation="seq-mean-token-mean", style=None)
