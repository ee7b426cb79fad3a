"""An arm against the baseline over several training seeds: paired differences, intervals, tests and their limits.

Functions of differences take arrays of shape (..., n), the n seeds last, and treat the leading axes as independent data
sets, as the simulations behind `docs/guides/sweeps.md` did. The bootstrap over prompts of `gtpo_verl.runs.statistics`
is not used over seeds: a percentile interval of five values covers about 84 %.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import optimize, stats

from gtpo_verl.runs.statistics import CONFIDENCE, Floats, Interval

ALPHA = 1 - CONFIDENCE
POWER = 0.8  # of the difference that a design is said to be able to show
MOST_FLIPPED = 20  # seeds up to which the sign-flip test enumerates every assignment: 2^20 of them
SKEWED = 1.0  # from this skewness of the differences on, the report warns about Student's interval

_ROUNDING = 1e-12  # accuracies are fractions of small integers; sums of them differ by less than this


@dataclass(frozen=True)
class Paired:
    """An arm minus the baseline, paired by seed.

    differences: one per seed. mean, interquartile_mean: of them. interval: Student's, of the mean; None where it cannot
    be estimated (one seed, or no spread). It, the t test and what is detectable rest on the spread within starts, where
    one start has several seeds. better: probability of improvement, the share of seeds on which the arm is
    above the baseline, ties half. t_p, sign_flip_p: two-sided; None as above, or above 20 seeds. skewness: of the
    differences; None below three seeds. detectable: the true difference that the t test would show with probability 0.8
    at this spread, at the level that Holm's procedure asks of the smallest p; detectable_at_most: the same at the upper
    bound of the 95 % interval of the standard deviation, of which few seeds say little. t_holm, sign_flip_holm: the p
    values, adjusted for all comparisons of the report.
    """

    differences: tuple[float, ...]
    mean: float
    interquartile_mean: float
    interval: Interval | None
    better: float
    t_p: float | None
    sign_flip_p: float | None
    skewness: float | None
    detectable: float | None
    detectable_at_most: float | None
    t_holm: float | None = None
    sign_flip_holm: float | None = None

    @property
    def seeds(self) -> int:
        return len(self.differences)

    @property
    def shown(self) -> bool:
        """Whether the t test, adjusted for the number of comparisons, shows a difference."""
        return self.t_holm is not None and self.t_holm <= ALPHA


def student_bounds(values: Floats) -> tuple[Floats, Floats]:
    """Student's 95 % interval of the mean of each data set (..., n), n at least 2: lower and upper bounds (...)."""
    half = stats.t.ppf((1 + CONFIDENCE) / 2, values.shape[-1] - 1) * stats.sem(values, axis=-1)
    mean = values.mean(axis=-1)
    return mean - half, mean + half  # scipy's own interval is nan where all values are equal


def crossed_interval(differences: Floats) -> Interval | None:
    """An interval of the mean of (S, P) paired differences for other seeds and other prompts, both drawn at random.

    The variance of the mean is (MS_seeds + MS_prompts - MS_residual) / (S P), the mean squares those of a two-way
    analysis of variance without replication, and its degrees of freedom are Satterthwaite's (1946). It is at least
    that of seeds alone, MS_seeds / (S P). None for fewer than two seeds or prompts, or without spread.
    """
    seeds, prompts = differences.shape
    if min(seeds, prompts) < 2 or not _has_spread(differences.ravel()):
        return None
    mean, by_seed, by_prompt = differences.mean(), differences.mean(axis=1), differences.mean(axis=0)
    residuals = differences - by_seed[:, None] - by_prompt + mean
    free = np.array([seeds - 1, prompts - 1, (seeds - 1) * (prompts - 1)])
    sums = [prompts * ((by_seed - mean) ** 2).sum(), seeds * ((by_prompt - mean) ** 2).sum(), (residuals**2).sum()]
    of_seeds, of_prompts, rest = np.array(sums) / free
    squares = np.array([of_seeds, of_prompts, rest]) if of_prompts > rest else np.array([of_seeds, 0.0, 0.0])
    total = squares[0] + squares[1] - squares[2]
    if total <= 0:
        return None
    half = stats.t.ppf(1 - ALPHA / 2, total**2 / (squares**2 / free).sum()) * math.sqrt(total / differences.size)
    return Interval(float(mean - half), float(mean + half))


def student_interval(values: Sequence[float]) -> Interval | None:
    """`student_bounds` of one data set; None for a single value, or values without spread."""
    if not _has_spread(values):
        return None
    low, high = student_bounds(np.asarray(values, dtype=np.float64))
    return Interval(float(low), float(high))


def sign_flip_p(differences: Floats) -> Floats:
    """Exact two-sided p of the sign-flip test for each data set.

    p is the share of the 2^n assignments of signs, each equally likely under the null hypothesis, whose sum is at least
    as far from 0 as the observed one (Fisher 1935). differences: (..., n); returns (...). Raises ValueError: n is above
    `MOST_FLIPPED`, which are too many to enumerate.
    """
    n = differences.shape[-1]
    if n > MOST_FLIPPED:
        raise ValueError(f"{n} seeds have 2^{n} assignments of signs: at most {MOST_FLIPPED} seeds are enumerated")
    # negating every sign leaves the distance from 0 as it is: the first sign can stay
    signs = np.array([(1, *rest) for rest in itertools.product((1.0, -1.0), repeat=n - 1)])
    distances = np.abs(differences @ signs.T)
    observed = np.abs(differences.sum(axis=-1, keepdims=True))
    return (distances >= observed - _ROUNDING).mean(axis=-1)


def least_sign_flip_p(n: int) -> float:
    """The smallest p that the sign-flip test can give for n seeds, where all differences have one sign: 2 / 2^n."""
    return 2.0 ** (1 - n)


def holm(p_values: ArrayLike) -> Floats:
    """p values (m,) adjusted for their number by Holm's step-down procedure (1979).

    Rejecting where the adjusted p is at most α keeps the probability of any false rejection at or below α.
    """
    p = np.asarray(p_values, dtype=np.float64)
    order = np.argsort(p)
    adjusted = np.minimum(np.maximum.accumulate(p[order] * np.arange(len(p), 0, -1)), 1.0)
    return adjusted[np.argsort(order)]


def detectable_difference(deviation: float, n: int, comparisons: int = 1, free: int | None = None) -> float:
    """The true difference that a t test over n >= 2 seeds shows with probability `POWER`, by the noncentral t
    distribution, at the level α / comparisons, which Holm's procedure asks of the smallest p; from the standard
    deviation of the paired differences and its degrees of freedom, n - 1 by default.
    """
    free = n - 1 if free is None else free
    critical = stats.t.ppf(1 - ALPHA / comparisons / 2, free)

    def lacking(shift: float) -> float:
        return float(stats.nct.sf(critical, free, shift)) - POWER  # in the right direction

    shift = optimize.brentq(lacking, 0.0, 2 * critical + 2)
    return float(shift * deviation / math.sqrt(n))


def deviation_at_most(deviation: float, free: int) -> float:
    """Upper bound of the 95 % interval of a standard deviation of normal values with so many degrees of freedom, by the
    chi-square distribution.
    """
    return deviation * math.sqrt(free / float(stats.chi2.ppf(ALPHA / 2, free)))


def spread_within(differences: Floats, starts: Sequence[str | None]) -> tuple[float, int]:
    """Standard deviation of differences (n,) around the mean of their start, and its degrees of freedom; around that of
    all where no start has two.
    """
    _, place = np.unique([str(start) for start in starts], return_inverse=True)
    if len(set(starts)) == len(differences):
        place = np.zeros_like(place)
    counts = np.bincount(place)
    rest = differences - (np.bincount(place, differences) / counts)[place]
    free = len(differences) - len(counts)
    return float(np.sqrt((rest**2).sum() / free)) if free else 0.0, free


def interquartile_mean(values: Sequence[float]) -> float:
    """Mean without the lowest and the highest quarter of the values (Agarwal et al. 2021); of up to three, the mean."""
    return float(stats.trim_mean(values, 0.25))


def paired(differences: Sequence[float], comparisons: int = 1, starts: Sequence[str | None] = ()) -> Paired:
    """Everything said of one comparison, before Holm's adjustment, from at least one difference; comparisons: how many
    the report makes, for `Paired.detectable`. starts: what the trainings of each difference started from, where that
    is not one for all.
    """
    values = np.asarray(differences, dtype=np.float64)
    n, mean = len(values), float(values.mean())
    deviation, free = spread_within(values, starts or [None] * n)
    spread, error = deviation > _ROUNDING, deviation / math.sqrt(n)
    half = float(stats.t.ppf(1 - ALPHA / 2, free)) * error if spread else 0.0
    at_most = deviation_at_most(deviation, free) if spread else 0.0
    return Paired(
        differences=tuple(values.tolist()),
        mean=mean,
        interquartile_mean=interquartile_mean(values.tolist()),
        interval=Interval(mean - half, mean + half) if spread else None,
        better=float(((values > _ROUNDING) + 0.5 * (np.abs(values) <= _ROUNDING)).mean()),
        t_p=float(2 * stats.t.sf(abs(mean) / error, free)) if spread else None,
        sign_flip_p=float(sign_flip_p(values)) if 1 < n <= MOST_FLIPPED else None,
        skewness=float(stats.skew(values)) if spread and n > 2 else None,
        detectable=detectable_difference(deviation, n, comparisons, free) if spread else None,
        detectable_at_most=detectable_difference(at_most, n, comparisons, free) if spread else None,
    )


def compared(families: Sequence[Sequence[float]], starts: Sequence[Sequence[str | None]] = ()) -> list[Paired]:
    """One `Paired` for the differences of each comparison, the p values of all adjusted together by Holm's procedure;
    comparisons that cannot be tested are not counted. starts: as in `paired`, of each comparison.
    """
    each = list(zip(families, starts or [()] * len(families), strict=True))
    testable = sum(paired(differences, starts=of).t_p is not None for differences, of in each)
    found = [paired(differences, max(1, testable), of) for differences, of in each]
    for of, to in (("t_p", "t_holm"), ("sign_flip_p", "sign_flip_holm")):
        known = iter(holm([p for one in found if (p := getattr(one, of)) is not None]).tolist())
        found = [one if getattr(one, of) is None else replace(one, **{to: next(known)}) for one in found]
    return found


def _has_spread(values: Sequence[float] | NDArray[np.float64]) -> bool:
    return len(values) > 1 and float(np.ptp(values)) > _ROUNDING
