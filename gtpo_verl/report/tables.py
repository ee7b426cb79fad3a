"""The tables of accuracies, as text, for the page and the console."""

from collections.abc import Mapping, Sequence

from gtpo_verl.report.accuracy import Accuracy, Change
from gtpo_verl.report.results import ArmResult, Comparison
from gtpo_verl.report.words import interval_text, number_range, percent, points

SOURCE = "Data source"  # a column only where there are several
CHANGE_COLUMNS = ("Before", "After", "Difference", "95 % interval", "Samples", "Prompts", "Last step")
COMPARISON_COLUMNS = ("Step", "After", "95 % interval", "Gain", "95 % interval", "Prompts")


def change_header(sources: Sequence[str]) -> list[str]:
    return ["Arm", *_source_cell(sources, SOURCE), *CHANGE_COLUMNS]


def change_rows(results: Sequence[ArmResult], means: Mapping[str, Change], sources: Sequence[str]) -> list[list[str]]:
    """One row per arm and data source (one per arm without any), then for each data source the mean of the arms."""
    rows = []
    for result in results:
        last_step = str(result.arm.last_step)
        for source in sources:
            cells = _change_cells(result.accuracies.get(source))
            rows.append([result.name, *_source_cell(sources, source), *cells, last_step])
        if not sources:
            rows.append([result.name, *_change_cells(None), last_step])
    for source in sources:
        if source in means:
            rows.append(["mean", *_source_cell(sources, source), *_difference_cells(means[source]), "", "", ""])
    return rows


def comparison_header(sources: Sequence[str]) -> list[str]:
    return ["Arms", *_source_cell(sources, SOURCE), *COMPARISON_COLUMNS]


def comparison_rows(comparisons: Sequence[Comparison], sources: Sequence[str]) -> list[list[str]]:
    """One row per pair of arms and data source."""
    rows = []
    for comparison in comparisons:
        found = comparison.difference
        cells = [cell for e in (found.after, found.gain) for cell in (points(e.value), interval_text(e.interval))]
        names = f"{comparison.arm.name} − {comparison.baseline.name}"
        source = _source_cell(sources, comparison.source)
        rows.append([names, *source, str(found.step), *cells, f"{found.prompts:,}"])
    return rows


def _source_cell(sources: Sequence[str], text: str) -> list[str]:
    return [text] if len(sources) > 1 else []


def _change_cells(accuracy: Accuracy | None) -> list[str]:
    if accuracy is None:
        return ["n/a"] * 6
    change = accuracy.change
    if change is None:
        return ["n/a", percent(accuracy.curve[-1].accuracy), *["n/a"] * 4]
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
