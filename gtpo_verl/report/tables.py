"""The tables of a report, as text, for the page and the console."""

from collections.abc import Sequence

import numpy as np

from gtpo_verl.algorithms.registry import Style
from gtpo_verl.report.accuracy import Accuracy, Change
from gtpo_verl.report.figures import metric_line
from gtpo_verl.report.plots import running_mean, smoothing_window
from gtpo_verl.report.results import ArmResult, Comparison, TrainingResult
from gtpo_verl.report.seeds import Final, SeedComparison
from gtpo_verl.report.words import interval_text, number_range, p_text, percent, points, share_interval

SOURCE = "Data source"  # a column only where there are several
CHANGE_COLUMNS = ("Before", "After", "Difference", "95 % interval", "Samples", "Prompts", "Last step")
COMPARISON_COLUMNS = ("Step", "After", "95 % interval", "Gain", "95 % interval", "Prompts")
FINAL_COLUMNS = ("Seeds", "Mean", "95 % interval", "Interquartile mean", "S.d.", "Lowest", "Highest")
SEED_COLUMNS = ("Seeds", "Difference", "95 % interval", "p, t test", "p, sign flips", "Better on", "Interquartile mean")
ENTROPY_COLUMNS = ("First", "Lowest", "at step", "Last", "Rebound")
ENTROPY_KEYS = {"correct": "credit/entropy_correct", "wrong": "credit/entropy_wrong"}


def change_header(sources: Sequence[str]) -> list[str]:
    return ["Arm", *_source_cell(sources, SOURCE), *CHANGE_COLUMNS]


def change_rows(results: Sequence[TrainingResult], sources: Sequence[str]) -> list[list[str]]:
    """One row per training and data source; one per training without any."""
    rows = []
    for result in results:
        last_step = str(result.training.last_step)
        for source in sources:
            cells = _change_cells(result.accuracies.get(source))
            rows.append([result.name, *_source_cell(sources, source), *cells, last_step])
        if not sources:
            rows.append([result.name, *_change_cells(None), last_step])
    return rows


def comparison_header(sources: Sequence[str]) -> list[str]:
    return ["Arms", *_source_cell(sources, SOURCE), *COMPARISON_COLUMNS]


def comparison_rows(comparisons: Sequence[Comparison], sources: Sequence[str]) -> list[list[str]]:
    """One row per pair of trainings and data source."""
    rows = []
    for comparison in comparisons:
        found = comparison.difference
        cells = [cell for e in (found.after, found.gain) for cell in (points(e.value), interval_text(e.interval))]
        names = f"{comparison.arm.name} − {comparison.baseline.name}"
        source = _source_cell(sources, comparison.source)
        rows.append([names, *source, str(found.step), *cells, f"{found.prompts:,}"])
    return rows


def final_header(sources: Sequence[str]) -> list[str]:
    return ["Arm", *_source_cell(sources, SOURCE), *FINAL_COLUMNS]


def final_rows(finals: Sequence[Final], sources: Sequence[str]) -> list[list[str]]:
    """One row per arm and data source: the accuracy over seeds."""
    return [
        [
            final.arm.name,
            *_source_cell(sources, final.source),
            str(len(final.values)),
            percent(final.mean),
            share_interval(final.interval),
            percent(final.interquartile_mean),
            "n/a" if final.deviation is None else f"{100 * final.deviation:.1f}",
            percent(min(final.values.values())),
            percent(max(final.values.values())),
        ]
        for final in finals
    ]


def seed_header(sources: Sequence[str]) -> list[str]:
    return ["Arms", *_source_cell(sources, SOURCE), *SEED_COLUMNS]


def seed_rows(comparisons: Sequence[SeedComparison], sources: Sequence[str]) -> list[list[str]]:
    """One row per arm with a baseline and data source: the differences over seeds."""
    rows = []
    for comparison in comparisons:
        found = comparison.paired
        rows.append(
            [
                f"{comparison.arm.name} − {comparison.baseline.name}",
                *_source_cell(sources, comparison.source),
                str(found.seeds),
                points(found.mean),
                interval_text(found.interval),
                p_text(found.t_holm),
                p_text(found.sign_flip_holm),
                f"{found.better * found.seeds:g} of {found.seeds}",
                points(found.interquartile_mean),
            ]
        )
    return rows


def entropy_rows(arms: Sequence[ArmResult]) -> list[list[str]]:
    """Per arm and verdict of the responses: how far their entropy fell, and how far it has come up again."""
    return [
        [arm.name, verdict, *cells]
        for arm in arms
        for verdict, key in ENTROPY_KEYS.items()
        if (cells := _rebound_cells(arm, key))
    ]


def _rebound_cells(arm: ArmResult, key: str) -> list[str]:
    line = metric_line(arm, key, Style(light="", dark="", marker=""), smooth=True)
    if line is None:
        return []
    values = line.values if line.smoothed else running_mean(line.values, smoothing_window(len(line.values)))
    lowest = int(np.argmin(values))
    rebound = values[-1] - values[lowest]
    return [
        f"{values[0]:.3f}",
        f"{values[lowest]:.3f}",
        f"{line.steps[lowest]:.0f}",
        f"{values[-1]:.3f}",
        f"+{rebound:.3f}",
    ]


def _source_cell(sources: Sequence[str], text: str) -> list[str]:
    return [text] if len(sources) > 1 else []


def _change_cells(accuracy: Accuracy | None) -> list[str]:
    if accuracy is None:
        return ["n/a"] * 6
    change = accuracy.change
    if change is None:
        only = percent(accuracy.curve[-1].accuracy)
        return [*([only, "n/a"] if accuracy.curve[-1].step == 0 else ["n/a", only]), *["n/a"] * 4]
    return [
        *_difference_cells(change),
        number_range(change.samples) if change.samples else "n/a",
        f"{change.prompts:,}" if change.prompts else "n/a",
    ]


def _difference_cells(change: Change) -> list[str]:
    difference = change.difference
    return [
        percent(change.before),
        percent(change.after),
        points(difference.value),
        interval_text(difference.interval),
    ]
