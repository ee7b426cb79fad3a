"""The figures of a report: which metric is drawn where, and what to say where it was not logged."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.figure import Figure

from gtpo_verl.report import plots
from gtpo_verl.report.analysis import (
    OTHER_PHASE,
    STEP_PHASES,
    VALIDATION_PHASE,
    ArmResult,
    curve_basis,
    logged_accuracies,
    percent,
)

_SMALL_PHASE = 0.01  # a phase below this share of the longest step, in every arm, is drawn as part of "other"


@dataclass(frozen=True)
class ReportFigure:
    """A drawn figure: what it shows, in words, and its PNGs by theme, "light" and "dark"."""

    name: str
    title: str
    caption: str
    alt: str
    png: Mapping[str, bytes]
    half_width: bool = False


@dataclass(frozen=True)
class MetricPanel:
    """A metric over steps. ``fallback`` is drawn for an arm that lacks ``key``; ``dashed`` is drawn beside it."""

    title: str
    key: str
    fallback: str | None = None
    dashed: str | None = None
    percent: bool = False
    log: bool = False


@dataclass(frozen=True)
class MetricFigure:
    """One or more metrics over steps under one title."""

    title: str
    caption: str
    panels: tuple[MetricPanel, ...]
    share_y: bool = False
    half_width: bool = False


METRIC_FIGURES = {
    "entropy": MetricFigure(
        "Entropy",
        "Mean policy entropy of a token, in nats: of all training responses, of those that the verifier accepts, and "
        "of those that it rejects.",
        (
            MetricPanel("all responses", "credit/entropy_all", fallback="actor/entropy"),
            MetricPanel("correct responses", "credit/entropy_correct"),
            MetricPanel("wrong responses", "credit/entropy_wrong"),
        ),
        share_y=True,
    ),
    "response_length": MetricFigure(
        "Response length",
        "Mean number of tokens of a training response.",
        (MetricPanel("tokens", "response_length/mean"),),
        half_width=True,
    ),
    "agreement": MetricFigure(
        "Do rollout and actor agree?",
        "Difference between a token's entropy as vLLM returned it and as the actor computes it, in nats.",
        (
            MetricPanel(
                "largest (solid) and mean (dashed) of a step",
                "rollout_entropy/abs_diff_max",
                dashed="rollout_entropy/abs_diff_mean",
                log=True,
            ),
        ),
        half_width=True,
    ),
    "sign_flips": MetricFigure(
        "Sign flips",
        "Share of tokens whose advantage points against the verdict: below zero in a correct response, above zero in "
        "a wrong one.",
        (
            MetricPanel("in correct responses", "credit/sign_flip_correct", percent=True),
            MetricPanel("in wrong responses", "credit/sign_flip_wrong", percent=True),
        ),
    ),
    "training": MetricFigure(
        "Inside the training",
        "What the optimiser saw. Accuracy and score are those of the training responses, new ones at every step.",
        (
            MetricPanel("training accuracy", "training/accuracy", percent=True),
            MetricPanel("mean score", "critic/score/mean"),
            MetricPanel("clipped tokens", "actor/pg_clipfrac", percent=True),
            MetricPanel("spread of advantages inside a response", "credit/advantage_spread"),
            MetricPanel("generated groups that were mixed", "training/filter_groups/yield", percent=True),
            MetricPanel("groups without contrast that were trained on", "credit/degenerate_share", percent=True),
        ),
    ),
}

# every figure that a report may hold, in order
FIGURES = ("accuracy", "data_sources", "entropy", "response_length", "agreement", "sign_flips", "step_time", "training")


def draw_figures(results: Sequence[ArmResult]) -> tuple[tuple[ReportFigure, ...], tuple[str, ...]]:
    """The figures that the runs have the data for, in order, and a sentence for each that is missing."""
    builders: dict[str, Callable[[Sequence[ArmResult]], ReportFigure | str | None]] = {
        "accuracy": _accuracy,
        "data_sources": _data_sources,
        "step_time": _step_time,
    }
    drawn = []
    missing = []
    for name in FIGURES:
        figure = builders[name](results) if name in builders else _metrics(name, results)
        if isinstance(figure, ReportFigure):
            drawn.append(figure)
        elif figure:
            missing.append(figure)
    return tuple(drawn), tuple(missing)


def draw_headline(results: Sequence[ArmResult], theme: plots.Theme) -> Figure | None:
    """Accuracy over steps; None where no arm has a validation accuracy."""
    lines = _accuracy_lines(results)
    return plots.accuracy_figure(lines, theme, "Validation accuracy", curve_basis(results)) if lines else None


def styles(results: Sequence[ArmResult]) -> dict[str, plots.ArmStyle]:
    """The look of each arm, by label."""
    return plots.arm_styles([result.label for result in results])


def file_name(figure: str, theme: str) -> str:
    return f"{figure}.png" if theme == "light" else f"{figure}-{theme}.png"


def _both_themes(draw: Callable[[plots.Theme], Figure]) -> dict[str, bytes]:
    return {theme.name: plots.png(draw(theme)) for theme in (plots.LIGHT, plots.DARK)}


def _accuracy_lines(results: Sequence[ArmResult]) -> list[plots.Line]:
    looks = styles(results)
    lines = []
    for result in results:
        if not result.curve:
            continue
        bounds = np.array([(p.interval.low, p.interval.high) if p.interval else (np.nan, np.nan) for p in result.curve])
        steps = np.array([point.step for point in result.curve])
        values = np.array([point.accuracy for point in result.curve])
        lines.append(plots.Line(result.name, looks[result.label], steps, values, bounds[:, 0], bounds[:, 1]))
    return lines


def _accuracy(results: Sequence[ArmResult]) -> ReportFigure | str:
    lines = _accuracy_lines(results)
    if not lines:
        return "Accuracy: no validation samples, and no single val-core/…/acc/mean@… was logged."
    subtitle = curve_basis(results)
    absent = _absence(results, lines, "validation accuracy")
    return ReportFigure(
        "accuracy",
        "Accuracy",
        f"Share of validation responses that the verifier accepts.{absent}",
        alt="Validation accuracy over training steps: "
        + "; ".join(f"{line.label} from {percent(line.values[0])} to {percent(line.values[-1])}" for line in lines),
        png=_both_themes(lambda theme: plots.accuracy_figure(lines, theme, "Validation accuracy", subtitle)),
    )


def _data_sources(results: Sequence[ArmResult]) -> ReportFigure | None:
    keys = [(result, logged_accuracies(result.arm)) for result in results]
    sources = sorted({source for _, by_source in keys for source in by_source})
    if len(sources) < 2:
        return None
    looks = styles(results)
    panels = [
        plots.Panel(
            source,
            tuple(
                plots.Line(result.name, looks[result.label], *result.arm.series(by_source[source]))
                for result, by_source in keys
                if source in by_source
            ),
            percent=True,
        )
        for source in sources
    ]
    return ReportFigure(
        "data_sources",
        "Accuracy by data source",
        "The mean that verl logged at each validation.",
        alt=f"Validation accuracy over training steps. {_ends(panels)}",
        png=_both_themes(lambda theme: plots.panels_figure(panels, theme)),
    )


def _metrics(name: str, results: Sequence[ArmResult]) -> ReportFigure | str:
    spec = METRIC_FIGURES[name]
    panels = []
    remarks = []
    absent: dict[str, list[str]] = {}  # keys by the arms that lack them
    for panel in spec.panels:
        lines = []
        lacking = []
        for result in results:
            drawn, remark = _metric_lines(panel, result, styles(results)[result.label])
            lines += drawn
            remarks += remark
            if not drawn:
                lacking.append(result.name)
        if lines:
            panels.append(plots.Panel(panel.title, tuple(lines), panel.percent, panel.log))
        if lacking:
            absent.setdefault(" and ".join(lacking) if lines else "any arm", []).append(panel.key)
    if not panels:
        return f"{spec.title}: no arm logged {', '.join(panel.key for panel in spec.panels)}."
    remarks += [f"not logged by {arms}: {', '.join(keys)}" for arms, keys in absent.items()]
    caption = " ".join([spec.caption, *(f"{remark[0].upper()}{remark[1:]}." for remark in remarks)])
    if any(plots.smoothing_window(len(line.values)) > 1 and not panel.log for panel in panels for line in panel.lines):
        caption += " Bold: running mean over a tenth of the steps."
    width = plots.HALF_WIDTH if spec.half_width else plots.FULL_WIDTH
    return ReportFigure(
        name,
        spec.title,
        caption,
        alt=f"{spec.title} over training steps. {_ends(panels)}",
        png=_both_themes(lambda theme: plots.panels_figure(panels, theme, spec.share_y, width)),
        half_width=spec.half_width,
    )


def _metric_lines(panel: MetricPanel, result: ArmResult, style: plots.ArmStyle) -> tuple[list[plots.Line], list[str]]:
    """An arm's curves in a panel, and what to say about them."""
    logged = result.arm.keys
    lines = []
    remarks = []
    if panel.key in logged:
        lines.append(plots.Line(result.name, style, *result.arm.series(panel.key)))
    elif panel.fallback in logged:
        lines.append(plots.Line(result.name, style, *result.arm.series(panel.fallback)))
        remarks.append(f"{result.name} shows {panel.fallback} for {panel.title}")
    if panel.dashed in logged:
        lines.append(plots.Line(result.name, style, *result.arm.series(panel.dashed), dashed=True))
    return lines, remarks


def _step_time(results: Sequence[ArmResult]) -> ReportFigure | str:
    timed = {result.name: result.step_seconds for result in results if result.step_seconds}
    if not timed:
        return "Step time by phase: no arm logged timing_s/step."
    threshold = _SMALL_PHASE * max(sum(phases.values()) for phases in timed.values())
    titles = [title for title in STEP_PHASES.values() if any(arm.get(title, 0) >= threshold for arm in timed.values())]
    rows = {}
    for name, phases in timed.items():
        row = {title: phases.get(title, 0.0) for title in titles}
        validation = phases.get(VALIDATION_PHASE, 0.0)
        row[OTHER_PHASE] = sum(phases.values()) - validation - sum(row.values())
        rows[name] = {**row, VALIDATION_PHASE: validation} if validation else row
    absent = _absence([result for result in results if result.name not in timed], [], "timing_s/step")
    return ReportFigure(
        "step_time",
        "Step time by phase",
        "Mean seconds a training step. Checkpoints and validations, which not every step has, are spread over all."
        + absent,
        alt="; ".join(f"{name}: {sum(row.values()):.3g} seconds a step" for name, row in rows.items()),
        png=_both_themes(lambda theme: plots.phases_figure(rows, theme)),
    )


def _absence(results: Sequence[ArmResult], lines: Sequence[plots.Line], what: str) -> str:
    absent = [result.name for result in results if result.name not in {line.label for line in lines}]
    return f" No {what}: {', '.join(absent)}." if absent else ""


def _ends(panels: Sequence[plots.Panel]) -> str:
    return "; ".join(
        f"{panel.title}: "
        + ", ".join(f"{line.label} from {line.values[0]:.3g} to {line.values[-1]:.3g}" for line in panel.lines)
        for panel in panels
    )
