"""The valid tokens of one group, packed together: what the mathematics works on.

The tokens of a group fit in the cache and the same memory serves every group. Even of a group trimmed to its longest response about
half is padding; without it there is less to work on, and no mask to multiply with.
"""

import math
from dataclasses import dataclass

import torch

from gtpo_verl.algorithms._packed.layout import Group, Layout

LOWEST_ENTROPY = -1e-3  # nats; bf16 round-off reaches about this far below zero
Place = slice | torch.Tensor  # the columns of the tokens of a response: indices (len,) where it has holes


@dataclass(frozen=True)
class Side:
    """The valid tokens of the responses of one polarity, one response after the other and nothing between them.

    values: (N,). rows: a view (len,) of `values` for each response. places: where they are in the batch. lengths: len of each.
    """

    values: torch.Tensor
    rows: tuple[torch.Tensor, ...]
    places: list[Place]
    lengths: list[int]

    def column_sums(self, width: int) -> torch.Tensor:
        """(width,) sum over the responses at each column."""
        sums = self.values.new_zeros(width)
        for row, place in zip(self.rows, self.places, strict=True):
            if isinstance(place, slice):
                sums[place].add_(row)
            else:
                sums.scatter_add_(0, place, row)
        return sums

    def column_counts(self, width: int) -> torch.Tensor:
        """(width,) number of responses with a token at each column."""
        whole = [length for length, place in zip(self.lengths, self.places, strict=True) if isinstance(place, slice)]
        steps = self.values.new_zeros(width + 1)
        steps.index_add_(
            0, torch.tensor(whole, dtype=torch.int64, device=steps.device), steps.new_full((len(whole),), -1.0)
        )
        steps[0] += len(whole)
        counts = steps.cumsum(0)[:width]
        for place in self.places:
            if not isinstance(place, slice):
                counts.scatter_add_(0, place, counts.new_ones(len(place)))
        return counts

    def divide_columns(self, divisors: torch.Tensor) -> None:
        """Divide every token by the divisor (width,) of its column."""
        torch._foreach_div_(self.rows, [_take(divisors, place) for place in self.places])

    def divide_rows(self, divisors: torch.Tensor) -> None:
        """Divide every token by the divisor (rows,) of its response."""
        torch._foreach_div_(self.rows, divisors.unbind())

    def row_sums(self) -> torch.Tensor:
        """(rows,) sum over the tokens of each response."""
        return torch.stack([row.sum() for row in self.rows]) if self.rows else self.values.new_zeros(0)


@dataclass(frozen=True)
class Tokens:
    """The valid tokens of one group: all `values` (N,) and those of either polarity, which are views of them."""

    values: torch.Tensor
    right: Side
    wrong: Side

    @property
    def sides(self) -> tuple[Side, Side]:
        return self.right, self.wrong

    def like(self, values: torch.Tensor) -> "Tokens":
        """Other values (N,) of the same tokens."""
        return _tokens(values, self.right.places + self.wrong.places, self.right.lengths, self.wrong.lengths)


class Scratch:
    """Reused memory for the tokens of one group, in the working type."""

    def __init__(self, layout: Layout, mask: torch.Tensor, dtype: torch.dtype) -> None:
        size = max((sum(layout.lengths[row] for row in group.rows) for group in layout.groups), default=0)
        self._values = torch.empty(size, dtype=dtype, device=mask.device)
        self._layout = layout
        self._mask_rows = mask.unbind(0)

    def load(self, group: Group, rows: tuple[torch.Tensor, ...]) -> Tokens:
        """Copy the valid tokens of a group out of the rows (T,) of a batch."""
        lengths = [self._layout.lengths[row] for row in group.rows]
        places = [self._place(row) for row in group.rows]
        tokens = _tokens(self._values[: sum(lengths)], places, lengths[: group.n], lengths[group.n :])
        sources = [_take(rows[row], place) for row, place in zip(group.rows, places, strict=True)]
        torch._foreach_copy_(tokens.right.rows + tokens.wrong.rows, sources)
        return tokens

    def _place(self, row: int) -> Place:
        end = self._layout.extents[row]
        if self._layout.lengths[row] == end:
            return slice(0, end)
        return self._mask_rows[row][:end].nonzero().squeeze(1)


def write_tokens(tokens: Tokens, group: Group, out_rows: tuple[torch.Tensor, ...]) -> None:
    """Copy the tokens of a group to their places in the rows (T,) of a batch of zeros."""
    places = tokens.right.places + tokens.wrong.places
    rows = tokens.right.rows + tokens.wrong.rows
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
    """Sums of loaded entropies, of the correct responses and of the wrong ones, after the check that all are finite and not clearly negative.

    A sum is not finite if one of its terms is not, so one pass that the metrics need anyway finds NaN and infinity.
    Raises ValueError that names row and position in the batch.
    """
    right, wrong, least = torch.stack(
        [tokens.right.values.sum(), tokens.wrong.values.sum(), tokens.values.amin()]
    ).tolist()
    lowest = torch.tensor(LOWEST_ENTROPY, dtype=entropy.dtype).item()  # -0.001 rounds downwards in float32
    if not math.isfinite(right + wrong) or least < lowest:
        _refuse_entropies(entropy, response_mask, lowest)
    return right, wrong


def clamp_entropies(values: torch.Tensor, clip: tuple[float, float] | None, floor: float) -> None:
    """The clamp and then the floor, in place and in one pass; the floor wins where they disagree."""
    if clip is None:
        values.clamp_(min=floor)
    else:
        values.clamp_(max(clip[0], floor), max(clip[1], floor))


def _tokens(values: torch.Tensor, places: list[Place], right: list[int], wrong: list[int]) -> Tokens:
    rows = values.split(right + wrong)
    n, border = len(right), sum(right)
    return Tokens(
        values,
        Side(values[:border], rows[:n], places[:n], right),
        Side(values[border:], rows[n:], places[n:], wrong),
    )


def _take(values: torch.Tensor, place: Place) -> torch.Tensor:
    return values[place] if isinstance(place, slice) else values.index_select(0, place)


def _refuse_entropies(entropy: torch.Tensor, response_mask: torch.Tensor, lowest: float) -> None:
    """Name the first offending row and position; a sum of finite entropies that overflows is no offence."""
    for row in range(len(entropy)):
        values = entropy[row]
        bad = (response_mask[row] != 0) & ~(values.isfinite() & (values >= lowest))
        if bool(bad.any()):
            position = int(bad.nonzero()[0])
            raise ValueError(
                f"entropy of row {row}, position {position} is {values[position].item()}: entropies inside the mask must be "
                f"finite and at least {LOWEST_ENTROPY} nats; check how the rollout or the actor computes them"
            )
