"""Arms over their seeds: accuracies, paired differences to the baseline, and what unfinished trainings would change.

The accuracy of a training is its mean over the validations after step 0 (`ENDPOINTS`), which is less noisy than the
last alone: in trials on the embedded tasks its differences had half the standard deviation.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from gtpo_verl.evaluation.paired import (
    Paired,
    compared,
    crossed_interval,
    interquartile_mean,
    paired,
    student_bounds,
    student_interval,
)
from gtpo_verl.report.results import Arm, TrainingResult, accuracies_of, common_prompts, data_sources
from gtpo_verl.runs.statistics import Floats, Interval, cluster_means

BAND_SEEDS = 3  # from so many seeds on a band is drawn: of two, Student's interval is 13 standard errors wide
ENDPOINTS = {
    "mean": "mean of the validations after step 0 that all complete trainings have",
    "last": "the last validation that all complete trainings have",
}
Pairs = Mapping[str | None, tuple[TrainingResult, TrainingResult]]  # by seed


@dataclass(frozen=True)
class Final:
    """Accuracy of an arm on one data source, by seed the mean over ``steps``."""

    arm: str
    source: str
    steps: tuple[int, ...]
    values: Mapping[str, float]  # by seed
    mean: float
    interquartile_mean: float
    deviation: float | None  # standard deviation over seeds
    interval: Interval | None  # Student's, over seeds; None for one seed


@dataclass(frozen=True)
class SeedComparison:
    """An arm minus its baseline on one data source, paired by seed: mean accuracies at ``steps``.

    by_start: the mean difference from each start, where there are several. crossed: an interval for other seeds and
    other prompts; None without the samples of the validations, or where those are of different prompts.
    """

    arm: str
    baseline: str
    source: str
    steps: tuple[int, ...]
    seeds: tuple[str | None, ...]
    paired: Paired
    by_start: Mapping[str, float] = field(default_factory=dict)
    crossed: Interval | None = None


def finals(arms: Sequence[Arm], endpoint: str = "mean") -> list[Final]:
    """The accuracy of each arm on each data source, arms without a complete training left out.

    endpoint: of `ENDPOINTS`.
    """
    found = []
    for source in data_sources(arms):
        steps = _steps(arms, source, endpoint)
        for arm in arms if steps else ():
            values = {result.seed: _at(result, source, steps) for result in _validated(arm, source)}
            if not values:
                continue
            numbers = list(values.values())
            deviation = float(np.std(numbers, ddof=1)) if len(numbers) > 1 else None
            mean, middle = float(np.mean(numbers)), interquartile_mean(numbers)
            by_seed = {str(seed): value for seed, value in values.items()}
            found.append(Final(arm.name, source, steps, by_seed, mean, middle, deviation, student_interval(numbers)))
    return found


def seed_comparisons(
    pairs: Sequence[tuple[Arm, Arm]], arms: Sequence[Arm], endpoint: str = "mean"
) -> list[SeedComparison]:
    """Every arm against its baseline on each data source, over the seeds that both completed; one family for Holm."""
    found = list(_common(pairs, arms, endpoint, unfinished=False))
    differences = [_differences(source, steps, common) for _, _, source, steps, common in found]
    results = compared(differences, [_starts(common) for *_, common in found])
    comparisons = []
    for (arm, baseline, source, steps, common), result in zip(found, results, strict=True):
        more = _by_start(source, steps, common), _crossed(source, steps, common)
        comparisons.append(SeedComparison(arm, baseline, source, steps, tuple(common), result, *more))
    return comparisons


def unfinished_comparisons(
    pairs: Sequence[tuple[Arm, Arm]], arms: Sequence[Arm], endpoint: str = "mean"
) -> list[SeedComparison]:
    """The comparisons that trainings which failed or were interrupted change, where they count with their last
    validation. In no family of tests: p is not adjusted.
    """
    found = []
    for arm, baseline, source, steps, common in _common(pairs, arms, endpoint, unfinished=True):
        if any(not result.complete for pair in common.values() for result in pair):
            result = paired(_differences(source, steps, common), starts=_starts(common))
            found.append(SeedComparison(arm, baseline, source, steps, tuple(common), result))
    return found


def over_seeds(curves: Sequence[Mapping[float, float]]) -> tuple[Floats, Floats, Floats | None, Floats | None]:
    """The mean of several curves, {position: value}, one per seed, where all have a value.

    Returns positions, means, and bounds of Student's 95 % interval, each (N,); no bounds below three curves.
    """
    positions = sorted(set.intersection(*(set(curve) for curve in curves)))
    values = np.array([[curve[position] for position in positions] for curve in curves], dtype=np.float64)
    x = np.array(positions, dtype=np.float64)
    if len(curves) < BAND_SEEDS:
        return x, values.mean(axis=0), None, None
    return x, values.mean(axis=0), *student_bounds(values.T)


def _steps(arms: Sequence[Arm], source: str, endpoint: str) -> tuple[int, ...]:
    """The steps of the endpoint, among those that all complete trainings validated on a data source."""
    curves = [result.accuracies[source].curve for arm in arms for result in _validated(arm, source)]
    common = sorted(set.intersection(*({point.step for point in curve} for curve in curves))) if curves else []
    trained = [step for step in common if step > 0]
    return tuple(trained if endpoint == "mean" else trained[-1:])


def _validated(arm: Arm, source: str, *, unfinished: bool = False) -> list[TrainingResult]:
    """The complete trainings; where ``unfinished``, those that ended before as well, after a validation at least."""
    validated = [result for result in arm.trainings if source in result.accuracies]
    return [one for one in validated if one.complete or (unfinished and one.training.status != "running")]


def _common(
    pairs: Sequence[tuple[Arm, Arm]], arms: Sequence[Arm], endpoint: str, *, unfinished: bool
) -> Iterator[tuple[str, str, str, tuple[int, ...], Pairs]]:
    """Arm, baseline, data source, steps of the endpoint, and the trainings that have a partner of the same seed."""
    for source, (arm, baseline) in itertools.product(data_sources(arms), pairs):
        steps = _steps(arms, source, endpoint)
        ours, theirs = (_validated(one, source, unfinished=unfinished) for one in (arm, baseline))
        partners = {one.seed: one for one in theirs}
        common = {one.seed: (one, partners[one.seed]) for one in ours if one.seed in partners}
        if steps and common:
            yield arm.name, baseline.name, source, steps, common


def _at(result: TrainingResult, source: str, steps: Sequence[int]) -> float:
    """The mean accuracy of a training over the steps; beyond its last validation, that one stands in."""
    curve = result.accuracies[source].curve
    reached = [[point for point in curve if point.step <= step] or curve[:1] for step in steps]
    return float(np.mean([points[-1].accuracy for points in reached]))


def _differences(source: str, steps: Sequence[int], pairs: Pairs) -> list[float]:
    return [_at(ours, source, steps) - _at(theirs, source, steps) for ours, theirs in pairs.values()]


def _starts(pairs: Pairs) -> list[str | None]:
    return [ours.start for ours, _ in pairs.values()]


def _by_start(source: str, steps: Sequence[int], pairs: Pairs) -> dict[str, float]:
    found: dict[str, list[float]] = {}
    for start, difference in zip(_starts(pairs), _differences(source, steps, pairs), strict=True):
        if start is not None:
            found.setdefault(start, []).append(difference)
    return {start: float(np.mean(values)) for start, values in found.items()}


def _crossed(source: str, steps: Sequence[int], pairs: Pairs) -> Interval | None:
    """The interval over seeds and prompts, or clusters of prompts; None where a validation has no samples."""
    validations = [
        [[one for one in result.training.validations.get(source, ()) if one.step in steps] for result in pair]
        for pair in pairs.values()
    ]
    every = [one for pair in validations for side in pair for one in side]
    if len(every) < 2 * len(pairs) * len(steps):
        return None
    prompts = common_prompts(every)
    if not prompts or any(len(one.prompts) > len(prompts) for one in every):
        return None
    clusters = every[-1].clusters_of(prompts)
    columns = []
    for ours, theirs in validations:
        differences = accuracies_of(ours, prompts).mean(axis=1) - accuracies_of(theirs, prompts).mean(axis=1)
        names, means, sizes = cluster_means(clusters, differences.tolist())
        columns.append(means * sizes * len(names) / len(prompts))  # their mean is that over prompts
    return crossed_interval(np.stack(columns))
