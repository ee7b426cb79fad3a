"""From shaped rewards to advantages: A = (R - mean) / (std + 1e-6), and the sets over which mean and std are taken."""

import math
from dataclasses import dataclass
from typing import Self

import torch

STD_EPSILON = 1e-6  # added to the standard deviation, as in verl's own estimators
ROUND_OFF = 16  # a set whose range is within this many eps of its largest value differs by round-off only


@dataclass(frozen=True)
class Moments:
    """A set of numbers by its count, mean, sum of squared deviations and range; sets are joined without seeing the
    numbers again.
    """

    count: int = 0
    mean: float = 0.0
    m2: float = 0.0
    low: float = 0.0
    high: float = 0.0

    @classmethod
    def of(cls, values: torch.Tensor, mask: torch.Tensor | None = None) -> Self:
        """The moments of values of any shape, or of those inside a mask of that shape, in float64."""
        values = values.double()
        mask = torch.ones_like(values, dtype=torch.bool) if mask is None else mask
        count = int(mask.count_nonzero())
        if not count:
            return cls()
        mean = torch.where(mask, values, 0.0).sum().item() / count
        deviations = torch.where(mask, values - mean, 0.0)
        low, high, m2 = torch.stack([*deviations.aminmax(), deviations.square().sum()]).tolist()
        return cls(count, mean, m2, mean + low, mean + high)

    def join(self, other: "Moments") -> "Moments":
        """Both sets together (Chan, Golub and LeVeque): no difference of large sums, so nothing cancels."""
        if not self.count or not other.count:
            return self if self.count else other
        count = self.count + other.count
        delta = other.mean - self.mean
        return Moments(
            count,
            self.mean + delta * (other.count / count),
            self.m2 + other.m2 + delta * delta * (self.count * other.count / count),
            min(self.low, other.low),
            max(self.high, other.high),
        )

    def std(self, eps: float) -> float:
        """Unbiased standard deviation; 0 for fewer than two values and for a set that differs by round-off only.

        eps: of the type of the inputs. Without the rule 1e-6 in the denominator would magnify round-off to advantages.
        """
        if self.count < 2 or self.high - self.low <= ROUND_OFF * eps * max(abs(self.low), abs(self.high)):
            return 0.0
        return math.sqrt(self.m2 / (self.count - 1))

    def scale(self, eps: float) -> float:
        """1 / (std + 1e-6); 0 where all values are equal."""
        std = self.std(eps)
        return 1.0 / (std + STD_EPSILON) if std else 0.0

    def advantages(self, R: torch.Tensor, eps: float) -> torch.Tensor:
        """A = (R - mean) / (std + 1e-6) over this set: early eqs. 4, 16, 17, late eq. 6, DAPO eq. 9."""
        return (R - self.mean) * self.scale(eps)


def normalized_over(plus: Moments, minus: Moments, normalization: str, negatives: str) -> tuple[Moments, Moments]:
    """The sets over which the correct and the wrong rewards are normalised.

    plus, minus: moments of the shaped rewards r⁺ of correct and r⁻ of wrong tokens (GTPO) or responses (GRPO-S).
    normalization (but `none`), negatives: as in `ShapingConfig`.
    Source: arXiv 2508.04349, early eqs. 4, 16, 17 and late eq. 6; `joint` is ours.
    """
    if normalization == "within":  # late eq. 6 taken literally: each polarity alone
        return plus, minus
    if normalization == "joint":
        both = plus.join(minus)
        return both, both
    plus_and_zeros = plus.join(Moments(minus.count))  # Moments(n): of n zeros
    if negatives == "zero":  # early eq. 4: one set, in which wrong tokens have r = 0
        return plus_and_zeros, plus_and_zeros
    return plus_and_zeros, minus.join(Moments(plus.count))  # early eqs. 16, 17: a 0 for each token of the other side
