"""The figures of a report: which metric is drawn where, and what is said where it was not logged."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.figure import Figure

from gtpo_verl.algorithms.registry import Style
from gtpo_verl.report import plots
from gtpo_verl.report.accuracy import Accuracy
from gtpo_verl.report.results import OTHER_PHASE, STEP_PHASES, VALIDATION_PHASE, ArmResult, data_sources
from gtpo_verl.report.words import curve_basis, percent

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
        "Mean policy entropy per token, in nats: over all training responses, the correct ones, and the wrong ones.",
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
        "Absolute difference between a token's entropy from vLLM and from the actor, in nats.",
        (
            MetricPanel(
                "maximum (solid) and mean (dashed) per step",
                "rollout_entropy/abs_diff_max",
                dashed="rollout_entropy/abs_diff_mean",
                log=True,
            ),
        ),
        half_width=True,
    ),
    "sign_flips": MetricFigure(
        "Sign flips",
        "Share of tokens whose advantage has the wrong sign: negative in a correct response, positive in a wrong one.",
        (
            MetricPanel("in correct responses", "credit/sign_flip_correct", percent=True),
            MetricPanel("in wrong responses", "credit/sign_flip_wrong", percent=True),
        ),
    ),
    "training": MetricFigure(
        "Inside the training",
        "Statistics of the training batches. Accuracy and score are those of the training responses.",
        (
            MetricPanel("training accuracy", "training/accuracy", percent=True),
            MetricPanel("mean score", "critic/score/mean"),
            MetricPanel("clipped tokens", "actor/pg_clipfrac", percent=True),
            MetricPanel("spread of advantages within a response", "credit/advantage_spread"),
            MetricPanel("mixed share of generated groups", "training/filter_groups/yield", percent=True),
            MetricPanel("all-right or all-wrong groups in the batch", "credit/degenerate_share", percent=True),
        ),
    ),
}

# every figure that a report may hold, in order
FIGURES = ("accuracy", "entropy", "response_length", "agreement", "sign_flips", "step_time", "training")


def draw_figures(results: Sequence[ArmResult]) -> tuple[tuple[ReportFigure, ...], tuple[str, ...]]:
    """The figures that the runs have data for, in order, and a sentence for each that is missing."""
    builders: dict[str, Callable[[Sequence[ArmResult]], ReportFigure | str]] = {
        "accuracy": _accuracy,
        "step_time": _step_time,
    }
    drawn = []
    missing = []
    for name in FIGURES:
        figure = builders[name](results) if name in builders else _metrics(name, results)
        if isinstance(figure, ReportFigure):
            drawn.append(figure)
        else:
            missing.append(figure)
    return tuple(drawn), tuple(missing)


def draw_headline(results: Sequence[ArmResult], theme: plots.Theme) -> Figure | None:
    """Accuracy over steps, one panel per data source where there are several; None where no arm was validated."""
    sources = data_sources(results)
    if not sources:
        return None
    if len(sources) > 1:
        return plots.panels_figure(_accuracy_panels(results), theme)
    subtitle = curve_basis(_accuracies(results, sources[0]))
    return plots.accuracy_figure(_accuracy_lines(results, sources[0]), theme, "Validation accuracy", subtitle)


def styles(results: Sequence[ArmResult]) -> dict[str, Style]:
    """The style of each arm, by label."""
    methods = {result.label: result.arm.method.name if result.arm.method else None for result in results}
    return plots.arm_styles(methods)


def file_name(figure: str, theme: str) -> str:
    return f"{figure}.png" if theme == "light" else f"{figure}-{theme}.png"


def _both_themes(draw: Callable[[plots.Theme], Figure]) -> dict[str, bytes]:
    return {theme.name: plots.png(draw(theme)) for theme in (plots.LIGHT, plots.DARK)}


def _accuracies(results: Sequence[ArmResult], source: str) -> list[Accuracy]:
    return [result.accuracies[source] for result in results if source in result.accuracies]


def _accuracy_lines(results: Sequence[ArmResult], source: str) -> list[plots.Line]:
    looks = styles(results)
    lines = []
    for result in results:
        if source not in result.accuracies:
            continue
        curve = result.accuracies[source].curve
        bounds = np.array([(p.interval.low, p.interval.high) if p.interval else (np.nan, np.nan) for p in curve])
        steps = np.array([point.step for point in curve])
        values = np.array([point.accuracy for point in curve])
        lines.append(plots.Line(result.name, looks[result.label], steps, values, bounds[:, 0], bounds[:, 1]))
    return lines


def _accuracy_panels(results: Sequence[ArmResult]) -> list[plots.Panel]:
    return [
        plots.Panel(source, tuple(_accuracy_lines(results, source)), percent=True, markers=True)
        for source in data_sources(results)
    ]


def _accuracy(results: Sequence[ArmResult]) -> ReportFigure | str:
    panels = _accuracy_panels(results)
    if not panels:
        return "Accuracy: no validation samples, and no val-core/…/acc/mean@… was logged."
    caption = "Share of validation responses that are correct."
    if len(panels) > 1:
        caption += " One panel per data source."
        caption += "".join(f" {panel.title}: {curve_basis(_accuracies(results, panel.title))}." for panel in panels)
    drawn = [line for panel in panels for line in panel.lines]
    return ReportFigure(
        "accuracy",
        "Accuracy",
        caption + _absence(results, drawn, "validation accuracy"),
        alt="Validation accuracy over training steps: "
        + "; ".join(
            f"{line.label}{f' on {panel.title}' if len(panels) > 1 else ''} from {percent(line.values[0])} "
            f"to {percent(line.values[-1])}"
            for panel in panels
            for line in panel.lines
        ),
        png=_both_themes(lambda theme: _drawn(draw_headline(results, theme))),
    )


def _drawn(figure: Figure | None) -> Figure:
    assert figure is not None
    return figure


def _metrics(name: str, results: Sequence[ArmResult]) -> ReportFigure | str:
    spec = METRIC_FIGURES[name]
    panels = []
    warnings = []
    absent: dict[str, list[str]] = {}  # keys by the arms that lack them
    for panel in spec.panels:
        lines = []
        lacking = []
        for result in results:
            drawn, warning = _metric_lines(panel, result, styles(results)[result.label])
            lines += drawn
            warnings += warning
            if not drawn:
                lacking.append(result.name)
        if lines:
            panels.append(plots.Panel(panel.title, tuple(lines), panel.percent, panel.log))
        if lacking:
            absent.setdefault(" and ".join(lacking) if lines else "any arm", []).append(panel.key)
    if not panels:
        return f"{spec.title}: no arm logged {', '.join(panel.key for panel in spec.panels)}."
    warnings += [f"not logged by {arms}: {', '.join(keys)}" for arms, keys in absent.items()]
    caption = " ".join([spec.caption, *(f"{warning[0].upper()}{warning[1:]}." for warning in warnings)])
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


def _metric_lines(panel: MetricPanel, result: ArmResult, style: Style) -> tuple[list[plots.Line], list[str]]:
    """An arm's curves in a panel, and notes on them."""
    logged = result.arm.keys
    lines = []
    warnings = []
    if panel.key in logged:
        lines.append(plots.Line(result.name, style, *result.arm.series(panel.key)))
    elif panel.fallback in logged:
        lines.append(plots.Line(result.name, style, *result.arm.series(panel.fallback)))
        warnings.append(f"{result.name} shows {panel.fallback} for {panel.title}")
    if panel.dashed in logged:
        lines.append(plots.Line(result.name, style, *result.arm.series(panel.dashed), dashed=True))
    return lines, warnings


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
        "Mean seconds per training step. Checkpoints and validations are averaged over all steps." + absent,
        alt="; ".join(f"{name}: {sum(row.values()):.3g} seconds per step" for name, row in rows.items()),
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
