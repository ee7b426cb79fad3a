"""Validation accuracy of trainings on one data source: curves, changes, differences, with intervals over prompts."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gtpo_verl.runs.reader import Training, Validation, logged_accuracies
from gtpo_verl.runs.statistics import Estimate, Floats, Interval, estimate, estimates


@dataclass(frozen=True)
class Point:
    """Validation accuracy at one step; samples, prompts and clusters are None where only the logged mean is known."""

    step: int
    accuracy: float
    interval: Interval | None
    samples: int | None
    prompts: int | None
    clusters: int | None


@dataclass(frozen=True)
class Change:
    """Accuracy before and after training on the same prompts, and the paired difference.

    ``samples``: how many before and how many after; ``clusters``: how many units the bootstrap resamples, as many as
    prompts where the data names none. Samples, prompts and clusters are None where only logged means are known.
    """

    before: float
    after: float
    difference: Estimate
    samples: tuple[int, int] | None
    prompts: int | None
    clusters: int | None


@dataclass(frozen=True)
class Accuracy:
    """One training on one data source; ``change`` is None without two validations that have prompts in common."""

    source: str
    validations: tuple[Validation, ...]
    curve: tuple[Point, ...]
    change: Change | None


@dataclass(frozen=True)
class Comparison:
    """A training minus that of its baseline with the same seed, by name, on the common prompts of a data source.

    ``after``: accuracies at ``step``, the last that both validated; ``gain``: gains up to it.
    """

    arm: str
    baseline: str
    source: str
    step: int
    after: Estimate
    gain: Estimate
    prompts: int
    clusters: int


def accuracies(training: Training) -> dict[str, Accuracy]:
    """Its accuracy on each data source that it validated: from its samples, else from the logged means."""
    logged = logged_accuracies(training.keys)
    found = {}
    for source in training.sources:
        if validations := training.validations.get(source, ()):
            curve, change = _sampled_curve(validations), _sampled_change(validations)
        else:
            points = zip(*training.series(logged[source]), strict=True)
            curve = tuple(Point(int(step), float(value), *[None] * 4) for step, value in points)
            before, after = curve[0].accuracy, curve[-1].accuracy
            unknown = Estimate(after - before, None)
            change = Change(before, after, unknown, None, None, None) if len(curve) > 1 else None
        found[source] = Accuracy(source, validations, curve, change)
    return found


def comparison(arm: str, training: Accuracy, baseline: str, of_baseline: Accuracy) -> Comparison | None:
    """The training minus the baseline; None without a common step or prompt."""
    pair = (of_baseline, training)
    by_step = [{validation.step: validation for validation in one.validations} for one in pair]
    step = max(set.intersection(*(set(validations) for validations in by_step)), default=None)
    if step is None or any(step == min(validations) for validations in by_step):
        return None
    firsts, lasts = [one.validations[0] for one in pair], [validations[step] for validations in by_step]
    prompts = _common_prompts([*firsts, *lasts])
    if not prompts:
        return None
    clusters = _clusters([*firsts, *lasts], prompts)
    after = _accuracies(lasts, prompts)
    gain = after - _accuracies(firsts, prompts)
    at_end, gained = (estimate(one[:, 1] - one[:, 0], clusters=clusters) for one in (after, gain))
    return Comparison(arm, baseline, training.source, step, at_end, gained, len(prompts), len(set(clusters)))


def _sampled_curve(validations: Sequence[Validation]) -> tuple[Point, ...]:
    points = []
    for prompts in dict.fromkeys(validation.prompts for validation in validations):
        # one resampling serves all validations of the same prompts
        same = [validation for validation in validations if validation.prompts == prompts]
        clusters = _clusters(same, prompts)
        for validation, value in zip(same, estimates(_accuracies(same, prompts), clusters=clusters), strict=True):
            sizes = int(validation.counts.sum()), len(prompts), len(set(clusters))
            points.append(Point(validation.step, value.value, value.interval, *sizes))
    return tuple(sorted(points, key=lambda point: point.step))


def _sampled_change(validations: Sequence[Validation]) -> Change | None:
    if len(validations) < 2:
        return None
    ends = [validations[0], validations[-1]]
    prompts = _common_prompts(ends)
    if not prompts:
        return None
    accuracy, clusters = _accuracies(ends, prompts), _clusters(ends, prompts)
    before, after = accuracy.mean(axis=0)
    difference = estimate(accuracy[:, 1] - accuracy[:, 0], clusters=clusters)
    samples = [int(one.counts[one.rows(prompts)].sum()) for one in ends]
    return Change(float(before), float(after), difference, (samples[0], samples[1]), len(prompts), len(set(clusters)))


def _common_prompts(validations: Sequence[Validation]) -> list[str]:
    return sorted(set.intersection(*(set(validation.prompts) for validation in validations)))


def _accuracies(validations: Sequence[Validation], prompts: Sequence[str]) -> Floats:
    """Accuracy of the given prompts in each validation, shape (P, K)."""
    return np.stack([validation.accuracy[validation.rows(prompts)] for validation in validations], axis=1)


def _clusters(validations: Sequence[Validation], prompts: Sequence[str]) -> list[str]:
    named: dict[str, str] = {}
    for validation in validations:
        named |= zip(validation.prompts, validation.clusters, strict=True)
    return [named[prompt] for prompt in prompts]
