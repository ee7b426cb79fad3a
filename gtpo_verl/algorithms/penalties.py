"""Penalties of long correct responses: soft overlong (early eq. 14, DAPO eq. 13) and group-relative (late appendix
D).
"""

from collections.abc import Callable
from typing import Any

import torch

from gtpo_verl.algorithms.batch import AdvantageOutput, Batch
from gtpo_verl.algorithms.checks import check_bool, check_group_type
from gtpo_verl.algorithms.config import ShapingConfig, check, check_gamma, choice
from gtpo_verl.algorithms.groups import response_lengths


def soft_overlong_penalty(
    lengths: torch.Tensor, max_length: int = 20480, cache_length: int = 4096, denominator: str = "cache"
) -> torch.Tensor:
    """Soft overlong penalty: 0 up to L = L2 - L1 tokens, then falling, -1 beyond L2.

    lengths: (B,) tokens. max_length: L2. cache_length: L1.
    denominator: of the slope; `cache` divides by L1 and reaches -1 at L2, `max` divides by L2 as the early text prints
    it and jumps there.
    Returns (B,) in [-1, 0], float64 for integer lengths, else the dtype of `lengths`.
    Raises ValueError unless 0 < cache_length <= max_length.
    Source: DAPO (arXiv 2503.14476) eq. 13; arXiv 2508.04349, early eq. 14.
    """
    choice("denominator", denominator, ("cache", "max"))
    check("max_length", max_length, int)
    check("cache_length", cache_length, int)
    if cache_length > max_length:
        raise ValueError(f"cache_length must not exceed max_length, got {cache_length} > {max_length}")
    exact = lengths if lengths.is_floating_point() else lengths.double()
    free = max_length - cache_length  # L2 - L1
    slope = (free - exact) / (cache_length if denominator == "cache" else max_length)
    return torch.where(exact > max_length, torch.full_like(exact, -1.0), slope.clamp(max=0.0))


def group_relative_overlong_penalty(
    lengths: torch.Tensor, correct: torch.Tensor, group: torch.Tensor, gamma: float = 0.75
) -> torch.Tensor:
    """Group-relative overlong penalty (GROP): correct responses far beyond the knee of their group lose up to 1/2.

    lengths: (B,) tokens, 0 for an empty row, which counts nowhere. correct: (B,) bool. group: (B,) integers. gamma: γ1
    in (0.5, 1]. Easy groups (share of correct >= γ1) take the knee K = max((shortest + longest)/2, mean) from the
    correct lengths, hard ones (share <= 1 - γ1) are not penalised, those in between take K from all lengths when most
    are correct and are else not penalised.
    Returns (B,) in [-0.5, 0]: 0 below K, -(len - K)/(2K) up to 2K, then -1/2; 0 for wrong responses. float64 for
    integer lengths.
    Source: arXiv 2508.04349, late appendix D.
    """
    check_gamma(gamma)
    check_group_type(group)
    check_bool("correct", correct)
    for name, tensor in (("correct", correct), ("group", group)):
        if tensor.shape != lengths.shape:
            raise ValueError(f"{name} must have the shape of lengths {tuple(lengths.shape)}, got {tuple(tensor.shape)}")
    exact = lengths if lengths.is_floating_point() else lengths.double()
    penalty = torch.zeros_like(exact)
    for ident in group.unique():
        member = (group == ident) & (exact > 0)
        right = member & correct
        n, size = int(right.sum()), int(member.sum())
        if n == 0:
            continue
        share = n / size
        if share >= gamma - 1e-9:
            compared = exact[right]
        elif share > 1 - gamma + 1e-9 and 2 * n > size:
            compared = exact[member]
        else:
            continue
        knee = torch.maximum((compared.min() + compared.max()) / 2, compared.mean())
        penalty[right] = -0.5 * ((exact[right] - knee) / knee).clamp(0.0, 1.0)
    return penalty


def length_penalty_for(
    config: ShapingConfig,
    lengths: torch.Tensor,
    correct: torch.Tensor,
    group: torch.Tensor,
    max_length: int = 20480,
    cache_length: int = 4096,
) -> torch.Tensor | None:
    """The penalty that `config.length_penalty` names, for the `length_penalty` argument of the advantage functions.

    lengths (B,), correct (B,) and group (B,) as in `group_relative_overlong_penalty`; max_length and cache_length, of
    the soft penalty, as in `soft_overlong_penalty`. Returns (B,), or None for `none`.
    """
    if config.length_penalty == "soft":
        return soft_overlong_penalty(lengths, max_length, cache_length, config.length_denominator)
    if config.length_penalty == "grop":
        return group_relative_overlong_penalty(lengths, correct, group, config.gamma)
    return None


def of_batch(advantages: Callable[..., AdvantageOutput]) -> Callable[[Batch, Any], AdvantageOutput]:
    """`gtpo_advantages` or `grpo_s_advantages` of a `Batch`, with its length penalty or else the one of the config."""

    def compute(batch: Batch, config: ShapingConfig) -> AdvantageOutput:
        mask, correct, group, penalty = batch.response_mask, batch.correct, batch.group, batch.length_penalty
        if penalty is None:
            penalty = length_penalty_for(config, response_lengths(mask), correct, group)
        return advantages(batch.entropy, correct, mask, group, config, penalty, guide=batch.guide)

    return compute
