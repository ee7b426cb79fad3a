"""Intervals for accuracies measured on several samples of each prompt.

Samples of one prompt resemble each other, so the unit drawn again by the bootstrap is the prompt with all its samples
(Cameron, Gelbach and Miller 2008, "pairs cluster bootstrap"). Columns of one matrix share their draws: a difference
between two columns is then paired, prompt by prompt, and its interval is narrower than that of two separate groups.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

DRAWS = 10_000
CONFIDENCE = 0.95
SEED = 20250804
FEW_PROMPTS = 30  # below this the percentile interval is visibly too narrow: it misses a factor sqrt(P / (P - 1)) and Student's tails

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
    """Mean value of each cluster, clusters in sorted order.

    Args:
        clusters: N names, the prompt each sample belongs to.
        values: N numbers, the verdict of each sample.

    Returns:
        The P different names, sorted; their means, shape (P,); how many samples each has, shape (P,).
    """
    names, index, counts = np.unique(np.asarray(clusters, dtype=np.str_), return_inverse=True, return_counts=True)
    return tuple(names.tolist()), np.bincount(index, weights=np.asarray(values, dtype=np.float64)) / counts, counts


def cluster_standard_error(means: Floats) -> float:
    """Standard error of the mean over clusters in closed form: s / sqrt(P), s with P - 1 in its denominator.

    Args:
        means: shape (P,), P >= 2.
    """
    if len(means) < 2:
        raise ValueError(f"a standard error needs at least 2 clusters, got {len(means)}")
    return float(np.std(means, ddof=1) / np.sqrt(len(means)))


def resampled_means(means: Floats, draws: int = DRAWS, seed: int = SEED) -> Floats:
    """Means over clusters drawn with replacement, the same clusters for every column.

    Args:
        means: shape (P, K), one row a cluster, one column a measurement of the same clusters.
        draws: number of bootstrap draws D.
        seed: the same seed and P give the same clusters, whatever the columns are.

    Returns:
        shape (D, K).
    """
    clusters, columns = means.shape
    rng = np.random.default_rng(seed)
    result = np.empty((draws, columns))
    chunk = max(1, _CHUNK // clusters)
    for start in range(0, draws, chunk):
        rows = min(chunk, draws - start)
        drawn = rng.integers(clusters, size=(rows, clusters)) + np.arange(rows)[:, None] * clusters
        times = np.bincount(drawn.ravel(), minlength=rows * clusters).reshape(rows, clusters)
        result[start : start + rows] = times @ means / clusters
    return result


def estimates(means: Floats, draws: int = DRAWS, confidence: float = CONFIDENCE, seed: int = SEED) -> list[Estimate]:
    """Mean over clusters of each column, with its percentile bootstrap interval.

    A column without spread (one cluster, or the same value in all) has no interval: every draw would repeat its value,
    and an interval of width 0 would claim a certainty that the data does not give.

    Args:
        means: shape (P, K), P >= 1: the means of P clusters in K measurements, or differences of such means.
        draws: number of bootstrap draws.
        confidence: coverage aimed at, in (0, 1).
        seed: see `resampled_means`.

    Returns:
        K estimates.
    """
    tail = (1 - confidence) / 2
    lows, highs = np.quantile(resampled_means(means, draws, seed), [tail, 1 - tail], axis=0)
    spread = np.ptp(means, axis=0) > 0
    return [
        Estimate(float(value), Interval(float(low), float(high)) if varies else None)
        for value, low, high, varies in zip(means.mean(axis=0), lows, highs, spread, strict=True)
    ]


def estimate(means: Floats, draws: int = DRAWS, confidence: float = CONFIDENCE, seed: int = SEED) -> Estimate:
    """`estimates` of a single column, shape (P,)."""
    return estimates(means[:, None], draws, confidence, seed)[0]
