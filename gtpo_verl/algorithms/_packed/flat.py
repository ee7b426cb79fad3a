"""Rows of a guiding policy in a batch whose rewards are shaped by entropy: a flat reward, and no share in what
entropies are compared with (docs/mixed-policy.md).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import reduce

import torch

from gtpo_verl.algorithms._packed.layout import Group, Layout, read_layout
from gtpo_verl.algorithms._packed.moments import Moments
from gtpo_verl.algorithms.normalization import Normalizer


@dataclass(frozen=True)
class FlatRows:
    """The guide's rows of a batch.

    counts: what is normalised of each row, its tokens (GTPO) or 1 (GRPO-S). rewards: (B,), read at guide rows.
    """

    groups: dict[int, Group] = field(default_factory=dict)  # by group id
    counts: Sequence[int] = ()
    rewards: Sequence[float] = ()
    ids: Sequence[int] = ()  # (B,) group ids

    def contrast(self, own: Group) -> bool:
        """Whether a group has both verdicts, its guide rows included."""
        guides = self.beside(own)
        right, wrong = own.n + guides.n, len(own.rows) - own.n + len(guides.rows) - guides.n
        return bool(right and wrong)

    def joined(self, own: Group, plus: Moments, minus: Moments) -> tuple[Moments, Moments]:
        """Moments of correct and wrong rewards of the own rows of a group, joined with those of its guide rows."""
        guides = self.beside(own)
        return self._join(plus, guides.rows[: guides.n]), self._join(minus, guides.rows[guides.n :])

    def advantages(self, own: Group, by: tuple[Normalizer, Normalizer], preserve_sign: bool) -> dict[int, float]:
        """{row: (R - mean) / (std + 1e-6)} of the guide rows of a group; by: the normalisers of correct and wrong."""
        guides = self.beside(own)
        found = {}
        for place, row in enumerate(guides.rows):
            right = place < guides.n
            normalizer = by[0] if right else by[1]
            A = (self.rewards[row] - normalizer.mean) * normalizer.scale
            if preserve_sign:
                A = max(A, 0.0) if right else min(A, 0.0)
            found[row] = A
        return found

    def beside(self, own: Group) -> Group:
        """The guide rows of the group of these own rows."""
        return self.groups.get(self.ids[own.rows[0]], _NONE) if self.groups else _NONE

    def _join(self, own: Moments, rows: Sequence[int]) -> Moments:
        return reduce(Moments.join, (Moments.constant(self.rewards[row], self.counts[row]) for row in rows), own)


_NONE = Group([], 0, 0)


def split_rows(
    response_mask: torch.Tensor,
    group: torch.Tensor,
    correct: torch.Tensor,
    guide: torch.Tensor | None,
    rewards: tuple[float, float],
    penalty: Sequence[float] | None,
    per_token: bool,
) -> tuple[Layout, FlatRows]:
    """The layout of the policy's own rows, and the guide's.

    guide: (B,) bool, or None where there is none. rewards: flat ones of correct and of wrong responses. penalty: of
    each row, added to the reward of a correct one. per_token: a row counts as often as it has tokens, else once.
    """
    if guide is None or not bool(guide.any()):
        return read_layout(response_mask, group, correct), FlatRows()
    mask = response_mask != 0
    theirs = read_layout(mask & guide[:, None], group, correct)
    ids = group.tolist()
    flat = [
        rewards[0] + (penalty[row] if penalty is not None else 0.0) if right else rewards[1]
        for row, right in enumerate(correct.tolist())
    ]
    counts = theirs.lengths if per_token else [1] * len(ids)
    groups = {ids[members.rows[0]]: members for members in theirs.groups}
    return read_layout(mask & ~guide[:, None], group, correct), FlatRows(groups, counts, flat, ids)


def fill_rows(out: torch.Tensor, values: dict[int, float], response_mask: torch.Tensor) -> None:
    """Write a value to the valid tokens of each of these rows of out (B, T)."""
    for row, value in values.items():
        out[row].copy_(response_mask[row] != 0).mul_(value)
