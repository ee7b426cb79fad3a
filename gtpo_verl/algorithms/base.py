"""What the methods written on padded (B, T) tensors share: DAPO's advantage, what they read of a batch, and statistics
over a scope.

Notation of all of them: A0 is DAPO's advantage, H the entropy in nats, π the probability of the sampled token. All are
of the old policy, have no gradient, and are 0 outside the mask. A method turns A0 into A.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Literal

import torch

from gtpo_verl.algorithms.batch import AdvantageOutput, Batch
from gtpo_verl.algorithms.checks import check_entropies, check_finite
from gtpo_verl.algorithms.groups import group_rows
from gtpo_verl.algorithms.grpo import DAPO

CHANGED = 1e-5  # of A0, what is more than round-off
Scope = Literal["batch", "group", "response"]


def dtype_of(batch: Batch) -> torch.dtype:
    """float64 for a batch with float64 rewards, else float32: the type of advantages."""
    exact = batch.rewards is not None and batch.rewards.dtype == torch.float64
    return torch.float64 if exact else torch.float32


def penalised_reward(batch: Batch) -> torch.Tensor:
    """R (B,): the reward with the length penalty. Raises ValueError for one that is not finite, or too large."""
    assert batch.rewards is not None
    R = batch.rewards.detach().to(dtype_of(batch))
    if batch.length_penalty is not None:
        R = R + batch.length_penalty.to(R.dtype)
    check_finite("reward", R, (batch.response_mask != 0).any(1).nonzero().squeeze(1))
    return R


def dapo_advantages(batch: Batch) -> torch.Tensor:
    """A0 (B, T): that of the batch, or DAPO's, (R - mean) / (std + 1e-6) of the group, R with the length penalty."""
    if batch.A0 is not None:
        return torch.where(batch.response_mask != 0, batch.A0, 0.0)
    return DAPO.advantages(replace(batch, entropy=None)).advantages  # its metrics are not wanted


def entropies(batch: Batch) -> torch.Tensor:
    """H (B, T), at least float32; round-off below 0 is 0. Raises ValueError for one that cannot be an entropy."""
    assert batch.entropy is not None
    H = torch.where(batch.response_mask != 0, _at_least_float32(batch.entropy.detach()), 0.0)
    check_entropies(H, range(len(H)), batch.entropy.dtype)
    return H.clamp(min=0)


def log_probs(batch: Batch) -> torch.Tensor:
    """log π (B, T), at least float32; round-off above 0 is 0. Raises ValueError for one that is not finite."""
    assert batch.old_log_probs is not None
    mask = batch.response_mask != 0
    values = torch.where(mask, _at_least_float32(batch.old_log_probs.detach()), 0.0)
    if not bool(values.isfinite().all()):
        row, position = (~values.isfinite()).nonzero()[0].tolist()
        raise ValueError(f"old_log_probs of row {row}, position {position} is {values[row, position].item()}")
    return values.clamp(max=0)


def _at_least_float32(values: torch.Tensor) -> torch.Tensor:
    """Sums and quotients of half precision leave its range at 65,504."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def response_means(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """(B, 1): the mean of the valid tokens of each response of values (B, T); 0 for an empty one."""
    return torch.where(mask, values, 0.0).sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)


def scopes(batch: Batch, scope: str) -> Iterator[slice | torch.Tensor]:
    """The rows of the whole `batch`, of each `group`, or of each `response`, as an index."""
    if scope == "batch":
        yield slice(None)
    elif scope == "group":
        yield from group_rows(batch.group)
    else:
        yield from (slice(row, row + 1) for row in range(len(batch.group)))


def over_scope(
    values: torch.Tensor, batch: Batch, scope: str, statistic: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """(B, 1): a statistic, (N,) to (), of the valid tokens of values (B, T) in a row's scope; 0 without tokens."""
    mask = batch.response_mask != 0
    found = values.new_zeros(len(values), 1)
    for rows in scopes(batch, scope):
        tokens = values[rows][mask[rows]]
        if len(tokens):
            found[rows] = statistic(tokens)
    return found


def quantile(values: torch.Tensor, q: float) -> torch.Tensor:
    """The q-quantile () of values (N,), interpolated; `torch.quantile` refuses more than 16 million values."""
    place = q * (len(values) - 1)
    below = math.floor(place)
    low = values.kthvalue(below + 1).values
    high = values.kthvalue(min(below + 2, len(values))).values
    return torch.lerp(low, high, place - below)


def highest(values: torch.Tensor, among: torch.Tensor, share: float) -> torch.Tensor:
    """(B, T) bool: the ⌈share · N⌉ highest of the N values that `among` (B, T) marks, of equal ones the first."""
    candidates = values[among]
    k = math.ceil(share * len(candidates) - 1e-9)  # 0.1 · 30 is a little more than 3
    chosen = torch.zeros_like(candidates, dtype=torch.bool)
    chosen[candidates.sort(descending=True, stable=True).indices[:k]] = True
    return torch.zeros_like(among).masked_scatter_(among, chosen)


def output(A: torch.Tensor, A0: torch.Tensor, batch: Batch, kept: torch.Tensor | None = None) -> AdvantageOutput:
    """The result of a method, with the shares of tokens changed and `kept` (B, T), and the factors on the mean |A|."""
    mask = batch.response_mask != 0
    tokens = max(int(mask.sum()), 1)
    A = torch.where(mask, A, 0.0)
    changed = (A - A0).abs_() > CHANGED * A0.abs() + CHANGED**2
    metrics = {"changed_share": changed.sum().item() / tokens}
    for polarity, rows in (("correct", batch.correct), ("wrong", ~batch.correct)):
        before = A0[rows].abs().sum().item()
        if before > 0:
            metrics[f"factor_{polarity}"] = A[rows].abs().sum().item() / before
    if kept is not None:
        metrics["kept_share"] = (kept & mask).sum().item() / tokens
    return AdvantageOutput(A, None, metrics)
