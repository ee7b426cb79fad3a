"""The figures of a report: which metric is drawn where, and what is said where it was not logged.

An arm with several seeds is drawn as the mean over them, with the band of Student's interval from three seeds on.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from gtpo_verl.algorithms.registry import Style
from gtpo_verl.report.charts import Line, Panel, bars_chart, panel_chart, running_mean, smoothing_window
from gtpo_verl.report.pass_at_k import pass_at_ks
from gtpo_verl.report.results import (
    OTHER_PHASE,
    STEP_PHASES,
    VALIDATION_PHASE,
    Arm,
    cost_until,
    data_sources,
    has_seeds,
    trainings_of,
)
from gtpo_verl.report.seeds import over_seeds
from gtpo_verl.report.words import curve_basis, seed_basis
from gtpo_verl.runs.statistics import Interval

_SMALL_PHASE = 0.01  # a phase below this share of the longest step, in every arm, is drawn as part of "other"


@dataclass(frozen=True)
class ReportFigure:
    """A figure: what it shows, in words, and its panels, or the ``bars`` of each arm."""

    name: str
    title: str
    caption: str
    panels: tuple[Panel, ...] = ()
    bars: Mapping[str, Mapping[str, float]] | None = None

    def charts(self, styles: Mapping[str, Style], *, interactive: bool = False) -> dict[str, dict[str, Any]]:
        """The Vega-Lite specification of each panel by its title."""
        if self.bars:
            return {"": bars_chart(self.bars, legend=not interactive)}
        return {panel.title: panel_chart(panel, styles, interactive=interactive) for panel in self.panels}

    @property
    def wide(self) -> bool:
        """Whether it takes the whole width of the page."""
        return self.name == "accuracy" or len(self.panels) != 1


@dataclass(frozen=True)
class Metric:
    """A metric over steps. ``fallback`` is drawn for an arm that lacks ``key``; ``dashed`` is drawn beside it."""

    title: str
    key: str
    fallback: str = ""
    dashed: str = ""
    percent: bool = False
    log: bool = False


# figures of metrics: title, caption, panels
METRIC_FIGURES: dict[str, tuple[str, str, tuple[Metric, ...]]] = {
    "entropy": (
        "Entropy",
        "Mean policy entropy per token, in nats: over all training responses, the correct ones, and the wrong ones.",
        (
            Metric("all responses", "credit/entropy_all", fallback="actor/entropy"),
            Metric("correct responses", "credit/entropy_correct"),
            Metric("wrong responses", "credit/entropy_wrong"),
        ),
    ),
    "response_length": (
        "Response length",
        "Mean number of tokens of a training response.",
        (Metric("tokens", "response_length/mean"),),
    ),
    "agreement": (
        "Do rollout and actor agree?",
        "Absolute difference between a token's entropy from vLLM and from the actor, in nats.",
        (
            Metric(
                "maximum (solid) and mean (dashed) per step",
                "rollout_entropy/abs_diff_max",
                dashed="rollout_entropy/abs_diff_mean",
                log=True,
            ),
        ),
    ),
    "sign_flips": (
        "Sign flips",
        "Share of tokens whose advantage has the wrong sign: negative in a correct response, positive in a wrong one.",
        (
            Metric("in correct responses", "credit/sign_flip_correct", percent=True),
            Metric("in wrong responses", "credit/sign_flip_wrong", percent=True),
        ),
    ),
    "training": (
        "Inside the training",
        "Statistics of the training batches. Accuracy and score are those of the training responses.",
        (
            Metric("training accuracy", "training/accuracy", percent=True),
            Metric("mean score", "critic/score/mean"),
            Metric("clipped tokens", "actor/pg_clipfrac", percent=True),
            Metric("spread of advantages within a response", "credit/advantage_spread"),
            Metric("mixed share of generated groups", "training/filter_groups/yield", percent=True),
            Metric("all-right or all-wrong groups in the batch", "credit/degenerate_share", percent=True),
        ),
    ),
    "optimisation": (
        "Optimisation",
        "The gradient’s norm is that before clipping; the level of the policy loss means nothing.",
        (
            Metric("policy loss", "actor/pg_loss"),
            Metric("gradient norm", "actor/grad_norm"),
            Metric("KL from the rollout's policy, nats", "actor/ppo_kl"),
            Metric("KL from the reference, nats", "actor/kl_loss"),
            Metric("learning rate", "actor/lr"),
        ),
    ),
    "speed": (
        "Speed and memory",
        "",
        (
            Metric("tokens per second and GPU", "perf/throughput"),
            Metric("memory of the actor’s device, GiB", "actor/perf/max_memory_allocated_gb"),
            Metric("memory of the machine in use, GiB", "actor/perf/cpu_memory_used_gb"),
        ),
    ),
}

# every figure that a report may hold, in order
FIGURES = (
    *("accuracy", "cost", "entropy", "response_length", "agreement", "pass_at_k"),
    *("sign_flips", "training", "optimisation", "speed", "step_time"),
)


def report_figures(arms: Sequence[Arm]) -> tuple[tuple[ReportFigure, ...], tuple[str, ...]]:
    """The figures that the runs have data for, in order, and a sentence for each that is missing."""
    builders = {"accuracy": _accuracy, "cost": _cost, "pass_at_k": _pass_at_k, "step_time": _step_time}
    built = [builders[name](arms) if name in builders else _metrics(name, arms) for name in FIGURES]
    drawn = tuple(one for one in built if isinstance(one, ReportFigure))
    return drawn, tuple(one for one in built if isinstance(one, str))


def _accuracy(arms: Sequence[Arm]) -> ReportFigure | str:
    """A curve per arm: over seeds where any arm has several, so that all bands are of one kind; else over prompts."""
    sources, several = data_sources(arms), has_seeds(arms)
    height = 320 if len(sources) == 1 else 220
    panels, words = [], []
    for source in sources:
        lines = tuple(line for arm in arms if (line := _accuracy_line(arm, source, several)))
        accuracies = [one.accuracies[source] for one in trainings_of(arms) if source in one.accuracies]
        basis = seed_basis(arms) if several else curve_basis(accuracies)
        words.append(f"{source}: {basis}." if len(sources) > 1 else f"{basis}.")
        panels += [Panel(source, lines, percent=True, height=height)] if lines else []
    if not panels:
        return "Accuracy: no validation samples, and no val-core/…/acc/mean@… was logged."
    caption = f"Share of validation responses that are correct. {' '.join(words)}"
    return ReportFigure("accuracy", "Validation accuracy", caption + _absence(arms, panels, "accuracy"), tuple(panels))


def _accuracy_line(arm: Arm, source: str, several: bool) -> Line | None:
    curves = [one.accuracies[source].curve for one in arm.counted if source in one.accuracies]
    if not curves:
        return None
    if several:
        return Line(arm.name, *over_seeds([{float(p.step): p.accuracy for p in curve} for curve in curves]))
    unknown = Interval(np.nan, np.nan)
    rows = [(p.step, p.accuracy, (p.interval or unknown).low, (p.interval or unknown).high) for p in curves[0]]
    return Line(arm.name, *np.array(rows, dtype=np.float64).T)


def _cost(arms: Sequence[Arm]) -> ReportFigure | str:
    """Accuracy against what it cost: responses generated, and seconds."""
    sources = data_sources(arms)
    panels = []
    for source in sources:
        prefix = f"{source}, " if len(sources) > 1 else ""
        for what, title in (("responses", "responses generated"), ("seconds", "time of training")):
            lines = tuple(line for arm in arms if (line := _cost_line(arm, source, what)))
            unit, divisor = what, 1
            longest = max((float(line.steps.max()) for line in lines if len(line.steps)), default=0.0)
            if what == "seconds" and longest >= 600:
                unit, divisor = ("minutes", 60) if longest < 4 * 3600 else ("hours", 3600)
                lines = tuple(replace(line, steps=line.steps / divisor) for line in lines)
            panels += [Panel(f"{prefix}by {title}", lines, percent=True, x_label=unit)] if lines else []
    if not panels:
        return "Accuracy by cost: no arm was validated and logged the time or the number of responses of every step."
    caption = (
        "The same accuracies against what had been spent. Responses: all that were generated to train, also those of "
        "groups that dynamic sampling left out. Time: of training steps, without validations. What a resume repeated "
        "is not counted."
    )
    if has_seeds(arms):
        caption += " Means over seeds, of accuracy and of cost."
    return ReportFigure("cost", "Accuracy by cost", caption + _absence(arms, panels, "cost"), tuple(panels))


def _cost_line(arm: Arm, source: str, what: str) -> Line | None:
    """The arm's curve over its cost; None where a training did not log it."""
    curves, costs = [], []
    for one in (one for one in arm.counted if source in one.accuracies):
        if (cost := cost_until(one.training, what)) is None:
            return None
        costs.append(cost)
        curves.append({float(p.step): p.accuracy for p in one.accuracies[source].curve if p.step in cost})
    if not curves:
        return None
    steps, values, low, high = over_seeds(curves)
    spent = np.array([[cost[int(step)] for step in steps] for cost in costs]).mean(axis=0)
    return Line(arm.name, spent, values, low, high)


def _pass_at_k(arms: Sequence[Arm]) -> ReportFigure | str:
    """pass@k of the last validation, where a prompt was sampled more than once."""
    panels = []
    for source in data_sources(arms):
        of_arms = {
            arm.name: [curve for one in arm.counted if (curve := pass_at_ks(one.training.validations.get(source, ())))]
            for arm in arms
        }
        lines = tuple(Line(name, *over_seeds(curves)) for name, curves in of_arms.items() if curves)
        panels += [Panel(source, lines, percent=True, x_label="k", x_scale="log")] if lines else []
    if not panels:
        return "pass@k: every prompt of the validations was sampled once, or no samples were kept."
    caption = "Probability that at least one of k responses is correct, at the last validation."
    caption += f" {seed_basis(arms)}." if has_seeds(arms) else ""
    return ReportFigure("pass_at_k", "pass@k", caption + _absence(arms, panels, "pass@k"), tuple(panels))


def _metrics(name: str, arms: Sequence[Arm]) -> ReportFigure | str:
    title, caption, metrics = METRIC_FIGURES[name]
    panels, remarks = [], []
    absent: dict[str, list[str]] = {}  # keys by the arms that lack them
    for metric in metrics:
        lines, lacking = [], []
        for arm in arms:
            line = metric_line(arm, metric.key, smooth=not metric.log)
            if line is None and metric.fallback and (line := metric_line(arm, metric.fallback)):
                remarks.append(f"{arm.name} shows {metric.fallback} for {metric.title}")
            if line is None:
                lacking.append(arm.name)
            else:
                lines.append(line)
            if metric.dashed and (beside := metric_line(arm, metric.dashed, smooth=not metric.log)):
                lines.append(replace(beside, dashed=True))
        if lacking:
            absent.setdefault(" and ".join(lacking) if lines else "any arm", []).append(metric.key)
        if any(line.values.any() for line in lines):
            panels.append(Panel(metric.title, tuple(lines), metric.percent, metric.log))
        elif lines:
            remarks.append(f"always 0: {metric.key}")
    if not panels:
        lacked = [f"no arm logged {', '.join(absent['any arm'])}"] if "any arm" in absent else []
        return f"{title}: {'. '.join([*lacked, *map(_capitalized, remarks)])}."
    remarks += [f"not logged by {names}: {', '.join(keys)}" for names, keys in absent.items()]
    sentences = [caption, *(f"{_capitalized(remark)}." for remark in remarks)]
    if any(line.raw is not None for panel in panels for line in panel.lines):
        sentences.append("Bold: running mean over a tenth of the steps.")
    sentences += [f"{seed_basis(arms)}."] if has_seeds(arms) else []
    return ReportFigure(name, title, " ".join(filter(None, sentences)), tuple(panels))


def _capitalized(text: str) -> str:
    return text[0].upper() + text[1:]


def metric_line(arm: Arm, key: str, smooth: bool = True) -> Line | None:
    """The running mean of a metric over steps; of several seeds the mean of theirs."""
    curves, raw = [], None
    for one in arm.counted:
        steps, raw = one.training.series(key)
        if len(steps):
            values = running_mean(raw, smoothing_window(len(raw))) if smooth else raw
            curves.append(dict(zip(steps.astype(np.float64).tolist(), values, strict=True)))
    if not curves or not set.intersection(*map(set, curves)):  # no step that all have
        return None
    line = Line(arm.name, *over_seeds(curves))
    single = len(arm.counted) == 1 and raw is not None and smooth and smoothing_window(len(raw)) > 1
    return replace(line, raw=raw) if single else line


def _step_time(arms: Sequence[Arm]) -> ReportFigure | str:
    found = {arm.name: [one.step_seconds for one in arm.counted if one.step_seconds] for arm in arms}
    timed = {name: seconds for name, seconds in found.items() if seconds}
    if not timed:
        return "Step time by phase: no arm logged timing_s/step."
    phases = [*STEP_PHASES.values(), OTHER_PHASE, VALIDATION_PHASE]
    means = {
        name: {phase: float(np.mean([one.get(phase, 0.0) for one in seconds])) for phase in phases}
        for name, seconds in timed.items()
    }
    threshold = _SMALL_PHASE * max(sum(row.values()) for row in means.values())
    titles = [title for title in STEP_PHASES.values() if any(row[title] >= threshold for row in means.values())]
    bars = {}
    for name, row in means.items():
        shown, validation = {title: row[title] for title in titles}, row[VALIDATION_PHASE]
        shown[OTHER_PHASE] = sum(row.values()) - validation - sum(shown.values())
        bars[name] = {**shown, VALIDATION_PHASE: validation} if validation else shown
    absent = [arm.name for arm in arms if arm.name not in timed]
    caption = "Mean seconds per training step. Checkpoints and validations are averaged over all steps."
    caption += f" No timing_s/step: {', '.join(absent)}." if absent else ""
    return ReportFigure("step_time", "Step time by phase", caption, bars=bars)


def _absence(arms: Sequence[Arm], panels: Sequence[Panel], what: str) -> str:
    drawn = {line.label for panel in panels for line in panel.lines}
    absent = [arm.name for arm in arms if arm.name not in drawn]
    return f" No {what}: {', '.join(absent)}." if absent else ""
