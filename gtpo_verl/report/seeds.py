"""Arms over their seeds: final accuracies, paired differences to the baseline, and what was left out."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from gtpo_verl.evaluation.paired import Paired, compared, interquartile_mean, student_bounds, student_interval
from gtpo_verl.report.results import Arm, data_sources, trainings_of
from gtpo_verl.runs.statistics import Floats, Interval

BAND_SEEDS = 3  # from so many seeds on a band is drawn: of two, Student's interval is 13 standard errors wide


@dataclass(frozen=True)
class Final:
    """Accuracy of an arm on one data source at the last step that all complete trainings validated."""

    arm: str
    source: str
    step: int
    values: Mapping[str, float]  # by seed
    mean: float
    interquartile_mean: float
    deviation: float | None  # standard deviation over seeds
    interval: Interval | None  # Student's, over seeds; None for one seed


@dataclass(frozen=True)
class SeedComparison:
    """An arm minus its baseline on one data source, paired by seed: accuracies at ``step``."""

    arm: str
    baseline: str
    source: str
    step: int
    seeds: tuple[str | None, ...]
    paired: Paired


def finals(arms: Sequence[Arm]) -> list[Final]:
    """The final accuracy of each arm on each data source, arms without a complete training left out."""
    found = []
    for source in data_sources(arms):
        step = _final_step(arms, source)
        for arm in arms:
            values = _values(arm, source, step)
            if step is None or not values:
                continue
            numbers = list(values.values())
            deviation = float(np.std(numbers, ddof=1)) if len(numbers) > 1 else None
            mean, middle = float(np.mean(numbers)), interquartile_mean(numbers)
            by_seed = {str(seed): value for seed, value in values.items()}
            found.append(Final(arm.name, source, step, by_seed, mean, middle, deviation, student_interval(numbers)))
    return found


def seed_comparisons(pairs: Sequence[tuple[Arm, Arm]], arms: Sequence[Arm]) -> list[SeedComparison]:
    """Every arm against its baseline on each data source, over the seeds that both completed; one family for Holm."""
    found = []
    for source, (arm, baseline) in itertools.product(data_sources(arms), pairs):
        step = _final_step(arms, source)
        ours, theirs = _values(arm, source, step), _values(baseline, source, step)
        common = {seed: ours[seed] - theirs[seed] for seed in ours if seed in theirs}
        if step is not None and common:
            found.append((arm, baseline, source, step, common))
    results = compared([list(common.values()) for *_, common in found])
    return [
        SeedComparison(arm.name, baseline.name, source, step, tuple(common), paired)
        for (arm, baseline, source, step, common), paired in zip(found, results, strict=True)
    ]


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


def _final_step(arms: Sequence[Arm], source: str) -> int | None:
    """The last step that all complete trainings validated on a data source."""
    curves = [one.accuracies[source].curve for one in trainings_of(arms) if one.complete and source in one.accuracies]
    if not curves:
        return None
    return max(set.intersection(*({point.step for point in curve} for curve in curves)), default=None)


def _values(arm: Arm, source: str, step: int | None) -> dict[str | None, float]:
    """The accuracy of each complete training at a step, by seed."""
    return {
        result.seed: point.accuracy
        for result in arm.trainings
        if result.complete and source in result.accuracies
        for point in result.accuracies[source].curve
        if point.step == step
    }
