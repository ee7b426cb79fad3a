"""Values at the cut points of responses, and the true advantages of their steps, from two independent halves.

Notation of this package: N responses are cut into M steps at M + 1 points, the first before the first token and the
last behind the last. V(0) belongs to the prompt, V(M) is the verdict. A step's advantage is A = V(behind) -
V(before), and centred means minus the mean over the steps of the response. A response of fewer than M tokens has a step
for each of them; the other steps of its row are empty, and their advantages and credits are 0.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gtpo_verl.runs.statistics import Floats

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Values:
    """What was measured on N responses of M steps.

    halves: (2, N, M + 1) in [0, 1], V by each half of the continuations; the last column is the verdict.
    trials: (2, N, M + 1), how many continuations are behind each, at least 2; infinite where V is known.
    correct: (N,) bool, the verdicts. prompt: (N,) names; intervals resample them.
    weight: (N,) positive, 1 / the probability with which the response was chosen. steps: (N,) how many steps each has,
    at most M.
    """

    halves: Floats
    trials: Floats
    correct: Bools
    prompt: tuple[str, ...]
    weight: Floats
    steps: Ints

    @classmethod
    def of_counts(
        cls, successes: Ints, trials: Ints, correct: Bools, prompt: tuple[str, ...], weight: Floats
    ) -> "Values":
        """From numbers of correct continuations and of all: (2, N, M) at the points 0 to M - 1. Of all there are at
        least 2, and 0 behind the end of a response.
        """
        behind = np.concatenate([trials == 0, np.ones((2, len(correct), 1), bool)], axis=2)
        points = ((0, 0), (0, 0), (0, 1))
        shares = np.pad(successes / np.maximum(trials, 1), points)
        halves = np.where(behind, correct[:, None], shares)
        tried = np.where(behind, np.inf, np.pad(trials, points))
        return cls(halves, tried, correct, prompt, weight, (~behind[0]).sum(axis=1))

    @property
    def is_step(self) -> Bools:
        """Whether the response has the step, (N, M)."""
        return np.arange(self.halves.shape[2] - 1) < self.steps[:, None]

    @property
    def mean(self) -> Floats:
        """V by all continuations, (N, M + 1)."""
        return self.halves.mean(axis=0)

    @property
    def variance(self) -> Floats:
        """The unbiased estimate of the variance of `halves` as estimates, (2, N, M + 1)."""
        return self.halves * (1 - self.halves) / (self.trials - 1)

    @property
    def advantages(self) -> Floats:
        """A of each half, (2, N, M)."""
        return np.diff(self.halves, axis=2)

    @property
    def standard_error(self) -> Floats:
        """Of the mean of both halves of A, (N, M), from (successes + 1) / (trials + 2), which is never 0 or 1."""
        trials = self.trials.sum(axis=0)
        known = np.isinf(trials)
        K = np.where(known, 1.0, trials)
        v = (self.mean * K + 1) / (K + 2)
        noise = np.where(known, 0.0, v * (1 - v) / K)
        return np.sqrt(noise[:, 1:] + noise[:, :-1])

    @property
    def energy(self) -> Floats:
        """Unbiased estimates of the squares of the true advantages, (N, M): the product of the halves."""
        first, second = self.advantages
        return first * second

    @property
    def energy_of_second(self) -> Floats:
        """Unbiased estimates of the same squares by the second half alone, (N, M): its square less its variance."""
        variance = self.variance[1]
        return self.advantages[1] ** 2 - variance[:, 1:] - variance[:, :-1]


def centred(values: Floats, is_step: Bools) -> Floats:
    """Minus the mean over the steps of the response, the last axis; 0 in those it does not have."""
    mean = (values * is_step).sum(axis=-1, keepdims=True) / is_step.sum(axis=-1, keepdims=True)
    return np.where(is_step, values - mean, 0.0)


def centred_noise(values: Values) -> Floats:
    """The expected sum over the steps of the squared sampling error of centred A, for each half: (2, N).

    With s² the variances of V: 2 Σ s²(1..M-1) + s²(0) (1 - 1/M), because the error of V(0) is in the mean as well.
    """
    steps = values.is_step.sum(axis=1)
    variance = values.variance
    return 2 * variance[:, :, 1:-1].sum(axis=2) + variance[:, :, 0] * (1 - 1 / steps)
