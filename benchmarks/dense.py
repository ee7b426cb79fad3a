"""GTPO and GRPO-S on the padded batch, for comparison: every formula is one line over all of [B, T].

A direct implementation of the specification that ignores memory. Tests compare the package with it, and benchmarks
measure the gain against it. Entropies are not checked.
"""

import torch

from gtpo_verl.algorithms import GRPOSConfig, GTPOConfig


def dense_gtpo(
    entropy: torch.Tensor,
    correct: torch.Tensor,
    response_mask: torch.Tensor,
    group: torch.Tensor,
    config: GTPOConfig,
    length_penalty: torch.Tensor | None = None,
    eps: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(advantages, shaped rewards), both (B, T). eps: of the round-off rule, by default the entropies' dtype."""
    mask = response_mask & _taking_part(correct, response_mask, group, config.degenerate)[:, None]
    values = torch.where(mask, entropy, 1.0)
    if config.entropy_clip is not None:
        values = values.clamp(*config.entropy_clip)
    values = values.clamp(min=config.entropy_floor)
    right, wrong = mask & correct[:, None], mask & ~correct[:, None]
    rewards = config.alpha1 + config.alpha2 * _weights(values, right, group, config)
    if config.clip_kappa is not None:
        rewards = rewards.clamp(1.0, config.alpha1 * (1 + 1 / config.clip_kappa))
    if length_penalty is not None:
        rewards = rewards + length_penalty.to(rewards.dtype)[:, None]
    if config.negatives == "zero":
        losses = torch.zeros_like(rewards)
    elif config.negatives == "inverse":
        losses = -_weights(1 / values, wrong, group, config)
    else:
        losses = -config.alpha1 - config.alpha2 * _weights(1 / values, wrong, group, config)
    rewards = torch.where(right, rewards, 0.0) + torch.where(wrong, losses, 0.0)
    eps = eps or torch.finfo(entropy.dtype).eps
    return _normalized(rewards, right, wrong, group, config, eps), rewards


def dense_grpo_s(
    entropy: torch.Tensor,
    correct: torch.Tensor,
    response_mask: torch.Tensor,
    group: torch.Tensor,
    config: GRPOSConfig,
    length_penalty: torch.Tensor | None = None,
    eps: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(advantages (B, T), shaped rewards (B,)): GTPO with the mean entropy of a response as its only token."""
    values = torch.where(response_mask, entropy, 1.0)
    if config.entropy_clip is not None:
        values = values.clamp(*config.entropy_clip)
    values = values.clamp(min=config.entropy_floor)
    length = response_mask.sum(1).clamp(min=1)
    if config.entropy_mean == "arithmetic":
        means = torch.where(response_mask, values, 0.0).sum(1) / length
    else:
        means = (torch.where(response_mask, values.log(), 0.0).sum(1) / length).exp()
    token = GTPOConfig(
        alpha1=config.beta1,
        alpha2=config.beta2,
        negatives=config.negatives,
        mean=config.mean,
        axis="matrix",
        scope=config.scope,
        normalization=config.normalization,
        norm_scope=config.norm_scope,
        degenerate=config.degenerate,
        preserve_sign=config.preserve_sign,
        entropy_floor=1e-30,
    )
    alive = response_mask.any(1)[:, None]
    advantages, rewards = dense_gtpo(means[:, None], correct, alive, group, token, length_penalty, eps)
    return advantages * response_mask, rewards[:, 0]


def _taking_part(
    correct: torch.Tensor, response_mask: torch.Tensor, group: torch.Tensor, degenerate: str
) -> torch.Tensor:
    alive = response_mask.any(1)
    if degenerate == "shape":
        return alive
    part = torch.zeros_like(alive)
    for ident in group.unique():
        member = (group == ident) & alive
        part |= member & bool((member & correct).any()) & bool((member & ~correct).any())
    return part


def _weights(values: torch.Tensor, member: torch.Tensor, group: torch.Tensor, config: GTPOConfig) -> torch.Tensor:
    """Each value divided by the mean of its set; arbitrary outside `member`."""
    weights = torch.zeros_like(values)
    for rows in _sets(group, config.scope):
        part, inside = values[rows], member[rows]
        dims = {"position": [0], "response": [1], "matrix": [0, 1]}[config.axis]
        count = inside.sum(dims, keepdim=True).clamp(min=1)
        if config.mean == "arithmetic":
            weights[rows] = part / (torch.where(inside, part, 0.0).sum(dims, keepdim=True) / count)
        else:
            weights[rows] = part / (torch.where(inside, part.log(), 0.0).sum(dims, keepdim=True) / count).exp()
    return weights


def _normalized(
    rewards: torch.Tensor, right: torch.Tensor, wrong: torch.Tensor, group: torch.Tensor, config: GTPOConfig, eps: float
) -> torch.Tensor:
    advantages = torch.zeros_like(rewards)
    for rows in _sets(group, config.norm_scope):
        part, plus, minus = rewards[rows], right[rows], wrong[rows]
        if config.normalization == "none":
            advantages[rows] = part
            continue
        if config.normalization == "within":
            sets = part[plus], part[minus]
        elif config.normalization == "joint":
            sets = part[plus | minus], part[plus | minus]
        else:
            sets = torch.cat([part[plus], 0 * part[minus]]), torch.cat([part[minus], 0 * part[plus]])
            if config.negatives == "zero":
                sets = sets[0], sets[0]
        plus_side, minus_side = (_scaled(part, values, eps) for values in sets)
        advantages[rows] = torch.where(plus, plus_side, 0.0) + torch.where(minus, minus_side, 0.0)
    if config.preserve_sign:
        advantages = torch.where(right, advantages.clamp(min=0), advantages.clamp(max=0))
    return advantages


def _scaled(rewards: torch.Tensor, values: torch.Tensor, eps: float) -> torch.Tensor:
    if len(values) < 2 or values.max() - values.min() <= 16 * eps * values.abs().max():
        return torch.zeros_like(rewards)
    return (rewards - values.mean()) / (values.std() + 1e-6)


def _sets(group: torch.Tensor, scope: str) -> list[torch.Tensor]:
    if scope == "batch":
        return [torch.arange(len(group), device=group.device)]
    return [(group == ident).nonzero()[:, 0] for ident in group.unique()]
