"""A batch group by group, each trimmed to its longest response, so that methods work on (G, T) tensors that fit in the
cache and no pass is made over the padding of the whole batch.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Group:
    """The G responses to one prompt, the n correct ones first; empty responses are left out.

    rows: (G,) rows of the batch. mask: (G, T) bool, T the longest end of the group. ends: (G,) one past the last valid
    column of each.
    """

    rows: torch.Tensor
    n: int
    mask: torch.Tensor
    ends: torch.Tensor

    @property
    def sides(self) -> tuple[slice, slice]:
        """The correct and the wrong responses, as indices."""
        return slice(None, self.n), slice(self.n, None)

    def take(self, values: torch.Tensor) -> torch.Tensor:
        """(G, T) of values (B, T)."""
        return values[self.rows, : self.mask.shape[1]]

    def put(self, values: torch.Tensor, out: torch.Tensor) -> None:
        """Write values (G, T), or (G, 1), to their places in out (B, T), or (B, 1)."""
        out[self.rows, : values.shape[1]] = values.to(out.dtype)


def group_rows(group: torch.Tensor) -> Iterator[torch.Tensor]:
    """The rows (n,) of each group, by ascending group id; group: (B,) integers."""
    order = group.argsort(stable=True)
    yield from order.split(group[order].unique_consecutive(return_counts=True)[1].tolist())


def groups_of(response_mask: torch.Tensor, group: torch.Tensor, correct: torch.Tensor) -> Iterator[Group]:
    """Every group that has a response with tokens.

    response_mask: (B, T), bool or any type whose zeros mean padding. group: (B,) integers. correct: (B,) bool.
    """
    if not response_mask.numel():
        return
    columns = torch.arange(1, response_mask.shape[1] + 1, dtype=torch.int32, device=response_mask.device)
    for rows in group_rows(group):
        rows = rows[(~correct[rows]).to(torch.uint8).argsort(stable=True)]
        mask = response_mask[rows] != 0
        ends = (mask * columns).amax(1)
        alive = ends > 0
        if alive.any():
            rows, ends = rows[alive], ends[alive]
            yield Group(rows, int(correct[rows].sum()), mask[alive, : int(ends.max())], ends)


def response_lengths(response_mask: torch.Tensor) -> torch.Tensor:
    """(B,) int64, the number of valid tokens of each row of a (B, T) mask of any type."""
    return (response_mask != 0).sum(1)
