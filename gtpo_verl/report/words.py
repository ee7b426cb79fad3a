"""What the report says in words: numbers as text, verdicts, and notes."""

from collections.abc import Iterable, Sequence

from gtpo_verl.report.accuracy import Accuracy, Change, Point
from gtpo_verl.report.results import ArmResult, data_sources
from gtpo_verl.runs.reader import Run, logged_mean_acc
from gtpo_verl.runs.statistics import DRAWS, FEW_PROMPTS, Interval

NO_ACCURACY = "No validation accuracy was logged, so nothing can be said about learning."
_SAME_ACCURACY = 1e-4  # verl's mean and ours differ by rounding; one sample more or less in 5,000 is above this


def percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def points(difference: float) -> str:
    """A difference of shares in percentage points, with its sign."""
    return f"{100 * difference:+.1f}".replace("-", "−")


def interval_text(interval: Interval | None) -> str:
    return f"{points(interval.low)} to {points(interval.high)}" if interval else "n/a"


def number_range(numbers: Iterable[int]) -> str:
    """``500``, or ``30 to 500`` where they differ."""
    present = list(numbers)
    low, high = min(present), max(present)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def verdict(accuracy: Accuracy) -> str:
    """One sentence on an arm's change on one data source."""
    curve, change = accuracy.curve, accuracy.change
    last = f"{percent(curve[-1].accuracy)} at step {curve[-1].step}"
    if len(curve) == 1:
        return f"Validated only once ({last}), so there is no change to report."
    if change is None:
        return f"First and last validation have no prompt in common, so there is no change to report (last: {last})."
    moved = (
        f"from {percent(change.before)} to {percent(change.after)} between steps {curve[0].step} and {curve[-1].step}"
    )
    if change.prompts is None:
        return f"Accuracy went {moved}; without the validation samples its significance cannot be estimated."
    interval = change.difference.interval
    if interval is None:
        return f"Accuracy went {moved}, by the same amount on every prompt, so no interval can be estimated."
    if not interval.excludes_zero():
        return f"Accuracy went {moved}, not a significant change on {_prompts(change)}."
    rose = change.difference.value > 0
    return f"Accuracy {'rose' if rose else 'fell'} {moved}, a clear {'gain' if rose else 'loss'} on {_prompts(change)}."


def curve_basis(accuracies: Sequence[Accuracy]) -> str:
    """How many samples, prompts and clusters the curves of one data source rest on, in one line."""
    sampled = [point for accuracy in accuracies for point in accuracy.curve if point.prompts]
    if not sampled:
        return "Means as logged at each validation; no samples were kept, so there is no interval"
    samples, prompts, clusters = (
        number_range(getattr(point, name) or 0 for point in sampled) for name in ("samples", "prompts", "clusters")
    )
    over = f"{clusters} clusters of prompts" if any(map(_clustered, sampled)) else "prompts"
    return f"{samples} samples of {prompts} prompts per validation · bands: 95 % intervals, bootstrap over {over}"


def status_text(runs: Sequence[Run], results: Sequence[ArmResult]) -> str | None:
    """A warning at the top about runs that are not complete; None where all are, or the status was not recorded."""
    unfinished = {"interrupted": "was interrupted", "running": "had not finished when this report was written"}
    sentences = []
    for run in runs:
        if run.status in unfinished:
            reached = [_progress(result) for result in results if result.arm in run.arms]
            reached += [f"{name} not started" for name in run.missing_arms]
            sentences.append(f"{run.name} {unfinished[run.status]}, so this report is partial ({', '.join(reached)}).")
    return " ".join(sentences) or None


def notes(runs: Sequence[Run], results: Sequence[ArmResult]) -> tuple[str, ...]:
    """What the intervals cover, what is unusual about these runs, and what the runs themselves recorded."""
    sentences = []
    every = [accuracy for result in results for accuracy in result.accuracies.values()]
    sampled = [point for accuracy in every for point in accuracy.curve if point.prompts]
    if any(point.interval for point in sampled):
        unit = "clusters of similar prompts, as the data names them" if any(map(_clustered, sampled)) else "prompts"
        sentences.append(
            f"The intervals come from a paired cluster bootstrap: {unit}, drawn with replacement {DRAWS:,} times, the "
            "same before and after and in every arm. They cover the choice of prompts and the sampling of responses, "
            "not the training seed: another seed may end elsewhere, and only several trainings show by how much."
        )
    for source in data_sources(results):
        changes = [result.accuracies[source].change for result in results if source in result.accuracies]
        if any(change and change.clusters and change.clusters <= FEW_PROMPTS for change in changes):
            clustered = any(change and change.prompts != change.clusters for change in changes)
            where = f" on {source}" if len(data_sources(results)) > 1 else ""
            unit = "clusters of prompts" if clustered else "prompts"
            sentences.append(f"With {FEW_PROMPTS} or fewer {unit} the intervals{where} are too narrow.")
    for result in results:
        sentences += [f"{result.name}: {note}." for note in (*_validation_notes(result), *result.arm.notes)]
    for run in runs:
        prefix = f"{run.name}: " if len(runs) > 1 else ""
        sentences += [prefix + note for note in run.notes]
        sentences += [f"{prefix}arm {name} logged no step, so it is not shown." for name in run.missing_arms]
    return tuple(sentences)


def _clustered(point: Point) -> bool:
    return point.clusters != point.prompts


def _prompts(change: Change) -> str:
    clustered = f" in {change.clusters:,} clusters" if change.clusters != change.prompts else ""
    return f"{change.prompts:,} prompts{clustered}"


def _progress(result: ArmResult) -> str:
    planned = result.arm.config.get("trainer.total_training_steps")
    return f"{result.name} at step {result.arm.last_step}" + (f" of {planned}" if planned else "")


def _validation_notes(result: ArmResult) -> list[str]:
    found = []
    for source, accuracy in result.accuracies.items():
        prefix = f"{source}: " if len(result.accuracies) > 1 else ""
        found += [prefix + note for note in (*_change_notes(accuracy), *_odd_means(result, accuracy))]
    return found


def _change_notes(accuracy: Accuracy) -> list[str]:
    found = []
    if accuracy.change and accuracy.curve[0].step > 0:
        found.append(f"the first validation is at step {accuracy.curve[0].step}, so “before” is not before training")
    if accuracy.change and accuracy.validations:
        first, last = accuracy.validations[0], accuracy.validations[-1]
        apart = len(set(first.prompts) ^ set(last.prompts))
        if apart:
            found.append(
                f"{apart} prompts are only in the first or only in the last validation: left out of the change"
            )
    return found


def _odd_means(result: ArmResult, accuracy: Accuracy) -> list[str]:
    """The first step at which verl logged another mean than its samples have."""
    key = logged_mean_acc(result.arm.keys, accuracy.source)
    if key is None:
        return []
    for validation in accuracy.validations:
        logged = result.arm.metrics.get(validation.step, {}).get(key)
        if logged is not None and abs(logged - validation.mean_acc) > _SAME_ACCURACY:
            average = f"the validation samples average to {percent(validation.mean_acc)}"
            return [
                f"at step {validation.step} {average}, but {percent(logged)} was logged; the report shows the samples"
            ]
    return []
