"""What the report says in words: numbers as text, verdicts, and notes."""

from collections.abc import Iterable, Sequence

from gtpo_verl.evaluation.paired import ALPHA, SKEWED, least_sign_flip_p
from gtpo_verl.report.accuracy import Accuracy, Change, Point
from gtpo_verl.report.results import ArmResult, TrainingResult, data_sources, has_seeds, trainings_of
from gtpo_verl.report.seeds import BAND_SEEDS, Final, SeedComparison
from gtpo_verl.runs.design import Design, missing_or_failed
from gtpo_verl.runs.reader import Run, logged_mean_acc
from gtpo_verl.runs.statistics import DRAWS, FEW_PROMPTS, Interval

NO_ACCURACY = "No validation accuracy was logged, so nothing can be said about learning."
ONE_SEED = "One seed: this is not a comparison."
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


def p_text(p: float | None) -> str:
    """A p value: three decimals, or that it is less than 0.001."""
    if p is None:
        return "n/a"
    return "<\u00a00.001" if p < 0.001 else f"{p:.3f}"


def seeds_text(count: int) -> str:
    return f"{count} seed{'s' * (count != 1)}"


def share_interval(interval: Interval | None) -> str:
    """An interval of shares, not of differences: ``61.2 to 64.0 %``."""
    return f"{100 * interval.low:.1f} to {100 * interval.high:.1f} %" if interval else "n/a"


def verdict(accuracy: Accuracy) -> str:
    """One sentence on a training's change on one data source."""
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


def seed_basis(arms: Sequence[ArmResult]) -> str:
    """What the curves of arms with seeds rest on, in one line."""
    counts = [len(arm.counted) for arm in arms]
    bands = "bands: 95 % Student's t intervals over seeds"
    if max(counts) < BAND_SEEDS:
        bands = f"no bands below {BAND_SEEDS} seeds"
    return f"Means over {number_range(counts)} seeds · {bands}"


def final_text(final: Final, comparison: SeedComparison | None) -> str:
    """What the card of an arm says below its final accuracy."""
    where = f"Mean of {seeds_text(len(final.values))} at step {final.step}."
    return f"{where} {seed_verdict(comparison)}" if comparison else where


def seed_verdict(comparison: SeedComparison) -> str:
    """One or two sentences on an arm against its baseline over seeds."""
    arm, baseline, found = comparison.arm.name, comparison.baseline.name, comparison.paired
    if found.seeds == 1:
        return f"{arm} and {baseline} have one seed in common: over seeds nothing can be said."
    if found.t_p is None:
        return f"{arm} − {baseline} is {points(found.mean)} points on every seed alike, so nothing can be tested."
    p = p_text(found.t_holm)
    how = f"(95 % interval {interval_text(found.interval)}, p {p if p.startswith('<') else f'= {p}'})"
    if found.shown:
        where = "above" if found.mean > 0 else "below"
        return f"{arm} is {100 * abs(found.mean):.1f} points {where} {baseline} {how}."
    assert found.detectable is not None
    assert found.detectable_at_most is not None
    return (
        f"No difference between {arm} and {baseline} shown: {points(found.mean)} points {how}. One of "
        f"{100 * found.detectable:.1f} points would have been, with a probability of 80 % "
        f"({100 * found.detectable_at_most:.1f} at the upper bound of the spread)."
    )


def counts_text(runs: Sequence[Run], arms: Sequence[ArmResult]) -> str:
    """How many arms, seeds and trainings a report over seeds rests on."""
    trainings = trainings_of(arms)
    complete = sum(result.complete for result in trainings)
    planned = len(trainings) + sum(len(run.missing) for run in runs)
    seeds = len({result.seed for result in trainings})
    return f"{len(arms)} arm{'s' * (len(arms) != 1)} · {seeds_text(seeds)} · {complete} of {planned} trainings complete"


def status_text(runs: Sequence[Run], arms: Sequence[ArmResult]) -> str | None:
    """A warning at the top about what is not complete; None where all is, or the status was not recorded."""
    unfinished = {"interrupted": "was interrupted", "running": "had not finished when this report was written"}
    sentences = []
    for run in runs:
        if run.status in unfinished:
            reached = [_progress(result) for result in trainings_of(arms) if result.training in run.trainings]
            reached += [f"{name} not started" for name in run.missing]
            ended = [one.record for one in run.trainings if one.status != "complete"]
            reasons = dict.fromkeys(record["reason"] for record in ended if record.get("reason"))
            why = f" ({'; '.join(reasons)})" if reasons and run.status == "interrupted" else ""
            sentences.append(
                f"{run.name} {unfinished[run.status]}{why}, so this report is partial ({', '.join(reached)})."
            )
    others = [run for run in runs if run.status not in unfinished]
    left_out = [f"{name} {why}" for name, why in missing_or_failed(others)]
    if left_out:
        consequence = "left out of everything over seeds" if has_seeds(arms) else "shown as far as they came"
        sentences.append(f"Not complete: {'; '.join(left_out)}; {consequence}.")
    return " ".join(sentences) or None


def allowed_text(design: Design) -> tuple[str, ...]:
    """What ``--allow`` accepted, a sentence each."""
    return tuple(
        f"Allowed to differ: {key} ({', '.join(f'{value} in {count}' for value, count in values.items())})"
        for key, values in design.allowed.items()
    )


def notes(
    runs: Sequence[Run], design: Design, arms: Sequence[ArmResult], over_seeds: Sequence[SeedComparison]
) -> list[str]:
    """What the intervals cover, what is unusual about these runs, and what the runs themselves recorded."""
    sentences = [*_seed_notes(arms, over_seeds)] if has_seeds(arms) else []
    sentences += _prompt_notes(arms)
    sentences += [f"{sentence}." for sentence in (*allowed_text(design), *design.unknown)]
    for result in trainings_of(arms):
        sentences += [f"{result.name}: {note}." for note in (*_validation_notes(result), *result.training.notes)]
    for run in runs:
        prefix = f"{run.name}: " if len(runs) > 1 else ""
        sentences += [prefix + note for note in _added_seeds(run)]
        sentences += [prefix + note for note in run.record.get("notes") or ()]
        if run.sweep is None:
            sentences += [f"{prefix}arm {name} logged no step, so it is not shown." for name in run.missing]
    return sentences


def _seed_notes(arms: Sequence[ArmResult], over_seeds: Sequence[SeedComparison]) -> list[str]:
    basis = (
        "Over seeds: intervals are Student's t, of a mean over seeds or of differences paired by seed; p is of the "
        "paired t test. The bootstrap is not used over seeds: with five it covers 84 % instead of 95 %. Better on: the "
        "seeds on which the arm is above the baseline, which estimates the probability of improvement."
    )
    sentences = [basis]
    tested = [one for one in over_seeds if one.paired.t_p is not None]
    many = len(tested) > 1
    if tested:
        what = "comparisons, all p adjusted for their number by Holm's procedure" if many else "comparison"
        intervals = " Intervals are not adjusted." if many else ""
        rule = "a difference is shown where p of the t test is at most 0.05"
        sentences.append(f"{len(tested)} {what}; {rule}.{intervals}")
    for count in sorted({one.paired.seeds for one in tested}):
        least = least_sign_flip_p(count) * len(tested)
        can = "can reject" if least <= ALPHA else "cannot reject, whatever the data"
        adjusted = f", {min(1.0, least):.2g} after Holm for {len(tested)}" if many else ""
        sentences.append(
            f"With {seeds_text(count)} the exact sign-flip test, which assumes only that differences are symmetric, "
            f"has p of at least {least_sign_flip_p(count):.2g}{adjusted}: at 5 % it {can}. The t test can."
        )
    for one in tested:
        if one.paired.skewness is not None and abs(one.paired.skewness) >= SKEWED:
            skewness = f"{one.paired.skewness:+.1f}".replace("-", "−")
            sentences.append(
                f"{one.arm.name} − {one.baseline.name}: the differences are skewed ({skewness}), where "
                "Student's interval covers less than it says, 88 to 90 % for exponential ones (docs/guides/sweeps.md)."
            )
    return sentences


def _added_seeds(run: Run) -> list[str]:
    seeds = len(run.sweep.axes.get("seed", ())) if run.sweep else 0
    planned = int(run.record.get("planned_seeds") or seeds)
    if seeds <= planned:
        return []
    later = (
        f"{seeds_text(planned)} were planned and {seeds - planned} added later. The tests are not for that: whoever "
        "looks after 3, 5, 8 and more seeds and stops where a difference is shown has 12 to 16 % false positives."
    )
    return [later]


def _prompt_notes(arms: Sequence[ArmResult]) -> list[str]:
    sentences = []
    every = [accuracy for result in trainings_of(arms) for accuracy in result.accuracies.values()]
    sampled = [point for accuracy in every for point in accuracy.curve if point.prompts]
    if any(point.interval for point in sampled):
        unit = "clusters of similar prompts, as the data names them" if any(map(_clustered, sampled)) else "prompts"
        sentences.append(
            f"Over prompts: intervals come from a paired cluster bootstrap: {unit}, drawn with replacement {DRAWS:,} "
            "times, the same before and after and in every arm. They cover the choice of prompts and the sampling of "
            "responses, not the training seed: another seed may end elsewhere, and only several trainings show by how "
            "much."
        )
    for source in data_sources(arms):
        changes = [one.accuracies[source].change for one in trainings_of(arms) if source in one.accuracies]
        if any(change and change.clusters and change.clusters <= FEW_PROMPTS for change in changes):
            clustered = any(change and change.prompts != change.clusters for change in changes)
            where = f" on {source}" if len(data_sources(arms)) > 1 else ""
            unit = "clusters of prompts" if clustered else "prompts"
            sentences.append(f"With {FEW_PROMPTS} or fewer {unit} the intervals{where} are too narrow.")
    return sentences


def _clustered(point: Point) -> bool:
    return point.clusters != point.prompts


def _prompts(change: Change) -> str:
    clustered = f" in {change.clusters:,} clusters" if change.clusters != change.prompts else ""
    return f"{change.prompts:,} prompts{clustered}"


def _progress(result: TrainingResult) -> str:
    planned = result.training.config.get("trainer.total_training_steps")
    return f"{result.name} at step {result.training.last_step}" + (f" of {planned}" if planned else "")


def _validation_notes(result: TrainingResult) -> list[str]:
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


def _odd_means(result: TrainingResult, accuracy: Accuracy) -> list[str]:
    """The first step at which verl logged another mean than its samples have."""
    key = logged_mean_acc(result.training.keys, accuracy.source)
    if key is None:
        return []
    for validation in accuracy.validations:
        logged = result.training.metrics.get(validation.step, {}).get(key)
        if logged is not None and abs(logged - validation.mean_acc) > _SAME_ACCURACY:
            average = f"the validation samples average to {percent(validation.mean_acc)}"
            return [
                f"at step {validation.step} {average}, but {percent(logged)} was logged; the report shows the samples"
            ]
    return []
