"""The tables of a report, as text, for the page and the console."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from gtpo_verl.report.figures import metric_line
from gtpo_verl.report.results import Accuracy, Arm, Comparison, TrainingResult
from gtpo_verl.report.seeds import Final, SeedComparison
from gtpo_verl.report.words import interval_text, number_range, p_text, percent, points, share_interval

ENTROPY_KEYS = {"correct": "credit/entropy_correct", "wrong": "credit/entropy_wrong"}


@dataclass(frozen=True)
class Table:
    """The names of columns, and rows of as many cells."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def _by_source(
    first: str, columns: Sequence[str], rows: Iterable[tuple[str, str, Sequence[str]]], sources: Sequence[str]
) -> Table:
    """A table of rows (name, data source, cells), with a column for the data source where there are several."""
    several = len(sources) > 1
    return Table(
        (first, *(["Data source"] if several else []), *columns),
        tuple((name, *([source] if several else []), *cells) for name, source, cells in rows),
    )


def change_table(results: Sequence[TrainingResult], sources: Sequence[str]) -> Table:
    """One row per training and data source; one per training without any."""
    rows = [
        (result.name, source, [*_change_cells(result.accuracies.get(source)), str(result.training.last_step)])
        for result in results
        for source in sources or [""]
    ]
    columns = ("Before", "After", "Difference", "95 % interval", "Samples", "Prompts", "Last step")
    return _by_source("Arm", columns, rows, sources)


def comparison_table(comparisons: Sequence[Comparison], sources: Sequence[str], *, intervals: bool) -> Table:
    """One row per pair of trainings and data source; intervals over prompts where there are several seeds as well."""
    rows = []
    for found in comparisons:
        cells = [str(found.step)]
        for estimate in (found.after, found.gain):
            cells += [points(estimate.value), *([interval_text(estimate.interval)] if intervals else [])]
        rows.append((f"{found.arm} − {found.baseline}", found.source, [*cells, f"{found.prompts:,}"]))
    interval = ("95 % interval",) if intervals else ()
    return _by_source("Arms", ("Step", "After", *interval, "Gain", *interval, "Prompts"), rows, sources)


def final_table(finals: Sequence[Final], sources: Sequence[str]) -> Table:
    """One row per arm and data source: the accuracy over seeds."""
    columns = ("Seeds", "Mean", "95 % interval", "Interquartile mean", "S.d.", "Lowest", "Highest")
    rows = []
    for final in finals:
        values = final.values.values()
        deviation = "n/a" if final.deviation is None else f"{100 * final.deviation:.1f}"
        cells = [str(len(values)), percent(final.mean), share_interval(final.interval)]
        cells += [percent(final.interquartile_mean), deviation, percent(min(values)), percent(max(values))]
        rows.append((final.arm, final.source, cells))
    return _by_source("Arm", columns, rows, sources)


def seed_table(comparisons: Sequence[SeedComparison], sources: Sequence[str]) -> Table:
    """One row per arm with a baseline and data source: the differences over seeds."""
    columns = ("Seeds", "Difference", "95 % interval", "Other prompts too", "p, t test", "p, sign flips", "Better on")
    rows = []
    for comparison in comparisons:
        found = comparison.paired
        cells = [str(found.seeds), points(found.mean), interval_text(found.interval)]
        cells += [interval_text(comparison.crossed), p_text(found.t_holm), p_text(found.sign_flip_holm)]
        cells += [f"{found.better * found.seeds:g} of {found.seeds}", points(found.interquartile_mean)]
        rows.append((f"{comparison.arm} − {comparison.baseline}", comparison.source, cells))
    return _by_source("Arms", (*columns, "Interquartile mean"), rows, sources)


def unfinished_table(comparisons: Sequence[SeedComparison], sources: Sequence[str]) -> Table:
    """One row per arm with a baseline and data source of which a training did not finish, counted as far as it came."""
    rows = []
    for comparison in comparisons:
        found = comparison.paired
        cells = [str(found.seeds), points(found.mean), interval_text(found.interval), p_text(found.t_p)]
        rows.append((f"{comparison.arm} − {comparison.baseline}", comparison.source, cells))
    return _by_source("Arms", ("Seeds", "Difference", "95 % interval", "p, not adjusted"), rows, sources)


def entropy_table(arms: Sequence[Arm]) -> Table:
    """Per arm and verdict of the responses: how far their entropy fell, and how far it has come up again."""
    rows = []
    for arm in arms:
        for verdict, key in ENTROPY_KEYS.items():
            if line := metric_line(arm, key):
                place = int(np.argmin(line.values))
                first, lowest, last = (f"{value:.3f}" for value in line.values[[0, place, -1]])
                rebound = f"+{line.values[-1] - line.values[place]:.3f}"
                rows.append((arm.name, verdict, first, lowest, f"{line.steps[place]:.0f}", last, rebound))
    return Table(("Arm", "Responses", "First", "Lowest", "at step", "Last", "Rebound"), tuple(rows))


def _change_cells(accuracy: Accuracy | None) -> list[str]:
    if accuracy is None:
        return ["n/a"] * 6
    change = accuracy.change
    if change is None:
        only = percent(accuracy.curve[-1].accuracy)
        return [*([only, "n/a"] if accuracy.curve[-1].step == 0 else ["n/a", only]), *["n/a"] * 4]
    cells = [percent(change.before), percent(change.after), points(change.difference.value)]
    samples = number_range(change.samples) if change.samples else "n/a"
    prompts = f"{change.prompts:,}" if change.prompts else "n/a"
    return [*cells, interval_text(change.difference.interval), samples, prompts]
