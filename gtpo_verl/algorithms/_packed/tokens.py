"""The valid tokens of one group, packed together: what the formulas work on.

The tokens of a group fit in the cache and the same memory serves every group. Even of a group trimmed to its longest
response about half is padding; without it there is less to work on, and no mask to multiply with.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from gtpo_verl.algorithms._packed.layout import Group, Layout

LOWEST_ENTROPY = -1e-3  # nats; bf16 round-off reaches about this far below zero
HIGHEST_ENTROPY = 1e6  # nats; of a uniform choice from a million tokens it is 14, and sums of these stay in float32
Place = slice | torch.Tensor  # the columns of the tokens of a response: indices (len,) where it has holes


@dataclass(frozen=True)
class Side:
    """A number for each valid token of the responses of one polarity in one group, one response after the other.

    values: (N,). rows: a view (len,) of `values` per response. places: their columns in the batch. lengths: len of
    each.
    width: columns up to the longest end in the group.

    `inverse`, `over`, `affine`, `clip` and `plus` work in place: they return the same memory under the name of the
    result, and the operand is not used afterwards.
    """

    values: torch.Tensor
    rows: tuple[torch.Tensor, ...]
    places: list[Place]
    lengths: list[int]
    width: int

    def inverse(self) -> "Side":
        """1 / x of every token."""
        self.values.reciprocal_()
        return self

    def over(self, divisors: torch.Tensor, axis: str) -> "Side":
        """Every token over the divisor of its column (width,), of its response (rows,) or of the matrix ()."""
        if not self.rows:
            return self
        if axis == "position":
            torch._foreach_div_(self.rows, [_take(divisors, place) for place in self.places])
        elif axis == "response":
            torch._foreach_div_(self.rows, divisors.unbind())
        else:
            self.values.div_(divisors)
        return self

    def affine(self, base: torch.Tensor, factor: float) -> "Side":
        """base + factor * x of every token; base: ()."""
        torch.add(base, self.values, alpha=factor, out=self.values)
        return self

    def clip(self, low: float | None, high: float | None) -> "Side":
        """x of every token, brought into [low, high]."""
        self.values.clamp_(low, high)
        return self

    def plus(self, per_response: Sequence[float]) -> "Side":
        """x plus one number per response."""
        if self.rows:
            torch._foreach_add_(self.rows, list(per_response))
        return self

    def total(self, axis: str, logarithm: bool = False) -> "Total":
        """Sum and number of the tokens, or of their logarithms, in each column, in each response or in the whole
        matrix.
        """
        side = self._logs() if logarithm else self
        if axis == "position":
            return Total(side._column_sums(), side._column_counts())
        if axis == "response":
            return Total(side._row_sums(), side.values.new_tensor(side.lengths))
        return Total(side.values.sum(), side.values.new_tensor(float(len(side.values))))

    def _logs(self) -> "Side":
        values = self.values.log()
        return Side(values, values.split(self.lengths) if self.rows else (), self.places, self.lengths, self.width)

    def _row_sums(self) -> torch.Tensor:
        return torch.stack([row.sum() for row in self.rows]) if self.rows else self.values.new_zeros(0)

    def _column_sums(self) -> torch.Tensor:
        sums = self.values.new_zeros(self.width)
        for row, place in zip(self.rows, self.places, strict=True):
            if isinstance(place, slice):
                sums[place].add_(row)
            else:
                sums.scatter_add_(0, place, row)
        return sums

    def _column_counts(self) -> torch.Tensor:
        whole = [length for length, place in zip(self.lengths, self.places, strict=True) if isinstance(place, slice)]
        steps = self.values.new_zeros(self.width + 1)
        steps.index_add_(
            0, torch.tensor(whole, dtype=torch.int64, device=steps.device), steps.new_full((len(whole),), -1.0)
        )
        steps[0] += len(whole)
        counts = steps.cumsum(0)[: self.width]
        for place in self.places:
            if not isinstance(place, slice):
                counts.scatter_add_(0, place, counts.new_ones(len(place)))
        return counts


@dataclass(frozen=True)
class Total:
    """Sums and counts of values, or of their logarithms: (width,), (rows,) or ()."""

    sums: torch.Tensor
    counts: torch.Tensor

    def mean(self, logarithm: bool = False) -> torch.Tensor:
        """The arithmetic mean, or the geometric one of values whose logarithms were added; NaN where there are none."""
        mean = self.sums / self.counts  # a quotient: a single survivor then weighs exactly 1
        return mean.exp_() if logarithm else mean


@dataclass(frozen=True)
class Tokens:
    """The valid tokens of one group: all `values` (N,), and the two sides, which are views of them."""

    values: torch.Tensor
    correct: Side
    wrong: Side


class Workspace:
    """Memory for the tokens of one group, reused by all groups of a batch."""

    def __init__(self, layout: Layout, response_mask: torch.Tensor, dtype: torch.dtype) -> None:
        size = max((sum(layout.lengths[row] for row in group.rows) for group in layout.groups), default=0)
        self._values = torch.empty(size, dtype=dtype, device=response_mask.device)
        self._layout = layout
        self._mask_rows = response_mask.unbind(0)

    def load(self, group: Group, rows: tuple[torch.Tensor, ...]) -> Tokens:
        """Copy the valid tokens of a group out of the rows (T,) of a batch."""
        lengths = [self._layout.lengths[row] for row in group.rows]
        places = [self._place(row) for row in group.rows]
        values = self._values[: sum(lengths)]
        packed = values.split(lengths)
        torch._foreach_copy_(packed, [_take(rows[row], place) for row, place in zip(group.rows, places, strict=True)])
        n, border = group.n, sum(lengths[: group.n])
        return Tokens(
            values,
            Side(values[:border], packed[:n], places[:n], lengths[:n], group.width),
            Side(values[border:], packed[n:], places[n:], lengths[n:], group.width),
        )

    def _place(self, row: int) -> Place:
        end = self._layout.extents[row]
        if self._layout.lengths[row] == end:
            return slice(0, end)
        return self._mask_rows[row][:end].nonzero().squeeze(1)


def write_tokens(correct: Side, wrong: Side, group: Group, out_rows: tuple[torch.Tensor, ...]) -> None:
    """Copy the tokens of a group to their places in the rows (T,) of a batch of zeros."""
    places = correct.places + wrong.places
    rows = correct.rows + wrong.rows
    whole_targets, whole_rows = [], []
    for row, place, values in zip(group.rows, places, rows, strict=True):
        if isinstance(place, slice):
            whole_targets.append(out_rows[row][place])
            whole_rows.append(values)
        else:
            out_rows[row].scatter_(0, place, values.to(out_rows[row].dtype))
    if whole_rows:
        torch._foreach_copy_(whole_targets, whole_rows)


def check_entropies(tokens: Tokens, entropy: torch.Tensor, response_mask: torch.Tensor) -> tuple[float, float]:
    """Sums of the entropies of the correct and of the wrong responses, all found finite, not clearly negative and not
    absurd.

    A sum is not finite if one of its terms is not, so one pass that the metrics need anyway finds NaN and infinity.
    Raises ValueError that names row and position in the batch.
    """
    correct, wrong, least, most = torch.stack(
        [tokens.correct.values.sum(), tokens.wrong.values.sum(), *tokens.values.aminmax()]
    ).tolist()
    lowest = torch.tensor(LOWEST_ENTROPY, dtype=entropy.dtype).item()  # -0.001 rounds downwards in float32
    if not math.isfinite(correct + wrong) or least < lowest or most > HIGHEST_ENTROPY:
        _refuse_entropies(entropy, response_mask, lowest)
    return correct, wrong


def clamp_entropies(tokens: Tokens, clip: tuple[float, float] | None, floor: float) -> int:
    """The clamp and then the floor, in place; the floor wins where they disagree. Returns the tokens at the floor."""
    at_floor = int((tokens.values <= floor).sum())
    if clip is None:
        tokens.values.clamp_(min=floor)
    else:
        tokens.values.clamp_(max(clip[0], floor), max(clip[1], floor))
    return at_floor


def _take(values: torch.Tensor, place: Place) -> torch.Tensor:
    return values[place] if isinstance(place, slice) else values.index_select(0, place)


def _refuse_entropies(entropy: torch.Tensor, response_mask: torch.Tensor, lowest: float) -> None:
    """Name the first offending row and position."""
    for row in range(len(entropy)):
        values = entropy[row].double()  # half precision does not reach the bound
        bad = (response_mask[row] != 0) & ~((values >= lowest) & (values <= HIGHEST_ENTROPY))
        if bool(bad.any()):
            position = int(bad.nonzero()[0])
            raise ValueError(
                f"entropy of row {row}, position {position} is {values[position].item()}: entropies inside the mask "
                f"must be finite, at least {LOWEST_ENTROPY} and at most {HIGHEST_ENTROPY:g} nats; check how the "
                "rollout or the actor computes them"
            )
