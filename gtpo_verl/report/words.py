"""What the report says in words: numbers as text, verdicts, and notes."""

from collections.abc import Iterable, Iterator, Sequence

from gtpo_verl.evaluation.paired import ALPHA, MOST_FLIPPED, SKEWED, least_sign_flip_p
from gtpo_verl.report.design import Design
from gtpo_verl.report.results import Accuracy, Arm, Change, Point, TrainingResult, data_sources, has_seeds, trainings_of
from gtpo_verl.report.seeds import BAND_SEEDS, SeedComparison
from gtpo_verl.runs.reader import Run, Training, logged_accuracies
from gtpo_verl.runs.statistics import DRAWS, FEW_PROMPTS, Interval

NO_ACCURACY = "No validation accuracy was logged, so nothing can be said about learning."
NONE_COMPLETE = "No training of this arm is complete yet, so nothing can be said over seeds."
NONE_IN_COMMON = "The complete trainings have no validation after step 0 in common, so nothing can be said over seeds."
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


def steps_text(steps: Sequence[int]) -> str:
    """``step 24``, ``steps 6 and 12`` or ``7 steps from 10 to 70``."""
    if len(steps) == 1:
        return f"step {steps[0]}"
    if len(steps) > 4:
        return f"{len(steps)} steps from {steps[0]} to {steps[-1]}"
    return f"steps {', '.join(map(str, steps[:-1]))} and {steps[-1]}"


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
    ends = f"steps {curve[0].step} and {curve[-1].step}"
    moved = f"from {percent(change.before)} to {percent(change.after)} between {ends}"
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


def seed_basis(arms: Sequence[Arm]) -> str:
    """What the curves of arms with seeds rest on, in one line."""
    counts = [len(arm.counted) for arm in arms]
    drawn = max(counts) >= BAND_SEEDS
    bands = "bands: 95 % Student's t intervals over seeds" if drawn else f"no bands below {BAND_SEEDS} seeds"
    return f"Means over {number_range(counts)} trainings · {bands}"


def seed_verdict(comparison: SeedComparison) -> str:
    """One or two sentences on an arm against its baseline over seeds."""
    arm, baseline, found = comparison.arm, comparison.baseline, comparison.paired
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
    visible = f"One of {100 * found.detectable:.1f} points" if found.detectable < 1 else "None of any size"
    at_most = f"{100 * found.detectable_at_most:.1f}" if found.detectable_at_most < 1 else "none"
    return (
        f"No difference between {arm} and {baseline} shown: {points(found.mean)} points {how}. {visible} would have "
        f"been, with a probability of 80 % ({at_most} at the upper bound of the spread)."
    )


def counts_text(runs: Sequence[Run], arms: Sequence[Arm]) -> str:
    """How many arms, seeds and trainings a report over seeds rests on."""
    trainings = trainings_of(arms)
    seeds = seeds_text(len({result.training.seed for result in trainings}))
    if starts := {result.start for result in trainings} - {None}:
        seeds += f" from each of {len(starts)} starts"
    planned = len(trainings) + sum(len(run.missing) for run in runs)
    complete = f"{sum(result.complete for result in trainings)} of {planned} trainings complete"
    return f"{len(arms)} arm{'s' * (len(arms) != 1)} · {seeds} · {complete}"


def status_text(runs: Sequence[Run], arms: Sequence[Arm]) -> str | None:
    """A warning at the top about what is not complete; None where all is, or the status was not recorded."""
    left_out = []
    for run in runs:
        left_out += [f"{name} logged no step" for name in run.missing]
        left_out += [f"{one.name} {_end_of(one)}" for one in run.trainings if one.status not in (None, "complete")]
    if not left_out:
        return None
    apart = "left out of everything over seeds, but for the table of unfinished trainings"
    consequence = apart if has_seeds(arms) else "shown as far as they came"
    return f"Not complete: {'; '.join(left_out)}; {consequence}."


def _end_of(training: Training) -> str:
    """How a training ended that is not complete: its status, its last step, and the recorded reason."""
    ends = {"interrupted": "was interrupted", "running": "has not finished"}
    reason = training.record.get("reason")
    planned = training.config.get("trainer.total_training_steps")
    where = f"step {training.last_step}" + (f" of {planned}" if planned else "")
    return f"{ends.get(str(training.status), str(training.status))} after {where}" + (f" ({reason})" if reason else "")


def allowed_text(design: Design) -> tuple[str, ...]:
    """What ``--allow`` accepted, a sentence each."""
    return tuple(
        f"Allowed to differ: {key} ({', '.join(f'{value} in {count}' for value, count in values.items())})"
        for key, values in design.allowed.items()
    )


def notes(runs: Sequence[Run], design: Design, over_seeds: Sequence[SeedComparison]) -> list[str]:
    """What the intervals cover, what is unusual about these runs, and what the runs themselves recorded."""
    arms = design.arms
    sentences = [*(_seed_notes(over_seeds) if has_seeds(arms) else ()), *_prompt_notes(arms)]
    sentences += [f"{sentence}." for sentence in (*allowed_text(design), *design.unknown)]
    for result in trainings_of(arms):
        sentences += [f"{result.name}: {note}." for note in (*_accuracy_notes(result), *result.training.notes)]
    for run in runs:
        prefix = f"{run.name}: " if len(runs) > 1 else ""
        sentences += [prefix + note for note in (*_added_seeds(run), *(run.record.get("notes") or ()))]
    return sentences


def _seed_notes(over_seeds: Sequence[SeedComparison]) -> Iterator[str]:
    yield (
        "Over seeds: intervals are Student's t, of a mean over seeds or of differences paired by seed; p is of the "
        "paired t test. The bootstrap is not used over seeds: with five it covers 84 % instead of 95 %. Better on: the "
        "seeds on which the arm is above the baseline, which estimates the probability of improvement."
    )
    tested = [one for one in over_seeds if one.paired.t_p is not None]
    many = len(tested) > 1
    if tested:
        what = "comparisons, all p adjusted for their number by Holm's procedure" if many else "comparison"
        intervals = " Intervals are not adjusted." if many else ""
        yield f"{len(tested)} {what}; a difference is shown where p of the t test is at most {ALPHA:.2g}.{intervals}"
    for count in sorted({one.paired.seeds for one in tested}):
        if count > MOST_FLIPPED:
            yield f"With {count} pairs the sign-flip test, exact for up to {MOST_FLIPPED}, is not computed."
            continue
        least = least_sign_flip_p(count)
        can = "can reject" if least * len(tested) <= ALPHA else "cannot reject, whatever the data"
        adjusted = f", {min(1.0, least * len(tested)):.2g} after Holm for {len(tested)}" if many else ""
        yield (
            f"With {count} pairs the exact sign-flip test, which assumes only that differences are symmetric, "
            f"has p of at least {least:.2g}{adjusted}: at 5 % it {can}. The t test can."
        )
    for one in over_seeds:
        if one.by_start:
            each = ", ".join(f"{points(value)} from {start}" for start, value in one.by_start.items())
            yield (
                f"{one.arm} − {one.baseline} by start: {each}. Trainings from one start share its pretraining: "
                "the t test and its interval compare seeds within a start, and are for these starts, unless every seed "
                "has its own; sign flips and the interval over other prompts take starts for seeds, and see less."
            )
    for one in tested:
        if one.paired.skewness is not None and abs(one.paired.skewness) >= SKEWED:
            skewness = f"{one.paired.skewness:+.1f}".replace("-", "−")
            yield (
                f"{one.arm} − {one.baseline}: the differences are skewed ({skewness}), where Student's interval covers "
                "less than it says, 88 to 90 % for exponential ones (docs/guides/sweeps.md)."
            )


def _added_seeds(run: Run) -> Iterator[str]:
    seeds = len(run.sweep.axes.get("seed", ())) if run.sweep else 0
    planned = int(run.record.get("planned_seeds") or seeds)
    if seeds > planned:
        yield (
            f"{seeds_text(planned)} were planned and {seeds - planned} added later. The tests are not for that: "
            "whoever looks after 3, 5, 8 and more seeds and stops where a difference is shown has 12 to 16 % false "
            "positives."
        )


def _prompt_notes(arms: Sequence[Arm]) -> Iterator[str]:
    every = [result.accuracies for result in trainings_of(arms)]
    sampled = [point for by_source in every for one in by_source.values() for point in one.curve if point.prompts]
    if any(point.interval for point in sampled):
        unit = "clusters of similar prompts, as the data names them" if any(map(_clustered, sampled)) else "prompts"
        yield (
            f"Over prompts: intervals come from a paired cluster bootstrap: {unit}, drawn with replacement {DRAWS:,} "
            "times, the same before and after and in every arm. They cover the choice of prompts and the sampling of "
            "responses, not the training seed: another seed may end elsewhere, and only several trainings show by how "
            "much."
        )
    sources = data_sources(arms)
    for source in sources:
        changes = [change for one in every if source in one and (change := one[source].change)]
        if any(change.clusters and change.clusters <= FEW_PROMPTS for change in changes):
            unit = "clusters of prompts" if any(map(_clustered, changes)) else "prompts"
            where = f" on {source}" if len(sources) > 1 else ""
            yield f"With {FEW_PROMPTS} or fewer {unit} the intervals{where} are too narrow."


def _clustered(one: Point | Change) -> bool:
    return one.clusters != one.prompts


def _prompts(change: Change) -> str:
    return f"{change.prompts:,} prompts" + (f" in {change.clusters:,} clusters" if _clustered(change) else "")


def _accuracy_notes(result: TrainingResult) -> Iterator[str]:
    """What is unusual about the validations of a training."""
    for source, accuracy in result.accuracies.items():
        prefix = f"{source}: " if len(result.accuracies) > 1 else ""
        first_step, validations = accuracy.curve[0].step, result.training.validations.get(source, ())
        if accuracy.change and first_step > 0:
            yield f"{prefix}the first validation is at step {first_step}, so “before” is not before training"
        apart = set(validations[0].prompts) ^ set(validations[-1].prompts) if validations else ()
        if accuracy.change and apart:
            only = "are only in the first or only in the last validation: left out of the change"
            yield f"{prefix}{len(apart)} prompts {only}"
        # verl's mean of acc
        key = logged_accuracies([one for one in result.training.keys if one.startswith("val-core/")]).get(source)
        for validation in validations if key else ():
            logged = result.training.metrics.get(validation.step, {}).get(str(key))
            if logged is not None and abs(logged - validation.mean_acc) > _SAME_ACCURACY:
                yield (
                    f"{prefix}at step {validation.step} the validation samples average to "
                    f"{percent(validation.mean_acc)}, but {percent(logged)} was logged; the report shows the samples"
                )
                break
