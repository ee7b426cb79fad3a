"""GRPO-S: sequence-level reward shaping by policy entropy (arXiv 2508.04349)."""

import math
from collections.abc import Sequence

import torch

from gtpo_verl.algorithms._packed.layout import (
    Group,
    Layout,
    broadcast_rows,
    check_batch,
    check_entropy_shape,
    check_penalty,
    one_thread,
    read_layout,
)
from gtpo_verl.algorithms._packed.moments import Moments, normalizers
from gtpo_verl.algorithms._packed.recorder import Recorder
from gtpo_verl.algorithms._packed.tokens import Scratch, check_entropies, clamp_entropies
from gtpo_verl.algorithms.batch import AdvantageOutput, Batch
from gtpo_verl.algorithms.config import GRPOSConfig
from gtpo_verl.algorithms.penalties import named_penalty
from gtpo_verl.algorithms.registry import Algorithm, Style


def grpo_s_advantages(
    entropy: torch.Tensor,
    correct: torch.Tensor,
    response_mask: torch.Tensor,
    group: torch.Tensor,
    config: GRPOSConfig,
    length_penalty: torch.Tensor | None = None,
    return_shaped: bool = True,
) -> AdvantageOutput:
    """Shape the reward of every response by its mean entropy, normalise it to an advantage and give it to all its tokens.

    Arguments, types and errors as in `gtpo_advantages`.
    Returns advantages (B, T), shaped rewards (B,), float64 for float64 entropies and else float32, and the metrics of `Recorder`.
    Source: arXiv 2508.04349, early sections 3.4 and 4.6, late section on GRPO-S; normalisation as in GTPO, over responses.
    """
    check_batch(response_mask, group, correct=correct, length_penalty=length_penalty)
    check_entropy_shape(entropy, response_mask)
    with torch.no_grad(), one_thread(entropy.device):
        layout = read_layout(response_mask, group, correct)
        check_penalty(length_penalty, layout)
        recorder = Recorder(layout)
        # Rewards of one polarity alone, or with a penalty that cancels their base, may differ by little: float32 would lose that.
        fine = config.normalization == "within" or config.degenerate == "shape" or length_penalty is not None
        kind = torch.float64 if fine or entropy.dtype == torch.float64 else torch.float32
        scratch = Scratch(layout, response_mask, kind)
        means = _mean_entropies(entropy.detach(), response_mask, layout, config, scratch, recorder)
        rewards = _shaped_rewards(means, layout, config, None if length_penalty is None else length_penalty.tolist())
        dtype = torch.float64 if entropy.dtype == torch.float64 else torch.float32
        advantages = _normalized(rewards, layout, config, torch.finfo(dtype).eps, recorder)
        return AdvantageOutput(
            broadcast_rows(advantages, layout, response_mask, dtype),
            torch.tensor(rewards, dtype=dtype, device=entropy.device) if return_shaped else None,
            recorder.metrics(),
        )


def _mean_entropies(
    entropy: torch.Tensor,
    response_mask: torch.Tensor,
    layout: Layout,
    config: GRPOSConfig,
    scratch: Scratch,
    recorder: Recorder,
) -> list[float]:
    """Ĥ of each row: the arithmetic or geometric mean of its clamped entropies; 0 for an empty row."""
    entropy_rows = entropy.unbind(0)
    means = [0.0] * len(entropy)
    for group in layout.groups:
        tokens = scratch.load(group, entropy_rows)
        recorder.entropies(group, check_entropies(tokens, entropy, response_mask))
        clamp_entropies(tokens.values, config.entropy_clip, config.entropy_floor)
        if config.entropy_mean == "geometric":
            tokens.values.log_()
        sums = torch.stack([row.sum() for row in tokens.right.rows + tokens.wrong.rows]).tolist()
        for row, total in zip(group.rows, sums, strict=True):
            mean = total / layout.lengths[row]
            means[row] = math.exp(mean) if config.entropy_mean == "geometric" else mean
    return means


def _taking_part(layout: Layout, config: GRPOSConfig) -> list[Group]:
    return [group for group in layout.groups if config.degenerate == "shape" or not group.one_polarity]


def _shaped_rewards(
    means: list[float], layout: Layout, config: GRPOSConfig, penalty: list[float] | None
) -> list[float]:
    """r̂ of each row; 0 for rows that take no part."""
    rewards = [0.0] * len(means)
    groups = _taking_part(layout, config)
    right = [group.rows[: group.n] for group in groups]
    wrong = [group.rows[group.n :] for group in groups]
    if config.scope == "batch":
        right, wrong = ([[row for rows in side for row in rows]] for side in (right, wrong))
    for rows in right:
        for row, weight in zip(rows, _weights([means[row] for row in rows], config.mean), strict=True):
            rewards[row] = config.beta1 + config.beta2 * weight + (penalty[row] if penalty is not None else 0.0)
    if config.negatives == "zero":
        return rewards
    for rows in wrong:
        for row, weight in zip(rows, _weights([1 / means[row] for row in rows], config.mean), strict=True):
            rewards[row] = -weight if config.negatives == "inverse" else -config.beta1 - config.beta2 * weight
    return rewards


def _weights(values: Sequence[float], mean: str) -> list[float]:
    """Each value over the mean of all of them."""
    if not values:
        return []
    if mean == "arithmetic":
        typical = math.fsum(values) / len(values)
    else:
        typical = math.exp(math.fsum(map(math.log, values)) / len(values))
    return [value / typical for value in values]


def _normalized(
    rewards: list[float], layout: Layout, config: GRPOSConfig, eps: float, recorder: Recorder
) -> list[float]:
    """The advantage of each row; 0 for rows that take no part."""
    advantages = [0.0] * len(rewards)
    groups = _taking_part(layout, config)
    for group in groups:
        recorder.rewards(*(_moments(rewards, rows) for rows in (group.rows[: group.n], group.rows[group.n :])))
    whole = normalizers(recorder.correct_rewards, recorder.wrong_rewards, config.normalization, config.negatives, eps)
    for group in groups:
        right, wrong = group.rows[: group.n], group.rows[group.n :]
        sides = whole
        if config.norm_scope == "group":
            sides = normalizers(
                _moments(rewards, right), _moments(rewards, wrong), config.normalization, config.negatives, eps
            )
        for row in right:
            value = (rewards[row] - sides[0].shift) * sides[0].scale
            recorder.correct_flips += value < 0
            advantages[row] = max(value, 0.0) if config.preserve_sign else value
        for row in wrong:
            value = (rewards[row] - sides[1].shift) * sides[1].scale
            recorder.wrong_flips += value > 0
            advantages[row] = min(value, 0.0) if config.preserve_sign else value
        recorder.spreads(group, [0.0] * len(group.rows), sides)
    return advantages


def _moments(rewards: list[float], rows: list[int]) -> Moments:
    return Moments.of([rewards[row] for row in rows])


def _compute(batch: Batch, config: GRPOSConfig) -> AdvantageOutput:
    assert batch.entropy is not None
    penalty = named_penalty(batch, config)
    return grpo_s_advantages(batch.entropy, batch.correct, batch.response_mask, batch.group, config, penalty)


GRPO_S = Algorithm(
    name="grpo_s",
    label="GRPO-S",
    level="sequence",
    needs=frozenset({"entropy"}),
    config=GRPOSConfig,
    compute=_compute,
    loss="grpo_s",
    aggregation="seq-mean-token-mean",
    changes=(
        "actor_rollout_ref.actor.policy_loss.seq_ratio",
        "actor_rollout_ref.actor.policy_loss.seq_clip_ratio_low",
        "actor_rollout_ref.actor.policy_loss.seq_clip_ratio_high",
    ),
    advantage_ns=11.0,
    style=Style(light="#d55e00", dark="#ff9448", marker="D"),
)
