"""Mean and standard deviation of sets of rewards, joined without seeing the rewards again."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch

from gtpo_verl.algorithms._packed.tokens import Side

STD_EPSILON = 1e-6  # added to the standard deviation, as in verl's own estimators
ROUND_OFF = 16  # a set whose range is within this many eps of its largest value differs by round-off only


@dataclass(frozen=True)
class Moments:
    """A set of numbers by its count, mean, sum of squared deviations and range; sets are joined without seeing the
    numbers again.
    """

    count: float
    mean: float
    m2: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Self:
        """The moments of single values."""
        if not values:
            return cls(0.0, 0.0, 0.0, 0.0, 0.0)
        mean = math.fsum(values) / len(values)
        return cls(len(values), mean, math.fsum((v - mean) ** 2 for v in values), min(values), max(values))

    @classmethod
    def constant(cls, value: float, count: float) -> Self:
        """A set of `count` equal values."""
        return cls(count, value, 0.0, value, value)

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

        eps: of the type the values were computed in. Without the rule 1e-6 in the denominator would magnify round-off
        to advantages.
        """
        if self.count < 2 or self.high - self.low <= ROUND_OFF * eps * max(abs(self.low), abs(self.high)):
            return 0.0
        return math.sqrt(self.m2 / (self.count - 1))

    def scale(self, eps: float) -> float:
        """1 / (std + 1e-6), or 0 where the standard deviation is 0: the advantage of a set without differences is 0."""
        std = self.std(eps)
        return 1.0 / (std + STD_EPSILON) if std else 0.0


def center(side: Side) -> Moments:
    """Subtract the mean of one polarity from all its tokens, in place; returns the moments of what they were.

    Squares are taken of centred values, so nothing cancels. They are added up, not multiplied as a norm: in float32 the
    error of a norm grows with the number of tokens, that of a sum does not.
    """
    if not side.rows:
        return Moments.constant(0.0, 0.0)
    mean = math.fsum(side.total("response").sums.tolist()) / len(side.values)
    side.values.sub_(mean)
    low, high, squares = torch.stack([*side.values.aminmax(), side.values.square().sum()]).tolist()
    if math.isinf(squares):  # beyond float32, as with a floor of 1e-30 nats
        squares = side.values.double().square().sum().item()
    return Moments(len(side.values), mean, squares, mean + low, mean + high)
