"""pass@k over k: the figure of an evaluation, with the majority vote, and the values of a training's validation."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Page
from matplotlib.ticker import FixedLocator, NullLocator, StrMethodFormatter

from gtpo_verl.algorithms.registry import Style
from gtpo_verl.evaluation.metrics import pass_at_k, powers_of_two
from gtpo_verl.evaluation.summary import Figure, SourceSummary
from gtpo_verl.report import plots
from gtpo_verl.runs.reader import Validation


def pass_at_k_figure(summaries: Sequence[SourceSummary], theme: plots.Theme) -> Page:
    """Draw the curves of each data source with the bands of their intervals, k on a logarithmic axis.

    Args:
        summaries: at least one, each with two k or more.
        theme: colours of the page.
    """
    passed, voted = plots.arm_styles({"pass@k": "gtpo", "maj@k": "dapo"}).values()
    panels = []
    for summary in summaries:
        lines = [_line("pass@k", passed, summary.pass_at)]
        if summary.majority_at:
            lines.append(_line("maj@k", voted, summary.majority_at))
        title = f"{summary.data_source}, {summary.problems} problems"
        panels.append(plots.Panel(title, tuple(lines), percent=True))
    width = plots.HALF_WIDTH if len(panels) == 1 else plots.FULL_WIDTH
    page = plots.panels_figure(panels, theme, width=width)
    for axes, summary in zip(page.axes, summaries, strict=True):
        dress_k_axis(axes, list(summary.pass_at), theme)
    return page


def dress_k_axis(axes: Axes, ks: Sequence[int], theme: plots.Theme) -> None:
    """Make the horizontal axis k, logarithmic, with a tick at each."""
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(ks))
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("k", color=theme.muted)


def pass_at_ks(validations: Sequence[Validation]) -> dict[float, float]:
    """pass@k of the last validation, mean over prompts, by k; empty where a prompt was sampled only once."""
    if not validations or validations[-1].counts.min() < 2:
        return {}
    counts = validations[-1].counts
    correct = np.rint(validations[-1].accuracy * counts).astype(np.int64)
    ks = powers_of_two(int(counts.min()))
    means = pass_at_k(counts[:, None], correct[:, None], np.array(ks)).mean(axis=0)
    return {float(k): float(value) for k, value in zip(ks, means, strict=True)}


def _line(label: str, style: Style, curve: Mapping[int, Figure]) -> plots.Line:
    def column(name: str) -> np.ndarray:
        return np.array([getattr(figure, name) for figure in curve.values()], dtype=np.float64)  # None becomes NaN

    return plots.Line(
        label, style, np.array(list(curve), dtype=np.float64), column("value"), column("low"), column("high")
    )
