"""The results of an evaluation as text."""

from collections.abc import Iterable, Mapping

from rich.console import Console
from rich.table import Table

from gtpo_verl.evaluation.summary import Figure, SourceSummary


def print_summary(summaries: Iterable[SourceSummary]) -> None:
    """Print one table per data source."""
    console = Console(soft_wrap=True)
    for summary in summaries:
        table = Table("", "value", "95 % interval", title_justify="left")
        table.title = f"{summary.data_source}: {summary.problems} problems, {summary.samples} samples each"
        rows = [(name, figure, True) for name, figure in summary.named.items() if name not in ("pass@1", "maj@1")]
        if summary.response_length and summary.truncated_share:
            rows += [("response length", summary.response_length, False), ("truncated", summary.truncated_share, True)]
        for name, figure, share in rows:
            table.add_row(name, *_cells(figure, share))
        if summary.failed:
            table.add_row("failed samples, counted as wrong", str(summary.failed), "")
        if summary.unjudged:
            table.add_row("verifier failures, counted as wrong", str(summary.unjudged), "")
        console.print(table)


def print_changes(changes: Mapping[str, Figure]) -> None:
    """Print the change of each data source since before the training."""
    for source, figure in changes.items():
        low, high = figure.low, figure.high
        interval = "no spread" if low is None or high is None else f"{100 * low:+.1f} to {100 * high:+.1f}"
        change = f"{100 * figure.value:+.1f} points since before the training"
        print(f"{source}: {change}, 95 % interval {interval}, paired by problem")


def _cells(figure: Figure, share: bool) -> tuple[str, str]:
    def text(value: float) -> str:
        return f"{100 * value:.1f} %" if share else f"{value:,.1f}"

    if figure.low is None or figure.high is None:
        return text(figure.value), "no spread"
    return text(figure.value), f"{text(figure.low)} to {text(figure.high)}"
