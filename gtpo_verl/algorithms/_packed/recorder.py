"""The metrics that all methods share, collected group by group."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from gtpo_verl.algorithms._packed.layout import Group, Layout
from gtpo_verl.algorithms._packed.moments import Moments

TAIL = 0.9  # where the tail is looked at, as a share of the longest response


@dataclass
class Recorder:
    """Collects the metrics of a batch group by group; `metrics` names them.

    Values are weighted by tokens at token level and by responses at sequence level. Sign flips are those before
    `preserve_sign`. Degenerate groups that are left out count in `groups`, `responses`, `entropy_*`, `floor_share` and
    `tail_alive_*` alone.
    """

    layout: Layout
    correct_rewards: Moments = field(default_factory=lambda: Moments.constant(0.0, 0.0))
    wrong_rewards: Moments = field(default_factory=lambda: Moments.constant(0.0, 0.0))
    correct_flips: float = 0.0
    wrong_flips: float = 0.0
    entropy_sums: list[float] = field(default_factory=lambda: [0.0, 0.0])
    entropy_counts: list[float] = field(default_factory=lambda: [0.0, 0.0])
    tokens_at_floor: int | None = None

    def entropies(self, group: Group, sums: Sequence[float], at_floor: int | None = None) -> None:
        """Sums of the entropies of the correct and of the wrong responses of a group, and its tokens at the entropy
        floor.
        """
        if at_floor is not None:
            self.tokens_at_floor = (self.tokens_at_floor or 0) + at_floor
        for side, (total, rows) in enumerate(zip(sums, (group.rows[: group.n], group.rows[group.n :]), strict=True)):
            self.entropy_sums[side] += total
            self.entropy_counts[side] += sum(self.layout.lengths[row] for row in rows)

    def rewards(self, correct: Moments, wrong: Moments) -> None:
        """Moments of the shaped rewards of a group that takes part in the statistics."""
        self.correct_rewards = self.correct_rewards.join(correct)
        self.wrong_rewards = self.wrong_rewards.join(wrong)

    def metrics(self) -> dict[str, float]:
        """The metrics by name; a mean over nothing is left out."""
        groups = self.layout.groups
        ends = self.layout.extents
        tail = math.floor(TAIL * max(ends, default=0))
        found = {
            "groups": float(len(groups)),
            "responses": float(sum(len(g.rows) for g in groups)),
            # Responses whose last valid column lies beyond TAIL of the longest end: few survivors mean noisy weights
            # there.
            "tail_alive_correct": float(sum(ends[row] > tail for g in groups for row in g.rows[: g.n])),
            "tail_alive_wrong": float(sum(ends[row] > tail for g in groups for row in g.rows[g.n :])),
            "sign_flip_correct": self.correct_flips / max(self.correct_rewards.count, 1.0),
            "sign_flip_wrong": self.wrong_flips / max(self.wrong_rewards.count, 1.0),
        }
        if groups:
            found["degenerate_share"] = sum(g.one_polarity for g in groups) / len(groups)
        for polarity, rewards in (("correct", self.correct_rewards), ("wrong", self.wrong_rewards)):
            if rewards.count:
                found[f"shaped_{polarity}_mean"] = rewards.mean
                found[f"shaped_{polarity}_std"] = math.sqrt(rewards.m2 / max(rewards.count - 1, 1.0))
        for polarity, total, tokens in zip(("correct", "wrong"), self.entropy_sums, self.entropy_counts, strict=True):
            if tokens:
                found[f"entropy_{polarity}"] = total / tokens
        if self.tokens_at_floor is not None and any(self.entropy_counts):
            found["floor_share"] = self.tokens_at_floor / math.fsum(self.entropy_counts)
        return found
