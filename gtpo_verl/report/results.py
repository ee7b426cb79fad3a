"""The arms of a report, their trainings, and accuracy on each data source: curves, changes, differences, by cost.

Intervals are over prompts.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from gtpo_verl.runs.reader import Training, Validation, logged_accuracies
from gtpo_verl.runs.statistics import Estimate, Floats, Interval, estimate, estimates

# the phases within verl's `timing_s/step`, in the order they happen; validation is timed outside of it
STEP_PHASES = {
    "gen": "rollout",
    "reward": "reward",
    "old_log_prob": "old log-probs",
    "ref": "reference log-probs",
    "values": "critic values",
    "adv": "advantages",
    "update_critic": "critic update",
    "update_actor": "actor update",
    "update_weights": "weights to vLLM",
    "save_checkpoint": "checkpoint",
}
OTHER_PHASE = "other"
VALIDATION_PHASE = "validation"


@dataclass(frozen=True)
class Point:
    """Validation accuracy at one step; samples, prompts and clusters are None where only the logged mean is known."""

    step: int
    accuracy: float
    interval: Interval | None = None
    samples: int | None = None
    prompts: int | None = None
    clusters: int | None = None


@dataclass(frozen=True)
class Change:
    """Accuracy before and after training on the same prompts; counts are None where only logged means are known."""

    before: float
    after: float
    difference: Estimate  # paired
    samples: tuple[int, int] | None = None  # before and after
    prompts: int | None = None
    clusters: int | None = None  # that the bootstrap resamples: as many as prompts where the data names none


@dataclass(frozen=True)
class Accuracy:
    """One training on one data source; ``change`` is None without two validations that have prompts in common."""

    change: Change | None
    curve: tuple[Point, ...]


@dataclass(frozen=True)
class Comparison:
    """A training minus that of its baseline with the same seed, by name, on the common prompts of a data source."""

    arm: str
    baseline: str
    source: str
    step: int  # the last that both validated
    after: Estimate  # accuracies at it
    gain: Estimate  # gains up to it
    prompts: int
    clusters: int


@dataclass(frozen=True, eq=False)
class TrainingResult:
    """What the report says of one training."""

    name: str  # its arm's, with the seed where the arm has several
    run: str  # the name of the run that it is of
    training: Training
    seed: str | None  # with the start where there are several: what it is paired by
    start: str | None = None  # the model that it began from, where a sweep crosses several with its arms

    @cached_property
    def accuracies(self) -> Mapping[str, Accuracy]:
        """By data source: from the samples of its validations, else from the logged means."""
        logged = logged_accuracies(self.training.keys)
        found = {}
        for source in self.training.sources:
            if validations := self.training.validations.get(source):
                curve, change = _sampled_curve(validations), _sampled_change(validations)
            else:
                points = zip(*self.training.series(logged[source]), strict=True)
                curve = tuple(Point(int(step), float(value)) for step, value in points)
                before, after = curve[0].accuracy, curve[-1].accuracy
                change = Change(before, after, Estimate(after - before, None)) if len(curve) > 1 else None
            found[source] = Accuracy(change, curve)
        return found

    @property
    def step_seconds(self) -> dict[str, float]:
        """Mean seconds per training step of each phase, in the order they happen; empty where they were not logged."""
        steps = [data for data in self.training.metrics.values() if "timing_s/step" in data]
        if not steps:
            return {}

        def mean(phase: str) -> float:
            return float(np.mean([data.get(f"timing_s/{phase}", 0.0) for data in steps]))

        seconds = {title: mean(phase) for phase, title in STEP_PHASES.items()}
        seconds[OTHER_PHASE] = mean("step") - sum(seconds.values())
        seconds[VALIDATION_PHASE] = mean("testing")
        return {title: value for title, value in seconds.items() if value > 0}

    @property
    def complete(self) -> bool:
        """Whether it counts in statistics over seeds: complete, or of a logger that does not say."""
        return self.training.status in (None, "complete")


@dataclass(frozen=True, eq=False)
class Arm:
    """Trainings that differ in their seed alone, in the order of the seeds."""

    name: str
    values: Mapping[str, str]  # of the axes; arms of one baseline agree in them but for the axes of the baseline
    trainings: tuple[TrainingResult, ...]

    @property
    def method(self) -> str | None:
        """The name of the registered method, or None."""
        method = self.trainings[0].training.method
        return method.name if method else None

    @property
    def counted(self) -> tuple[TrainingResult, ...]:
        """The trainings that its curves show: the complete ones; where there is none, all."""
        return tuple(result for result in self.trainings if result.complete) or self.trainings


def trainings_of(arms: Iterable[Arm]) -> list[TrainingResult]:
    return [training for arm in arms for training in arm.trainings]


def has_seeds(arms: Iterable[Arm]) -> bool:
    """Whether any arm was trained with several seeds, so that there is something to say over seeds."""
    return any(len(arm.trainings) > 1 for arm in arms)


def data_sources(arms: Iterable[Arm]) -> list[str]:
    """Every data source that an arm validated."""
    return sorted({source for result in trainings_of(arms) for source in result.accuracies})


def comparisons(pairs: Iterable[tuple[Arm, Arm]]) -> tuple[Comparison, ...]:
    """Every arm against its baseline, seed by seed, on each data source with a validated step and prompts in common."""
    found = []
    for arm, baseline in pairs:
        partners = {one.seed: one for one in baseline.trainings}
        for result in arm.trainings:
            if partner := partners.get(result.seed):
                sampled = sorted(result.training.validations.keys() & partner.training.validations.keys())
                found += [_comparison(result, partner, source) for source in sampled]
    return tuple(filter(None, found))


def cost_until(training: Training, what: str) -> Mapping[int, float] | None:
    """What had been spent when each step ended, step 0 included; None where it was not logged at every step.

    ``what``: ``seconds`` of training, validations left out, or ``responses`` generated for it: those of the groups that
    dynamic sampling rejects as well, those of validations not.
    """
    per_group = training.config.get("actor_rollout_ref.rollout.n")
    total, spent = {0: 0.0}, 0.0
    for step, data in sorted(training.metrics.items()):
        if step == 0:
            continue
        value = data.get("timing_s/step" if what == "seconds" else "credit/responses")
        groups = data.get("training/filter_groups/generated_groups")
        if what == "responses" and groups is not None and per_group:
            value = groups * float(per_group)
        if value is None:
            return None
        spent += value
        total[step] = spent
    return total if len(total) > 1 else None


# ---------------------------------------------------------------- accuracy


def _comparison(training: TrainingResult, baseline: TrainingResult, source: str) -> Comparison | None:
    """The training minus the baseline; None without a common step or prompt."""
    pair = [one.training.validations[source] for one in (baseline, training)]
    by_step = [{validation.step: validation for validation in validations} for validations in pair]
    step = max(set.intersection(*(set(validations) for validations in by_step)), default=None)
    if step is None or any(step == min(validations) for validations in by_step):
        return None
    firsts, lasts = [validations[0] for validations in pair], [validations[step] for validations in by_step]
    prompts = common_prompts([*firsts, *lasts])
    if not prompts:
        return None
    clusters = lasts[-1].clusters_of(prompts)
    after = accuracies_of(lasts, prompts)
    gain = after - accuracies_of(firsts, prompts)
    at_end, gained = (estimate(one[:, 1] - one[:, 0], clusters=clusters) for one in (after, gain))
    return Comparison(training.name, baseline.name, source, step, at_end, gained, len(prompts), len(set(clusters)))


def _sampled_curve(validations: Sequence[Validation]) -> tuple[Point, ...]:
    points = []
    for prompts in dict.fromkeys(validation.prompts for validation in validations):
        # one resampling serves all validations of the same prompts
        same = [validation for validation in validations if validation.prompts == prompts]
        clusters = same[-1].clusters_of(prompts)
        for validation, value in zip(same, estimates(accuracies_of(same, prompts), clusters=clusters), strict=True):
            sizes = int(validation.counts.sum()), len(prompts), len(set(clusters))
            points.append(Point(validation.step, value.value, value.interval, *sizes))
    return tuple(sorted(points, key=lambda point: point.step))


def _sampled_change(validations: Sequence[Validation]) -> Change | None:
    if len(validations) < 2:
        return None
    ends = [validations[0], validations[-1]]
    prompts = common_prompts(ends)
    if not prompts:
        return None
    accuracy, clusters = accuracies_of(ends, prompts), ends[-1].clusters_of(prompts)
    before, after = accuracy.mean(axis=0)
    difference = estimate(accuracy[:, 1] - accuracy[:, 0], clusters=clusters)
    samples = [int(one.counts[one.rows(prompts)].sum()) for one in ends]
    return Change(float(before), float(after), difference, (samples[0], samples[1]), len(prompts), len(set(clusters)))


def common_prompts(validations: Sequence[Validation]) -> list[str]:
    return sorted(set.intersection(*(set(validation.prompts) for validation in validations)))


def accuracies_of(validations: Sequence[Validation], prompts: Sequence[str]) -> Floats:
    """Accuracy of the given prompts in each validation, shape (P, K)."""
    return np.stack([validation.accuracy[validation.rows(prompts)] for validation in validations], axis=1)
