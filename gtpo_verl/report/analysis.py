"""What the report says of its runs, in numbers and in words: curves, changes, comparisons, verdicts, caveats."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gtpo_verl.runs.reader import Arm, Run, Validation
from gtpo_verl.runs.statistics import DRAWS, FEW_PROMPTS, Estimate, Floats, Interval, estimate, estimates

# the phases inside verl's `timing_s/step`, in the order they happen; validation is timed outside of it
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

# settings that differ between any two trainings, whatever is compared
_BOOKKEEPING = re.compile(r"(^|\.)(experiment_name|project_name|\w+_dir|\w+_DIR)$")
_LOGGED_ACCURACY = re.compile(r"^val-core/(?P<source>.+)/acc/mean@(?P<samples>\d+)$")
_SAME_ACCURACY = 1e-4  # verl's mean and ours differ by rounding alone; one sample more or less in 5,000 is above this


@dataclass(frozen=True)
class Point:
    """Validation accuracy at one step; samples and prompts are None where only the logged mean is known."""

    step: int
    accuracy: float
    interval: Interval | None
    samples: int | None
    prompts: int | None


@dataclass(frozen=True)
class Change:
    """Accuracy before and after training on the same prompts, and the paired difference.

    ``samples`` are those before and those after. Samples and prompts are None where only logged means are known.
    """

    before: float
    after: float
    difference: Estimate
    samples: tuple[int, int] | None
    prompts: int | None


@dataclass(frozen=True)
class ArmResult:
    """What the report says of one arm; ``change`` is None without two validations that can be compared.

    ``step_seconds``: mean seconds a training step of each phase, in the order they happen.
    """

    label: str
    run: str
    arm: Arm
    curve: tuple[Point, ...]
    change: Change | None
    verdict: str
    step_seconds: Mapping[str, float]

    @property
    def name(self) -> str:
        """The arm's name as the paper writes it, where it names it; else the label, shortened in the middle."""
        known = {"dapo": "DAPO", "gtpo": "GTPO", "grpo_s": "GRPO-S"}
        if self.label in known:
            return known[self.label]
        return self.label if len(self.label) <= 30 else f"{self.label[:12]}…{self.label[-17:]}"


@dataclass(frozen=True)
class Comparison:
    """An arm minus the first one, on the prompts of both, at the last step that both validated.

    ``after`` is the difference of their accuracies at that step, ``gain`` that of their gains since the first validation.
    """

    arm: ArmResult
    baseline: ArmResult
    step: int
    after: Estimate
    gain: Estimate
    prompts: int


# ---------------------------------------------------------------------------------------------------------------------
# Numbers


def arm_results(runs: Sequence[Run]) -> tuple[ArmResult, ...]:
    """A result for each arm of each run, in the order given; labels tell the arms apart."""
    pairs = [(run, arm) for run in runs for arm in run.arms]
    labels = distinct_names([arm.path if arm.path.name == arm.name else arm.path / arm.name for _, arm in pairs])
    return tuple(_arm_result(label, run, arm) for label, (run, arm) in zip(labels, pairs, strict=True))


def distinct_names(paths: Sequence[Path]) -> list[str]:
    """The shortest tails of the paths that tell them apart, all with the same number of parts."""
    parts = [path.resolve().parts for path in paths]
    length = 1
    while len({part[-length:] for part in parts}) < len(parts):
        length += 1
    return ["/".join(part[-length:]) for part in parts]


def logged_accuracies(arm: Arm) -> dict[str, str]:
    """The key of the logged accuracy of each data source, the one with most samples a prompt."""
    best: dict[str, tuple[int, str]] = {}
    for key in arm.keys:
        match = _LOGGED_ACCURACY.match(key)
        if match:
            source = match["source"]
            best[source] = max(best.get(source, (0, "")), (int(match["samples"]), key))
    return {source: key for source, (_, key) in sorted(best.items())}


def mean_change(results: Sequence[ArmResult]) -> Change | None:
    """Mean over the arms, on the prompts of all; None for one arm, or where their last steps or all prompts differ."""
    last_steps = {result.curve[-1].step if result.curve else None for result in results}
    if len(results) < 2 or len(last_steps) > 1:
        return None
    ends = _paired_ends(results)
    if ends is None:
        return None
    before, after = ends.before.mean(axis=1), ends.after.mean(axis=1)
    return Change(float(before.mean()), float(after.mean()), estimate(after - before), None, len(before))


def comparisons(results: Sequence[ArmResult]) -> tuple[Comparison, ...]:
    """Every later arm against the first, where they have a validated step and prompts in common."""
    baseline = results[0]
    found = []
    for result in results[1:]:
        ends = _paired_ends([baseline, result])
        if ends is None:
            continue
        gain = ends.after - ends.before
        found.append(
            Comparison(
                result,
                baseline,
                ends.step,
                after=estimate(ends.after[:, 1] - ends.after[:, 0]),
                gain=estimate(gain[:, 1] - gain[:, 0]),
                prompts=len(gain),
            )
        )
    return tuple(found)


@dataclass(frozen=True, eq=False)
class _Ends:
    """Accuracy of each common prompt at the arms' first validations and at ``step``, both of shape (P, arms)."""

    step: int
    before: Floats
    after: Floats


def _paired_ends(results: Sequence[ArmResult]) -> _Ends | None:
    by_step = [{validation.step: validation for validation in result.arm.validations} for result in results]
    step = max(set.intersection(*(set(validations) for validations in by_step)), default=None)
    if step is None or any(step == min(validations) for validations in by_step):
        return None
    firsts = [result.arm.validations[0] for result in results]
    lasts = [validations[step] for validations in by_step]
    prompts = _common_prompts([*firsts, *lasts])
    return _Ends(step, _accuracies(firsts, prompts), _accuracies(lasts, prompts)) if prompts else None


def _arm_result(label: str, run: Run, arm: Arm) -> ArmResult:
    curve = _sampled_curve(arm.validations) if arm.validations else _logged_curve(arm)
    change = _sampled_change(arm.validations) if arm.validations else _logged_change(curve)
    return ArmResult(label, run.name, arm, curve, change, _verdict(curve, change), _step_seconds(arm))


def _sampled_curve(validations: Sequence[Validation]) -> tuple[Point, ...]:
    points = []
    for prompts in dict.fromkeys(validation.prompts for validation in validations):
        # one resampling serves all validations of the same prompts
        same = [validation for validation in validations if validation.prompts == prompts]
        for validation, value in zip(same, estimates(_accuracies(same, prompts)), strict=True):
            points.append(Point(validation.step, value.value, value.interval, validation.samples, len(prompts)))
    return tuple(sorted(points, key=lambda point: point.step))


def _sampled_change(validations: Sequence[Validation]) -> Change | None:
    if len(validations) < 2:
        return None
    first, last = validations[0], validations[-1]
    prompts = _common_prompts([first, last])
    if not prompts:
        return None
    accuracy = _accuracies([first, last], prompts)
    before, after = accuracy.mean(axis=0)
    samples = (first.samples_of(prompts), last.samples_of(prompts))
    return Change(float(before), float(after), estimate(accuracy[:, 1] - accuracy[:, 0]), samples, len(prompts))


def _logged_curve(arm: Arm) -> tuple[Point, ...]:
    """The mean that verl logged, without interval; empty with several data sources, whose mean nobody logged."""
    keys = list(logged_accuracies(arm).values())
    if len(keys) != 1:
        return ()
    steps, values = arm.series(keys[0])
    return tuple(Point(int(step), float(value), None, None, None) for step, value in zip(steps, values, strict=True))


def _logged_change(curve: Sequence[Point]) -> Change | None:
    if len(curve) < 2:
        return None
    before, after = curve[0].accuracy, curve[-1].accuracy
    return Change(before, after, Estimate(after - before, None), None, None)


def _common_prompts(validations: Sequence[Validation]) -> list[str]:
    return sorted(set.intersection(*(set(validation.prompts) for validation in validations)))


def _accuracies(validations: Sequence[Validation], prompts: Sequence[str]) -> Floats:
    """Accuracy of the given prompts in each validation, shape (P, K)."""
    return np.stack([validation.accuracy[validation.rows(prompts)] for validation in validations], axis=1)


def _step_seconds(arm: Arm) -> dict[str, float]:
    steps = [data for data in arm.metrics.values() if "timing_s/step" in data]
    if not steps:
        return {}

    def mean(phase: str) -> float:
        return float(np.mean([data.get(f"timing_s/{phase}", 0.0) for data in steps]))

    seconds = {title: mean(phase) for phase, title in STEP_PHASES.items()}
    seconds[OTHER_PHASE] = mean("step") - sum(seconds.values())
    seconds[VALIDATION_PHASE] = mean("testing")
    return {title: value for title, value in seconds.items() if value > 0}


def config_differences(results: Sequence[ArmResult]) -> tuple[dict[str, list[str]], dict[str, list[str]]] | None:
    """Settings that differ between the arms, and names and directories that do: {key: a value for each arm}.

    None where fewer than two arms have left their configuration. An arm without one takes no part.
    """
    configs = [result.arm.config for result in results]
    if sum(map(bool, configs)) < 2:
        return None
    settings: dict[str, list[str]] = {}
    bookkeeping: dict[str, list[str]] = {}
    for key in sorted({key for config in configs for key in config}):
        values = [_shown(config, key) for config in configs]
        if len({value for value, config in zip(values, configs, strict=True) if config}) > 1:
            (bookkeeping if _BOOKKEEPING.search(key) else settings)[key] = values
    return settings, bookkeeping


def _shown(config: Mapping[str, Any], key: str) -> str:
    if not config:
        return "not known"
    if key not in config:
        return "not set"
    value = config[key]
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


# ---------------------------------------------------------------------------------------------------------------------
# Words


def percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def points(difference: float) -> str:
    """A difference of shares in percentage points, with its sign."""
    return f"{100 * difference:+.1f}".replace("-", "−")


def interval_text(interval: Interval | None) -> str:
    return f"{points(interval.low)} to {points(interval.high)}" if interval else "n/a"


def curve_basis(results: Sequence[ArmResult]) -> str:
    """What stands behind the accuracy curves, in one line."""
    sampled = [point for result in results for point in result.curve if point.prompts and point.samples]
    if not sampled:
        return "Mean logged at each validation; its samples were not kept, so there is no interval"
    samples = _range(point.samples for point in sampled)
    prompts = _range(point.prompts for point in sampled)
    intervals = "bands: 95 % intervals, bootstrap over prompts"
    return f"{samples} samples of {prompts} prompts at each validation · {intervals}"


def status_text(runs: Sequence[Run], results: Sequence[ArmResult]) -> str | None:
    """What to say at the top of a report of runs that did not end; None where all did, or nobody recorded it."""
    unfinished = {"interrupted": "was interrupted", "running": "had not finished when this report was written"}
    sentences = []
    for run in runs:
        if run.status in unfinished:
            reached = [_progress(result) for result in results if result.arm in run.arms]
            reached += [f"{name} not started" for name in run.missing_arms]
            sentences.append(f"{run.name} {unfinished[run.status]}: what follows is partial ({', '.join(reached)}).")
    return " ".join(sentences) or None


def notes(runs: Sequence[Run], results: Sequence[ArmResult]) -> tuple[str, ...]:
    """Caveats: what the intervals cover, what is odd about these runs, and what the runs themselves recorded."""
    sentences = []
    if any(point.interval for result in results for point in result.curve):
        sentences.append(
            f"The intervals come from drawing the prompts anew {DRAWS:,} times, the same prompts before and after and "
            "in every arm (paired cluster bootstrap). They cover the choice of prompts and the sampling of responses. "
            "They do not cover the seed of the training: another seed may end elsewhere, and only several trainings "
            "can tell by how much."
        )
    if any(result.change and result.change.prompts and result.change.prompts < FEW_PROMPTS for result in results):
        sentences.append(f"With fewer than {FEW_PROMPTS} prompts the intervals are too narrow.")
    for result in results:
        sentences += [f"{result.name}: {note}." for note in (*_validation_notes(result), *result.arm.notes)]
    for run in runs:
        prefix = f"{run.name}: " if len(runs) > 1 else ""
        sentences += [prefix + note for note in run.notes]
        sentences += [f"{prefix}arm {name} logged no step, so it is not shown." for name in run.missing_arms]
    return tuple(sentences)


def _verdict(curve: Sequence[Point], change: Change | None) -> str:
    if not curve:
        return "No overall validation accuracy was logged, so nothing can be said about learning."
    last = f"{percent(curve[-1].accuracy)} at step {curve[-1].step}"
    if len(curve) == 1:
        return f"Validated only once ({last}), so there is no before and after to compare."
    if change is None:
        return f"The first and the last validation share no prompt, so they cannot be compared (last: {last})."
    moved = (
        f"from {percent(change.before)} to {percent(change.after)} between steps {curve[0].step} and {curve[-1].step}"
    )
    if change.prompts is None:
        return f"Accuracy went {moved}; the validation samples were not kept, so nothing tells this from chance."
    interval = change.difference.interval
    if interval is None:
        return f"Accuracy went {moved}, by the same amount for every prompt: no interval can be estimated."
    if not interval.excludes_zero():
        return f"Accuracy went {moved}, too small a change to tell from chance on {change.prompts:,} prompts."
    rose = change.difference.value > 0
    return (
        f"Accuracy {'rose' if rose else 'fell'} {moved}, "
        f"a clear {'gain' if rose else 'loss'} on {change.prompts:,} prompts."
    )


def _progress(result: ArmResult) -> str:
    planned = result.arm.config.get("trainer.total_training_steps")
    return f"{result.name} at step {result.arm.last_step}" + (f" of {planned}" if planned else "")


def _validation_notes(result: ArmResult) -> list[str]:
    found = []
    validations = result.arm.validations
    if result.change and result.curve[0].step > 0:
        found.append(f"its first validation is that of step {result.curve[0].step}: “before” is not before training")
    if result.change and validations:
        apart = len(set(validations[0].prompts) ^ set(validations[-1].prompts))
        if apart:
            found.append(f"{apart} prompts are missing in the first or the last validation, and left out of the change")
    logged = logged_accuracies(result.arm)
    if validations and len(logged) == 1:
        steps, values = result.arm.series(*logged.values())
        means = dict(zip(steps.tolist(), values.tolist(), strict=True))
        odd = [p for p in result.curve if p.step in means and abs(means[p.step] - p.accuracy) > _SAME_ACCURACY]
        if odd:
            found.append(
                f"at step {odd[0].step} the validation samples average to {percent(odd[0].accuracy)}, "
                f"but {percent(means[odd[0].step])} was logged; the report shows the samples"
            )
    return found


def _range(numbers: Iterable[int | None]) -> str:
    present = [number for number in numbers if number is not None]
    low, high = min(present), max(present)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


# ---------------------------------------------------------------------------------------------------------------------
# Tables


def change_rows(results: Sequence[ArmResult], mean: Change | None) -> list[list[str]]:
    """Arm, before, after, difference, interval, samples, prompts and last step, as text; the mean of the arms last."""
    rows = [[result.name, *_change_cells(result), str(result.arm.last_step)] for result in results]
    if mean:
        difference = mean.difference
        cells = [
            percent(mean.before),
            percent(mean.after),
            points(difference.value),
            interval_text(difference.interval),
        ]
        rows.append(["mean", *cells, "", "", ""])
    return rows


def source_rows(results: Sequence[ArmResult]) -> list[list[str]]:
    """Arm, data source, before, after and difference by the logged means; empty with a single data source."""
    if len({source for result in results for source in logged_accuracies(result.arm)}) < 2:
        return []
    rows = []
    for result in results:
        for source, key in logged_accuracies(result.arm).items():
            _, values = result.arm.series(key)
            first, last = float(values[0]), float(values[-1])
            rows.append([result.name, source, percent(first), percent(last), points(last - first)])
    return rows


def _change_cells(result: ArmResult) -> list[str]:
    change = result.change
    if change is None:
        last = percent(result.curve[-1].accuracy) if result.curve else "n/a"
        return ["n/a", last, "n/a", "n/a", "n/a", "n/a"]
    return [
        percent(change.before),
        percent(change.after),
        points(change.difference.value),
        interval_text(change.difference.interval),
        _range(change.samples) if change.samples else "n/a",
        f"{change.prompts:,}" if change.prompts else "n/a",
    ]
