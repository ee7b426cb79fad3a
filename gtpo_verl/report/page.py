"""The report of one or several runs: a self-contained HTML page, its figures, and a summary for programs.

Whatever a run did not log is named as missing, never filled in, and data sources are never pooled.
"""

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from importlib.resources import files
from pathlib import Path
from typing import Any

import jinja2
from rich.console import Console
from rich.table import Table

from gtpo_verl.errors import UserError
from gtpo_verl.files import write_bytes, write_text
from gtpo_verl.report import figures, plots, results, tables, words
from gtpo_verl.report.accuracy import Accuracy, Change
from gtpo_verl.report.figures import ReportFigure
from gtpo_verl.report.results import ArmResult, Comparison
from gtpo_verl.runs.reader import Run, read_runs

SUMMARY_SCHEMA = 2  # raised when a key of summary.json changes its meaning or goes


@dataclass(frozen=True)
class Report:
    """Everything the page says, and where it was written.

    ``status``: a sentence about incomplete runs, or None; ``means``: the change averaged over the arms, by data source.
    """

    title: str
    status: str | None
    runs: tuple[Run, ...]
    arms: tuple[ArmResult, ...]
    means: Mapping[str, Change]
    comparisons: tuple[Comparison, ...]
    figures: tuple[ReportFigure, ...]
    missing: tuple[str, ...]
    notes: tuple[str, ...]
    html: Path
    summary: Path


def default_output(paths: Sequence[Path]) -> Path:
    """Where the report of these runs is written by default: into the run itself, or under outputs/ for several."""
    if len(paths) == 1:
        return paths[0].with_name(f"{paths[0].stem}-report") if paths[0].is_file() else paths[0]
    names = [name.replace("/", ".") for name in results.distinct_names(list(dict.fromkeys(paths)))]
    return Path("outputs") / f"report-{'-'.join(names)}"


def write_report(runs: Sequence[Path], output: Path) -> Report:
    """Read runs and write their report: ``report.html``, ``summary.json`` and ``figures/*.png`` in ``output``.

    Args:
        runs: directories or files as `gtpo_verl.runs.reader.read_run` takes them.
        output: directory, made if it does not exist.

    Raises:
        UserError: a run cannot be read, or the output cannot be written.
    """
    read = read_runs(runs)
    pictures = output / "figures"
    try:
        pictures.mkdir(parents=True, exist_ok=True)
        report = _analyse(read, output)
        for name in figures.FIGURES:
            for theme in (plots.LIGHT, plots.DARK):
                # a figure left by an earlier report would be taken for one of this report
                (pictures / figures.file_name(name, theme.name)).unlink(missing_ok=True)
        for figure in report.figures:
            for theme_name, png in figure.png.items():
                write_bytes(pictures / figures.file_name(figure.name, theme_name), png)
        write_text(report.summary, json.dumps(_summary(report), indent=2, ensure_ascii=False) + "\n")
        write_text(report.html, _page(report))
    except OSError as error:
        raise UserError(f"cannot write the report to {output} ({error.strerror}): choose another --output") from error
    return report


def write_headline_figure(report: Report, path: Path, theme: plots.Theme = plots.LIGHT) -> None:
    """Write the report's first figure, accuracy over steps, as a PNG.

    Raises:
        UserError: the runs have no validation accuracy.
    """
    figure = figures.draw_headline(report.arms, theme)
    if figure is None:
        raise UserError("these runs have no validation accuracy to draw: set trainer.test_freq and train again")
    write_bytes(path, plots.png(figure))


def print_table(report: Report, console: Console | None = None) -> None:
    """Print the before/after table of each data source, a warning about incomplete runs, and the report's path."""
    console = console or Console()
    sources = results.data_sources(report.arms)
    for shown in [[source] for source in sources] or [[]]:
        title = report.title if len(sources) < 2 else f"{report.title}, {shown[0]}"
        table = Table(title=title, title_justify="left", title_style="bold", header_style="dim", box=None)
        table.add_column("arm", overflow="fold")
        for column in ("before", "after", "change", "95 % interval", "samples", "prompts", "steps"):
            table.add_column(column, justify="right", no_wrap=True)
        for row in tables.change_rows(report.arms, report.means, shown):
            table.add_row(*row)
        console.print(table)
    if report.status:
        console.print(report.status, style="bold yellow", highlight=False, markup=False)
    console.print(f"report: {report.html}", highlight=False, markup=False, soft_wrap=True)


def _analyse(runs: Sequence[Run], output: Path) -> Report:
    arms = results.arm_results(runs)
    drawn, missing = figures.draw_figures(arms)
    return Report(
        title=" · ".join(dict.fromkeys(run.name for run in runs)),
        status=words.status_text(runs, arms),
        runs=tuple(runs),
        arms=arms,
        means=results.mean_changes(arms),
        comparisons=results.comparisons(arms),
        figures=drawn,
        missing=missing,
        notes=words.notes(runs, arms),
        html=output / "report.html",
        summary=output / "summary.json",
    )


def _page(report: Report) -> str:
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters.update(
        points=words.points,
        interval=words.interval_text,
        verdict=words.verdict,
        base64=lambda png: base64.b64encode(png).decode("ascii"),
    )
    template = environment.from_string((files("gtpo_verl.report") / "report.html.j2").read_text(encoding="utf-8"))
    sources = results.data_sources(report.arms)
    return template.render(
        report=report,
        sources=sources,
        no_accuracy=words.NO_ACCURACY,
        header=tables.change_header(sources),
        rows=tables.change_rows(report.arms, report.means, sources),
        comparison_header=tables.comparison_header(sources),
        comparison_rows=tables.comparison_rows(report.comparisons, sources),
        styles=figures.styles(report.arms),
        differences=results.config_differences(report.arms),
        written=datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z"),
    )


def _summary(report: Report) -> dict[str, Any]:
    """The report for programs: shares in [0, 1], seconds, nats; differences are after minus before."""
    return {
        "schema": SUMMARY_SCHEMA,
        "title": report.title,
        "status": report.status,
        "runs": [_run_summary(run) for run in report.runs],
        "arms": [_arm_summary(result) for result in report.arms],
        "means": {source: asdict(change) for source, change in report.means.items()},
        "comparisons": [
            {
                "arm": comparison.arm.label,
                "baseline": comparison.baseline.label,
                "source": comparison.source,
                **asdict(comparison.difference),
            }
            for comparison in report.comparisons
        ],
        "missing": list(report.missing),
        "notes": list(report.notes),
    }


def _run_summary(run: Run) -> dict[str, Any]:
    return {
        "name": run.name,
        "path": str(run.path),
        "status": run.status,
        "created": run.created,
        "command": run.command,
        "versions": dict(run.versions),
        "hardware": run.hardware,
        "seed": run.seed,
        "settings": dict(run.settings),
        "missing_arms": list(run.missing_arms),
    }


def _arm_summary(result: ArmResult) -> dict[str, Any]:
    return {
        "label": result.label,
        "run": result.run,
        "arm": result.arm.name,
        "path": str(result.arm.path),
        "last_step": result.arm.last_step,
        "name": result.name,
        "method": result.arm.method.name if result.arm.method else None,
        "sources": {source: _accuracy_summary(accuracy) for source, accuracy in result.accuracies.items()},
        "step_seconds": dict(result.step_seconds),
        "last_metrics": {key: float(result.arm.series(key)[1][-1]) for key in sorted(result.arm.keys)},
    }


def _accuracy_summary(accuracy: Accuracy) -> dict[str, Any]:
    return {
        "verdict": words.verdict(accuracy),
        "change": asdict(accuracy.change) if accuracy.change else None,
        "curve": [asdict(point) for point in accuracy.curve],
    }
