"""The clipped surrogates: per token (DAPO, GTPO) and per sequence (GRPO-S, GSPO), and variants of the former that treat
clipped tokens otherwise (CE-GPPO, ASPO), have a clip range for each (DCPO), or rows of a guiding policy (mixed).

All return losses that are not yet averaged, so that whoever calls them decides over which batch the mean goes, and
metrics as tensors without gradient. Masked positions may hold anything, NaN included, and receive no gradient.
"""

import torch

# The ratio of a token enters as exp(log ratio); beyond e^20 it is a numerical accident, and verl cuts it there as well.
LOG_RATIO_BOUND = 20.0

Metrics = dict[str, torch.Tensor]
Epsilon = float | torch.Tensor


def token_loss(
    log_prob: torch.Tensor,
    old_log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    clip_ratio_low: Epsilon = 0.2,
    clip_ratio_high: Epsilon = 0.28,
    clip_ratio_c: float | None = None,
) -> tuple[torch.Tensor, Metrics]:
    """Per-token clipped surrogate: -min(w A, clip(w, 1 - ε_low, 1 + ε_high) A), with w = π_θ / π_old.

    log_prob, old_log_prob, advantages, response_mask: (B, T); the gradient reaches `log_prob` alone.
    clip_ratio_low, clip_ratio_high: ε, or one for each token (B, T).
    clip_ratio_c: dual clip, an upper bound c of w where A < 0 (loss <= -c A), above 1, or None.
    Returns the losses (B, T), 0 outside the mask, and the metrics of `_metrics` over tokens, with `clipfrac_lower` for
    the dual clip.
    Raises ValueError for impossible clip ratios.
    Source: DAPO (arXiv 2503.14476) eq. 8; GTPO (arXiv 2508.04349) uses it with shaped advantages, under a number that
    is not identified (docs/reference/equations.md); dual clip arXiv 1912.09729. A training has verl's own, `vanilla`.
    """
    if clip_ratio_c is not None and clip_ratio_c <= 1:
        raise ValueError(f"clip_ratio_c (dual clip) must be above 1, got {clip_ratio_c}")
    mask = response_mask != 0
    A = torch.where(mask, advantages, 0.0).detach()
    log_ratio = _log_ratio(log_prob, old_log_prob, mask)
    losses, metrics = _clipped(log_ratio.exp(), A, mask, clip_ratio_low, clip_ratio_high)
    metrics["ppo_kl"] = _mean(-log_ratio.detach(), mask)
    metrics["clipfrac_lower"] = torch.zeros_like(metrics["ppo_kl"])
    if clip_ratio_c is not None:
        bound = -A * clip_ratio_c
        metrics["clipfrac_lower"] = _mean(((losses > bound) & (A < 0)).to(losses.dtype), mask)
        losses = torch.where(A < 0, torch.minimum(losses, bound), losses)
    return losses, metrics


def sequence_loss(
    log_prob: torch.Tensor,
    old_log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    clip_ratio_low: float = 0.2,
    clip_ratio_high: float = 0.28,
    ratio: str = "arithmetic",
) -> tuple[torch.Tensor, Metrics]:
    """Per-sequence clipped surrogate: -min(ŵ A, clip(ŵ, 1 - ε_low, 1 + ε_high) A).

    log_prob, old_log_prob, response_mask: (B, T). advantages: (B,), one a response.
    ratio: ŵ is the `arithmetic` mean of the token ratios (GRPO-S), or the `geometric` one (GSPO's); the gradient goes
    through it.
    Returns the losses (B,), 0 for an empty response, and the metrics of `_metrics` over responses.
    Raises ValueError for impossible clip ratios or an unknown `ratio`.
    Source: arXiv 2508.04349, objective of GRPO-S; geometric: GSPO (arXiv 2507.18071) eq. 7.
    """
    if ratio not in ("arithmetic", "geometric"):
        raise ValueError(f"ratio must be arithmetic or geometric, got {ratio!r}")
    mask = response_mask != 0
    alive = mask.any(dim=1)
    A = torch.where(alive, advantages, 0.0).detach()
    log_ratio = _log_ratio(log_prob, old_log_prob, mask)
    losses, metrics = _clipped(_sequence_ratios(log_ratio, mask, ratio), A, alive, clip_ratio_low, clip_ratio_high)
    metrics["ppo_kl"] = _mean(-log_ratio.detach(), mask)
    return losses, metrics


def ce_gppo_loss(
    log_prob: torch.Tensor,
    old_log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    clip_ratio_low: float = 0.2,
    clip_ratio_high: float = 0.2,
    clip_ratio_c: float | None = None,
    beta1: float = 0.75,
    beta2: float = 1.0,
) -> tuple[torch.Tensor, Metrics]:
    """`token_loss` whose clipped tokens keep a gradient: β1 (1 - ε_low) A ∇log π for A < 0, w < 1 - ε_low, and
    β2 (1 + ε_high) A ∇log π for A > 0, w > 1 + ε_high.

    Arguments, metrics and errors as for `token_loss`; beta1, beta2: at least 0, and with both 0 the gradient is that of
    `token_loss`. Source: CE-GPPO (arXiv 2509.20712).
    """
    if beta1 < 0 or beta2 < 0:
        raise ValueError(f"beta1 and beta2 must not be negative, got {beta1} and {beta2}")
    losses, metrics = token_loss(
        log_prob, old_log_prob, advantages, response_mask, clip_ratio_low, clip_ratio_high, clip_ratio_c
    )
    ratio, A = _ratio_and_advantages(log_prob, old_log_prob, advantages, response_mask)
    one = ratio / ratio.detach()  # 1, and its gradient is that of log π
    losses = torch.where((A < 0) & (ratio < 1 - clip_ratio_low), -beta1 * (1 - clip_ratio_low) * A * one, losses)
    losses = torch.where((A > 0) & (ratio > 1 + clip_ratio_high), -beta2 * (1 + clip_ratio_high) * A * one, losses)
    return losses, metrics


def aspo_loss(
    log_prob: torch.Tensor,
    old_log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    clip_ratio_low: float = 0.2,
    clip_ratio_high: float = 0.2,
    clip_ratio_c: float = 3.0,
) -> tuple[torch.Tensor, Metrics]:
    """Asymmetric importance sampling: the gradient is A c ∇log π, with c = 1/w for A > 0 and c = w for A < 0, at most
    `clip_ratio_c`, and 0 where `token_loss` clips: A > 0, w > 1 + ε_high, or A < 0, w < 1 - ε_low.

    Arguments, metrics and errors as for `token_loss`; clip_ratio_c bounds c without cutting the gradient off.
    Source: ASPO (arXiv 2510.06062), as the code of Archer 2.0 has it, without its clip ranges by entropy.
    """
    mask = response_mask != 0
    ratio, A = _ratio_and_advantages(log_prob, old_log_prob, advantages, response_mask)
    w = ratio.detach()
    of_credit = torch.where(w <= 1 + clip_ratio_high, (1 / w).clamp(max=clip_ratio_c), 0.0)
    of_blame = torch.where(w >= 1 - clip_ratio_low, w.clamp(max=clip_ratio_c), 0.0)
    losses = -A * torch.where(A > 0, of_credit, of_blame) * ratio / w
    metrics = _metrics(ratio, A, mask, clip_ratio_low, clip_ratio_high)
    metrics["ppo_kl"] = _mean(-w.log(), mask)
    return losses, metrics


def dcpo_clip_ranges(
    old_log_prob: torch.Tensor, clip_ratio_low: float, clip_ratio_high: float, clip_ratio_c: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Bounds of w (B, T) by the old probability π: from ½(1 + √max(0, 1 - 4 ε_low/π)) to ½(1 + √(1 + 4 ε_high/π)), the
    latter at most max(c, 10).

    Source: DCPO (arXiv 2509.02333); its smoothed advantage needs the history of a prompt and is not here.
    """
    inverse = (-old_log_prob).clamp(max=2 * LOG_RATIO_BOUND).exp()
    low = 0.5 + 0.5 * (1 - 4 * clip_ratio_low * inverse).clamp(min=0).sqrt()
    high = 0.5 + 0.5 * (1 + 4 * clip_ratio_high * inverse).sqrt()
    return low, high.clamp(max=max(clip_ratio_c or 0.0, 10.0))


def dcpo_clip_loss(
    log_prob: torch.Tensor,
    old_log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    clip_ratio_low: float = 0.16,
    clip_ratio_high: float = 0.2,
    clip_ratio_c: float | None = None,
) -> tuple[torch.Tensor, Metrics]:
    """`token_loss` with the range of each token from `dcpo_clip_ranges`: improbable tokens may move further."""
    _check_clip(clip_ratio_low, clip_ratio_high)
    old = torch.where(response_mask != 0, old_log_prob.detach(), 0.0)
    low, high = dcpo_clip_ranges(old, clip_ratio_low, clip_ratio_high, clip_ratio_c)
    return token_loss(log_prob, old_log_prob, advantages, response_mask, 1 - low, high - 1, clip_ratio_c)


def mixed_loss(
    log_prob: torch.Tensor,
    old_log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    guide: torch.Tensor,
    clip_ratio_low: float = 0.2,
    clip_ratio_high: float = 0.28,
    clip_ratio_c: float | None = None,
    clip: str = "dapo",
    shape_gamma: float | None = None,
    ratio: str = "token",
) -> tuple[torch.Tensor, Metrics]:
    """`token_loss`, or `sequence_loss`, on own rows; on guide rows the same (`clip=dapo`), or -r̂ A without a clip, or
    with the shaping -f(r̂) A, f(r̂) = r̂ / (r̂ + γ).

    log_prob, old_log_prob, advantages, response_mask: as for that loss; `old_log_prob` is the denominator: of own rows
    the old policy's, of guide rows what `GuideConfig.ratio` says, 0 for π_φ = 1. guide: (B,) bool.
    clip_ratio_low, clip_ratio_high, clip_ratio_c: as for that loss. clip, shape_gamma: as in `GuideConfig`.
    ratio: `token` for `token_loss`, else the `ratio` of `sequence_loss`.
    Returns the losses, (B, T) or (B,), 0 outside the mask, and the metrics over own rows.
    Raises ValueError for impossible clip ratios.
    Source: inferred for arXiv 2507.12931; the shaping and eq. 4, after which it is inferred, are LUFFY's (arXiv
    2504.14945). docs/guides/mixed-policy.md.
    """
    mask = response_mask != 0
    on_guide = guide[:, None] & mask

    def clipped(among: torch.Tensor) -> tuple[torch.Tensor, Metrics]:
        if ratio == "token":
            return token_loss(log_prob, old_log_prob, advantages, among, clip_ratio_low, clip_ratio_high, clip_ratio_c)
        return sequence_loss(log_prob, old_log_prob, advantages, among, clip_ratio_low, clip_ratio_high, ratio)

    losses, metrics = clipped(mask & ~on_guide)
    guided = on_guide if ratio == "token" else on_guide.any(1)
    if clip == "dapo":
        of_guide, _ = clipped(on_guide)
    else:
        log_ratio = _log_ratio(log_prob, old_log_prob, on_guide)
        r = log_ratio.exp() if ratio == "token" else _sequence_ratios(log_ratio, on_guide, ratio)
        if shape_gamma is not None:
            r = r / (r + shape_gamma)
        of_guide = -torch.where(guided, advantages, 0.0).detach() * r
    return torch.where(guided, of_guide, losses), metrics


def _sequence_ratios(log_ratio: torch.Tensor, mask: torch.Tensor, ratio: str) -> torch.Tensor:
    """ŵ (B,): the arithmetic or geometric mean of the token ratios of a response."""
    divisor = mask.sum(dim=1).clamp(min=1)
    if ratio == "arithmetic":
        return torch.where(mask, log_ratio.exp(), 0.0).sum(dim=1) / divisor
    return (log_ratio.sum(dim=1) / divisor).exp()


def _clipped(
    ratio: torch.Tensor, A: torch.Tensor, mask: torch.Tensor, low: Epsilon, high: Epsilon
) -> tuple[torch.Tensor, Metrics]:
    """-min(w A, clip(w, 1 - ε_low, 1 + ε_high) A) of tokens (B, T) or sequences (B,), and its metrics."""
    metrics = _metrics(ratio, A, mask, low, high)
    clipped = ratio.clamp(1 - low, 1 + high)  # type: ignore[arg-type]  # numbers or tensors
    return torch.maximum(-A * ratio, -A * clipped), metrics


def _ratio_and_advantages(
    log_prob: torch.Tensor, old_log_prob: torch.Tensor, advantages: torch.Tensor, response_mask: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """w, 1 outside the mask, and A, 0 there."""
    mask = response_mask != 0
    return _log_ratio(log_prob, old_log_prob, mask).exp(), torch.where(mask, advantages, 0.0).detach()


def _log_ratio(log_prob: torch.Tensor, old_log_prob: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """log w inside the mask and 0 elsewhere."""
    return torch.where(mask, log_prob - old_log_prob.detach(), 0.0).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def _metrics(ratio: torch.Tensor, A: torch.Tensor, mask: torch.Tensor, low: Epsilon, high: Epsilon) -> Metrics:
    """Shares of entries where the clip binds, mean of the ratio, and its root mean square distance from 1."""
    _check_clip(low, high)
    with torch.no_grad():
        below = ((ratio < 1 - low) & (A < 0)).to(ratio.dtype)
        above = ((ratio > 1 + high) & (A > 0)).to(ratio.dtype)
        return {
            "clipfrac": _mean(below + above, mask),
            "clipfrac_low": _mean(below, mask),
            "clipfrac_high": _mean(above, mask),
            "ratio_mean": 1 + _mean(ratio - 1, mask),
            "ratio_spread": _mean((ratio - 1).square(), mask).sqrt(),
        }


def _mean(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Mean inside the mask, 0 where it is empty."""
    return torch.where(mask, values, 0.0).sum() / mask.sum().clamp(min=1)


def _check_clip(low: Epsilon, high: Epsilon) -> None:
    if not isinstance(low, torch.Tensor) and not 0 <= low <= 1:
        raise ValueError(f"the lower clip ratio must be in [0, 1], got {low}")
    if not isinstance(high, torch.Tensor) and high < 0:
        raise ValueError(f"the upper clip ratio must not be negative, got {high}")
