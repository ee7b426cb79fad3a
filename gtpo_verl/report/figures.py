"""The figures of a report: which metric is drawn where, and what is said where it was not logged.

An arm with several seeds is drawn as the mean over them, with the band of Student's interval from three seeds on.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from matplotlib.figure import Figure

from gtpo_verl.algorithms.registry import Style
from gtpo_verl.report import plots
from gtpo_verl.report.pass_at_k import dress_k_axis, pass_at_ks
from gtpo_verl.report.results import (
    OTHER_PHASE,
    STEP_PHASES,
    VALIDATION_PHASE,
    ArmResult,
    TrainingResult,
    cost_until,
    data_sources,
    has_seeds,
    trainings_of,
)
from gtpo_verl.report.seeds import over_seeds
from gtpo_verl.report.words import curve_basis, percent, seed_basis

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
FIGURES = (
    *("accuracy", "cost", "entropy", "response_length", "agreement"),
    *("pass_at_k", "sign_flips", "step_time", "training"),
)


def draw_figures(arms: Sequence[ArmResult]) -> tuple[tuple[ReportFigure, ...], tuple[str, ...]]:
    """The figures that the runs have data for, in order, and a sentence for each that is missing."""
    builders: dict[str, Callable[[Sequence[ArmResult]], ReportFigure | str]] = {
        "accuracy": _accuracy,
        "cost": _cost,
        "pass_at_k": _pass_at_k,
        "step_time": _step_time,
    }
    drawn = []
    missing = []
    for name in FIGURES:
        figure = builders[name](arms) if name in builders else _metrics(name, arms)
        if isinstance(figure, ReportFigure):
            drawn.append(figure)
        else:
            missing.append(figure)
    return tuple(drawn), tuple(missing)


def styles(arms: Sequence[ArmResult]) -> dict[str, Style]:
    """The style of each arm, by name."""
    return plots.arm_styles({arm.name: arm.arm.method for arm in arms})


def file_name(figure: str, theme: str) -> str:
    return f"{figure}.png" if theme == "light" else f"{figure}-{theme}.png"


def _both_themes(draw: Callable[[plots.Theme], Figure]) -> dict[str, bytes]:
    return {theme.name: plots.png(draw(theme)) for theme in (plots.LIGHT, plots.DARK)}


def _basis(arms: Sequence[ArmResult], source: str) -> str:
    """What the curves of a data source rest on: seeds, or the prompts of single trainings."""
    if has_seeds(arms):
        return seed_basis(arms)
    return curve_basis([one.accuracies[source] for one in trainings_of(arms) if source in one.accuracies])


def _accuracy_lines(arms: Sequence[ArmResult], source: str) -> list[plots.Line]:
    """A curve per arm: over seeds where any arm has several, so that all bands are of one kind; else over prompts."""
    looks = styles(arms)
    lines = []
    for arm in arms:
        curves = [one.accuracies[source].curve for one in arm.counted if source in one.accuracies]
        if not curves:
            continue
        if has_seeds(arms):
            by_step = [{float(point.step): point.accuracy for point in curve} for curve in curves]
            lines.append(plots.Line(arm.name, looks[arm.name], *over_seeds(by_step)))
            continue
        (curve,) = curves
        bounds = np.array([(p.interval.low, p.interval.high) if p.interval else (np.nan, np.nan) for p in curve])
        steps = np.array([point.step for point in curve], dtype=np.float64)
        values = np.array([point.accuracy for point in curve])
        lines.append(plots.Line(arm.name, looks[arm.name], steps, values, bounds[:, 0], bounds[:, 1]))
    return lines


def _accuracy_panels(arms: Sequence[ArmResult]) -> list[plots.Panel]:
    return [
        plots.Panel(source, tuple(_accuracy_lines(arms, source)), percent=True, markers=True)
        for source in data_sources(arms)
    ]


def _cost(arms: Sequence[ArmResult]) -> ReportFigure | str:
    """Accuracy against what it cost: responses generated, and seconds."""
    panels = []
    for source in data_sources(arms):
        prefix = f"{source}, " if len(data_sources(arms)) > 1 else ""
        for what, title in (("responses", "responses generated"), ("seconds", "time of training")):
            lines = [line for arm in arms for line in _cost_line(arm, source, what, styles(arms)[arm.name])]
            if not lines:
                continue
            unit, factor = _time_unit(lines) if what == "seconds" else ("responses", 1.0)
            scaled = tuple(replace(line, steps=line.steps * factor) for line in lines)
            panels.append(plots.Panel(f"{prefix}by {title}", scaled, percent=True, markers=True, x_label=unit))
    if not panels:
        return "Accuracy by cost: no arm was validated and logged the time or the number of responses of every step."
    caption = (
        "The same accuracies against what had been spent. Responses: all that were generated to train, also those of "
        "groups that dynamic sampling left out. Time: of training steps, without validations. What a resume repeated "
        "is not counted."
    )
    if has_seeds(arms):
        caption += " Means over seeds, of accuracy and of cost."
    drawn = [line for panel in panels for line in panel.lines]
    return ReportFigure(
        "cost",
        "Accuracy by cost",
        caption + _absence(arms, drawn, "cost"),
        alt=f"Validation accuracy by cost. {_ends(panels)}",
        png=_both_themes(lambda theme: plots.panels_figure(panels, theme)),
    )


def _cost_line(arm: ArmResult, source: str, what: str, style: Style) -> list[plots.Line]:
    """The arm's curve over its cost; none where a training did not log it."""
    validated = [one for one in arm.counted if source in one.accuracies]
    costs = [cost_until(one.training, what) for one in validated]
    if not validated or any(cost is None for cost in costs):
        return []
    known = [cost for cost in costs if cost is not None]
    curves = [
        {float(point.step): point.accuracy for point in one.accuracies[source].curve if point.step in cost}
        for one, cost in zip(validated, known, strict=True)
    ]
    steps, values, low, high = over_seeds(curves)
    spent = np.array([[cost[int(step)] for step in steps] for cost in known]).mean(axis=0)
    return [plots.Line(arm.name, style, spent, values, low, high)]


def _time_unit(lines: Sequence[plots.Line]) -> tuple[str, float]:
    longest = max(float(line.steps.max()) for line in lines)
    if longest < 600:
        return "seconds", 1.0
    return ("minutes", 1 / 60) if longest < 4 * 3600 else ("hours", 1 / 3600)


def _pass_at_k(arms: Sequence[ArmResult]) -> ReportFigure | str:
    """pass@k of the last validation, where a prompt was sampled more than once."""
    panels = []
    for source in data_sources(arms):
        lines = []
        for arm in arms:
            curves = [curve for one in arm.counted if (curve := pass_at_ks(one.training.validations.get(source, ())))]
            if curves:
                lines.append(plots.Line(arm.name, styles(arms)[arm.name], *over_seeds(curves)))
        if lines:
            panels.append(plots.Panel(source, tuple(lines), percent=True, markers=True))
    if not panels:
        return "pass@k: every prompt of the validations was sampled once, or no samples were kept."
    half = len(panels) == 1

    def draw(theme: plots.Theme) -> Figure:
        page = plots.panels_figure(panels, theme, width=plots.HALF_WIDTH if half else plots.FULL_WIDTH)
        for axes, panel in zip(page.axes, panels, strict=True):
            dress_k_axis(axes, [int(k) for k in panel.lines[0].steps], theme)
        return page

    drawn = [line for panel in panels for line in panel.lines]
    return ReportFigure(
        "pass_at_k",
        "pass@k",
        "Probability that at least one of k responses is correct, at the last validation."
        + (f" {seed_basis(arms)}." if has_seeds(arms) else "")
        + _absence(arms, drawn, "pass@k"),
        alt=f"pass@k over k. {_ends(panels)}",
        png=_both_themes(draw),
        half_width=half,
    )


def _accuracy(arms: Sequence[ArmResult]) -> ReportFigure | str:
    panels = _accuracy_panels(arms)
    if not panels:
        return "Accuracy: no validation samples, and no val-core/…/acc/mean@… was logged."

    def draw(theme: plots.Theme) -> Figure:
        if len(panels) > 1:
            return plots.panels_figure(panels, theme)
        [panel] = panels
        return plots.accuracy_figure(panel.lines, theme, "Validation accuracy", _basis(arms, panel.title))

    caption = "Share of validation responses that are correct."
    if len(panels) > 1:
        caption += " One panel per data source."
        caption += "".join(f" {panel.title}: {_basis(arms, panel.title)}." for panel in panels)
    drawn = [line for panel in panels for line in panel.lines]
    return ReportFigure(
        "accuracy",
        "Accuracy",
        caption + _absence(arms, drawn, "validation accuracy"),
        alt="Validation accuracy over training steps: "
        + "; ".join(
            f"{line.label}{f' on {panel.title}' if len(panels) > 1 else ''} from {percent(line.values[0])} "
            f"to {percent(line.values[-1])}"
            for panel in panels
            for line in panel.lines
        ),
        png=_both_themes(draw),
    )


def _metrics(name: str, arms: Sequence[ArmResult]) -> ReportFigure | str:
    spec = METRIC_FIGURES[name]
    panels = []
    warnings = []
    absent: dict[str, list[str]] = {}  # keys by the arms that lack them
    for panel in spec.panels:
        lines = []
        lacking = []
        for arm in arms:
            drawn, warning = _metric_lines(panel, arm, styles(arms)[arm.name])
            lines += drawn
            warnings += warning
            if not drawn:
                lacking.append(arm.name)
        if lines:
            panels.append(plots.Panel(panel.title, tuple(lines), panel.percent, panel.log))
        if lacking:
            absent.setdefault(" and ".join(lacking) if lines else "any arm", []).append(panel.key)
    if not panels:
        return f"{spec.title}: no arm logged {', '.join(panel.key for panel in spec.panels)}."
    warnings += [f"not logged by {names}: {', '.join(keys)}" for names, keys in absent.items()]
    caption = " ".join([spec.caption, *(f"{warning[0].upper()}{warning[1:]}." for warning in warnings)])
    if any(plots.smoothing_window(len(line.values)) > 1 and not panel.log for panel in panels for line in panel.lines):
        caption += " Bold: running mean over a tenth of the steps."
    if has_seeds(arms):
        caption += f" {seed_basis(arms)}."
    width = plots.HALF_WIDTH if spec.half_width else plots.FULL_WIDTH
    return ReportFigure(
        name,
        spec.title,
        caption,
        alt=f"{spec.title} over training steps. {_ends(panels)}",
        png=_both_themes(lambda theme: plots.panels_figure(panels, theme, spec.share_y, width)),
        half_width=spec.half_width,
    )


def _metric_lines(panel: MetricPanel, arm: ArmResult, style: Style) -> tuple[list[plots.Line], list[str]]:
    """An arm's curves in a panel, and notes on them."""
    lines = []
    warnings = []
    if line := metric_line(arm, panel.key, style, smooth=not panel.log):
        lines.append(line)
    elif panel.fallback and (line := metric_line(arm, panel.fallback, style, smooth=not panel.log)):
        lines.append(line)
        warnings.append(f"{arm.name} shows {panel.fallback} for {panel.title}")
    if panel.dashed and (line := metric_line(arm, panel.dashed, style, smooth=not panel.log)):
        lines.append(replace(line, dashed=True))
    return lines, warnings


def metric_line(arm: ArmResult, key: str, style: Style, smooth: bool) -> plots.Line | None:
    """A metric over steps: of a single training as it was logged; of several seeds the mean of their running means."""
    having = [one for one in arm.counted if key in one.training.keys]
    if not having:
        return None
    if len(arm.counted) == 1:
        steps, values = having[0].training.series(key)
        return plots.Line(arm.name, style, steps.astype(np.float64), values)
    curves = []
    for one in having:
        steps, values = one.training.series(key)
        window = plots.smoothing_window(len(values)) if smooth else 1
        curves.append(dict(zip(steps.astype(np.float64).tolist(), plots.running_mean(values, window), strict=True)))
    return plots.Line(arm.name, style, *over_seeds(curves), smoothed=True)


def _step_time(arms: Sequence[ArmResult]) -> ReportFigure | str:
    timed = {arm.name: seconds for arm in arms if (seconds := _mean_seconds(arm.counted))}
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
    absent = _absence([arm for arm in arms if arm.name not in timed], [], "timing_s/step")
    return ReportFigure(
        "step_time",
        "Step time by phase",
        "Mean seconds per training step. Checkpoints and validations are averaged over all steps." + absent,
        alt="; ".join(f"{name}: {sum(row.values()):.3g} seconds per step" for name, row in rows.items()),
        png=_both_themes(lambda theme: plots.phases_figure(rows, theme)),
    )


def _mean_seconds(trainings: Sequence[TrainingResult]) -> dict[str, float]:
    """Seconds of each phase, mean over the trainings that were timed."""
    timed = [one.step_seconds for one in trainings if one.step_seconds]
    titles = [*STEP_PHASES.values(), OTHER_PHASE, VALIDATION_PHASE]
    means = {title: float(np.mean([one.get(title, 0.0) for one in timed])) for title in titles if timed}
    return {title: value for title, value in means.items() if value > 0}


def _absence(arms: Sequence[ArmResult], lines: Sequence[plots.Line], what: str) -> str:
    absent = [arm.name for arm in arms if arm.name not in {line.label for line in lines}]
    return f" No {what}: {', '.join(absent)}." if absent else ""


def _ends(panels: Sequence[plots.Panel]) -> str:
    return "; ".join(
        f"{panel.title}: "
        + ", ".join(f"{line.label} from {line.values[0]:.3g} to {line.values[-1]:.3g}" for line in panel.lines)
        for panel in panels
    )
