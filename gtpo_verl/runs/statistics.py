"""Intervals for accuracies measured on several samples of each prompt.

Samples of one prompt resemble each other, so the bootstrap resamples prompts with all their samples, and where prompts
resemble each other as well (a data set says so by a cluster), whole clusters of prompts (Cameron, Gelbach and Miller
2008, "pairs cluster bootstrap"). Columns of one matrix share their draws: a difference between two columns is then
paired, prompt by prompt, and its interval is narrower than that of two separate groups.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

DRAWS = 10_000
CONFIDENCE = 0.95
SEED = 20250804
# Up to this many units the percentile interval is too narrow: it lacks a factor sqrt(P / (P - 1)) and Student's tails.
FEW_PROMPTS = 30

_ROUNDING = 1e-9  # means of clusters with the same value differ by less; those of different verdicts or lengths by more
_CHUNK = 4_000_000  # indices drawn at once: 32 MB

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Interval:
    """A closed interval in the unit of its estimate."""

    low: float
    high: float

    def excludes_zero(self) -> bool:
        return self.low > 0 or self.high < 0


@dataclass(frozen=True)
class Estimate:
    """A mean over prompts; ``interval`` is None where the data cannot give one (see `estimate`)."""

    value: float
    interval: Interval | None


def cluster_means(
    clusters: Sequence[str], values: Sequence[float]
) -> tuple[tuple[str, ...], Floats, NDArray[np.int64]]:
    """The P different names in N, sorted, the mean value of each, (P,), and how many values it has, (P,).

    ``clusters``: N names, the prompt of each sample. ``values``: N numbers, 1 for a correct sample, 0 for a wrong one.
    """
    names, index, counts = np.unique(np.asarray(clusters, dtype=np.str_), return_inverse=True, return_counts=True)
    return tuple(names.tolist()), np.bincount(index, weights=np.asarray(values, dtype=np.float64)) / counts, counts


def cluster_standard_error(means: Floats, clusters: Sequence[str] | None = None) -> float:
    """Standard error of a mean over P prompts in C clusters, in closed form.

    It is sqrt(C / (C - 1)) / P times the root of the summed squares of the clusters' residual sums; with each prompt a
    cluster of its own that is s / sqrt(P), s with P - 1 in its denominator.

    ``means``: (P,). ``clusters``: P names; None: each prompt is one. ValueError: there are fewer than 2 clusters.
    """
    sums, _ = _by_cluster((means - means.mean())[:, None], clusters)
    if len(sums) < 2:
        raise ValueError(f"a standard error needs at least 2 clusters, got {len(sums)}")
    return float(np.sqrt(len(sums) / (len(sums) - 1) * np.sum(sums**2)) / len(means))


def resampled_means(
    means: Floats, *, clusters: Sequence[str] | None = None, draws: int = DRAWS, seed: int = SEED
) -> Floats:
    """Means over prompts whose clusters were drawn with replacement, the same clusters for every column.

    As many clusters are drawn as there are; the mean is over all prompts in them, a ratio estimator where clusters
    differ in size.

    Args:
        means: shape (P, K), one row per prompt, one column per measurement of the same prompts.
        clusters: P names, the cluster of each prompt; None: each prompt is one.
        draws: number of bootstrap draws D, which are the rows of the result, (D, K).
        seed: the same seed and number of clusters give the same draws, whatever the columns are.
    """
    sums, sizes = _by_cluster(means, clusters)
    count = len(sums)
    rng = np.random.default_rng(seed)
    result = np.empty((draws, means.shape[1]))
    chunk = max(1, _CHUNK // count)
    for start in range(0, draws, chunk):
        rows = min(chunk, draws - start)
        drawn = rng.integers(count, size=(rows, count)) + np.arange(rows)[:, None] * count
        times = np.bincount(drawn.ravel(), minlength=rows * count).reshape(rows, count)
        result[start : start + rows] = times @ sums / (times @ sizes)[:, None]
    return result


def estimates(
    means: Floats, *, clusters: Sequence[str] | None = None, draws: int = DRAWS, seed: int = SEED
) -> list[Estimate]:
    """Mean over prompts of each of K columns, with its percentile bootstrap interval over clusters of prompts.

    A column without spread (one cluster, or the same value in all) has no interval: every draw would repeat its value,
    and an interval of width 0 would claim a certainty that the data does not give.

    ``means``: (P, K), P >= 1: of P prompts in K measurements, or differences of such means. The rest: see
    `resampled_means`.
    """
    tail = (1 - CONFIDENCE) / 2
    resampled = resampled_means(means, clusters=clusters, draws=draws, seed=seed)
    lows, highs = np.quantile(resampled, [tail, 1 - tail], axis=0)
    sums, sizes = _by_cluster(means, clusters)
    spread = np.ptp(sums / sizes[:, None], axis=0) > _ROUNDING
    return [
        Estimate(float(value), Interval(float(low), float(high)) if varies else None)
        for value, low, high, varies in zip(means.mean(axis=0), lows, highs, spread, strict=True)
    ]


def estimate(means: Floats, **options: Any) -> Estimate:
    """`estimates` of a single column, shape (P,)."""
    return estimates(means[:, None], **options)[0]


def _by_cluster(means: Floats, clusters: Sequence[str] | None) -> tuple[Floats, Floats]:
    """Sums of the rows of each cluster, (C, K), and how many rows it has, (C,); clusters in sorted order."""
    if clusters is None:
        return means, np.ones(len(means))
    _, index, sizes = np.unique(np.asarray(clusters, dtype=np.str_), return_inverse=True, return_counts=True)
    sums = np.zeros((len(sizes), means.shape[1]))
    np.add.at(sums, index, means)
    return sums, sizes.astype(np.float64)
