"""Drawing: matplotlib's object interface, for a light and a dark page, arms distinguishable without colour vision."""

import io
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib import font_manager
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from gtpo_verl.algorithms.registry import Style, algorithms
from gtpo_verl.runs.statistics import Floats

DPI = 200
_LABEL_ROW = 0.48  # inches: two lines of text beside the end of a curve
FULL_WIDTH = 10.4  # inches: the width of the report's column at 100 CSS pixels an inch
HALF_WIDTH = 5.1

_FONTS = ("Inter", "Helvetica Neue", "Helvetica", "Arial", "Liberation Sans", "DejaVu Sans")


@dataclass(frozen=True)
class Theme:
    """Colours of a page; ``name`` is "light" or "dark"."""

    name: str
    surface: str
    ink: str
    muted: str
    grid: str


LIGHT = Theme("light", surface="#ffffff", ink="#1b2330", muted="#667085", grid="#e7eaf0")
DARK = Theme("dark", surface="#161c26", ink="#e8ecf3", muted="#97a3b6", grid="#2a3342")


# For arms whose method has no style of its own. Like those of the registry, from Okabe and Ito's palette (2008), which
# stays distinguishable under the common colour blindnesses; brightened for the dark page.
_FREE_STYLES = (
    Style(light="#009e73", dark="#2fd0a2", marker="^"),
    Style(light="#b3568b", dark="#e79ac6", marker="v"),
    Style(light="#8a6d00", dark="#f0d544", marker="P"),
    Style(light="#2b3a8f", dark="#9aa8ff", marker="X"),
)

# Tol's muted palette (2021); what is not a named phase of a step is grey
_PHASE_COLOURS = (
    "#88ccee",
    "#44aa99",
    "#ddcc77",
    "#cc6677",
    "#a99bdc",
    "#999933",
    "#e0a070",
    "#6fb3a8",
    "#c97ab0",
    "#88a9d8",
)
_GREY_PHASES = {"other": "#c3c9d4", "validation": "#97a2b4"}


@dataclass(frozen=True)
class Line:
    """One arm's curve: steps (N,), values (N,), and the bounds of its intervals (N,), NaN where there is none.

    ``smoothed``: the values are a running mean already.
    """

    label: str
    style: Style
    steps: Floats
    values: Floats
    low: Floats | None = None
    high: Floats | None = None
    dashed: bool = False
    smoothed: bool = False


@dataclass(frozen=True)
class Panel:
    """A small plot: its title and the curves in it; ``markers``: each point is marked, and nothing is smoothed.

    ``x_label``: of the horizontal axis, the training step unless it says otherwise.
    """

    title: str
    lines: tuple[Line, ...]
    percent: bool = False
    log: bool = False
    markers: bool = False
    x_label: str = "step"


def arm_styles(methods: Mapping[str, str | None]) -> dict[str, Style]:
    """A style for each arm: the first arm of a registered method has the method's, the others take a free one.

    Where the free ones run out, dashes distinguish arms.

    Args:
        methods: the name of each arm's method by the arm's label; it may be None, or not registered.
    """
    registered = {name: entry.style for name, entry in algorithms().items() if entry.style}
    styles: dict[str, Style] = {}
    for label, method in methods.items():
        if method in registered:
            styles[label] = registered.pop(method)
    palette = [*_FREE_STYLES, *reversed(registered.values())]  # the baseline's grey last
    rest = [label for label in methods if label not in styles]
    for index, label in enumerate(rest):
        lap, place = divmod(index, len(palette))
        styles[label] = replace(palette[place], dashes=(4.0 / lap, 1.6)) if lap else palette[place]
    return {label: styles[label] for label in methods}


def _colour(style: Style, theme: Theme) -> str:
    return style.dark if theme.name == "dark" else style.light


def png(figure: Figure) -> bytes:
    """The figure as a PNG at `DPI`, on its own opaque surface."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=DPI, facecolor=figure.get_facecolor(), metadata={"Software": None})
    return buffer.getvalue()


def accuracy_figure(lines: Sequence[Line], theme: Theme, title: str, subtitle: str) -> Figure:
    """Accuracy over steps, all arms on one axis, each with the band of its intervals and its first and last value.

    Args:
        lines: one per arm; values are shares in [0, 1].
        theme: colours of the page.
        title, subtitle: what is measured, and on what.
    """
    with _page(theme):
        height = max(4.9, 1.5 + _LABEL_ROW * len(lines))
        figure = _figure(FULL_WIDTH, height, theme)
        left, bottom, top = 0.055, 0.56 / height, 1 - 0.86 / height
        axes = figure.add_axes((left, bottom, 0.6, top - bottom))
        _dress(axes, theme, percent=True)
        for line in _apart(lines):
            _draw(axes, line, theme, width=2.4, marker=True, band=0.16 if len(lines) <= 3 else 0.5 / len(lines))
        firsts = [line.values[0] for line in lines if len(line.values) > 1]
        if firsts:
            start = float(np.mean(firsts))
            axes.axhline(start, color=theme.muted, linewidth=1, dashes=(2, 3), zorder=1)
            when = "before training" if min(line.steps[0] for line in lines) == 0 else "at the first validation"
            axes.annotate(
                f"{when}: {100 * start:.1f} %",
                (1, start),
                xycoords=axes.get_yaxis_transform(),
                xytext=(-2, 4),
                textcoords="offset points",
                ha="right",
                fontsize=9,
                color=theme.muted,
            )
        _steps_axis(axes, "training step")
        _heading(figure, theme, title, subtitle)
        width = _end_labels(figure, axes, lines, theme)
        # the labels are right of the axes: give them exactly the room they need
        axes.set_position((left, bottom, max(0.3, 0.995 - left - width), top - bottom))
        return figure


def panels_figure(panels: Sequence[Panel], theme: Theme, share_y: bool = False, width: float = FULL_WIDTH) -> Figure:
    """Small plots side by side, at most three in a row, under one legend; dense curves with their running mean.

    Args:
        panels: at least one.
        theme: colours of the page.
        share_y: one scale for all panels, so that their heights can be compared.
        width: inches.
    """
    columns = min(len(panels), 3)
    rows = math.ceil(len(panels) / columns)
    legend = 0.4 if len({line.label for panel in panels for line in panel.lines}) > 1 else 0.0  # inches
    height = 0.1 + legend + 2.55 * rows
    with _page(theme):
        figure = _figure(width, height, theme)
        figure.set_layout_engine(
            "constrained", h_pad=0.06, w_pad=0.1, hspace=0.04, wspace=0.02, rect=(0, 0, 1, 1 - legend / height)
        )
        grid = figure.subplots(rows, columns, sharey=share_y, squeeze=False).ravel()
        for axes, panel in zip(grid, panels, strict=False):
            _dress(axes, theme, percent=panel.percent)
            axes.set_title(panel.title, loc="left", fontsize=10.5, color=theme.ink, pad=8)
            for line in _apart(panel.lines):
                _draw(axes, line, theme, width=1.9, marker=panel.markers or _few(line), smooth=not panel.log)
            # differences of exactly 0 cannot be drawn on a logarithmic axis
            if panel.log and any((line.values > 0).any() for line in panel.lines):
                axes.set_yscale("log", nonpositive="mask")
                positive = np.concatenate([line.values[line.values > 0] for line in panel.lines])
                axes.set_ylim(
                    10 ** math.floor(np.log10(positive.min())), 10 ** (math.floor(np.log10(positive.max())) + 1)
                )
                axes.yaxis.set_major_locator(LogLocator(numticks=6))
                axes.yaxis.set_minor_formatter(NullFormatter())
            if panel.percent and axes.get_ylim()[0] < 0:
                # a share is never below 0, and curves that stay at 0 would be drawn in the middle
                axes.set_ylim(bottom=0)
            _steps_axis(axes, panel.x_label)
        for axes in grid[len(panels) :]:
            axes.remove()
        if legend:
            _legend(figure, [line for panel in panels for line in panel.lines], theme)
        return figure


def phases_figure(seconds: Mapping[str, Mapping[str, float]], theme: Theme) -> Figure:
    """The time of a step: one bar per arm, one segment per phase.

    Args:
        seconds: for each arm, mean seconds per step of each phase; phases in the order of the first arm that has them.
        theme: colours of the page.
    """
    phases = list(dict.fromkeys(phase for arm in seconds.values() for phase in arm))
    longest = max(sum(arm.values()) for arm in seconds.values())
    height = 1.25 + 0.5 * len(seconds) + (0.22 if len(phases) > 7 else 0)
    with _page(theme):
        figure = _figure(FULL_WIDTH, height, theme)
        figure.set_layout_engine("constrained", h_pad=0.06, w_pad=0.08)
        axes = figure.subplots()
        _dress(axes, theme)
        axes.grid(visible=False, axis="y")
        axes.grid(visible=True, axis="x", color=theme.grid, linewidth=0.8)
        rows = range(len(seconds))
        left = np.zeros(len(seconds))
        for index, phase in enumerate(phases):
            values = np.array([arm.get(phase, 0.0) for arm in seconds.values()])
            colour = _GREY_PHASES.get(phase, _PHASE_COLOURS[index % len(_PHASE_COLOURS)])
            axes.barh(
                rows, values, left=left, height=0.62, color=colour, edgecolor=theme.surface, linewidth=1.2, label=phase
            )
            for row, value, start in zip(rows, values, left, strict=True):
                if value > 0.055 * longest:
                    axes.text(
                        start + value / 2, row, _seconds(value), ha="center", va="center", fontsize=8.5, color="#10151f"
                    )
            left += values
        for row, total in zip(rows, left, strict=True):
            axes.text(
                total + 0.012 * longest,
                row,
                f"{_seconds(total)} s",
                va="center",
                fontsize=10,
                color=theme.ink,
                weight="bold",
            )
        axes.set_yticks(rows, list(seconds), fontsize=10, color=theme.ink)
        axes.invert_yaxis()
        axes.set_xlim(0, longest * 1.09)
        axes.set_xlabel("mean seconds per training step", color=theme.muted)
        axes.spines["bottom"].set_visible(False)
        figure.legend(
            loc="outside upper left",
            ncols=7,
            frameon=False,
            fontsize=9,
            labelcolor=theme.ink,
            handlelength=1,
            handleheight=1,
            columnspacing=1.4,
        )
        return figure


def _seconds(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:.0f}"


def running_mean(values: Floats, window: int) -> Floats:
    """Centred running mean; at both ends the window is cut to the data.

    Args:
        values: shape (N,).
        window: odd number of points.

    Returns:
        shape (N,).
    """
    half = window // 2
    sums = np.concatenate([[0.0], np.cumsum(values)])
    index = np.arange(len(values))
    first, past = np.maximum(index - half, 0), np.minimum(index + half + 1, len(values))
    return (sums[past] - sums[first]) / (past - first)


def smoothing_window(points: int) -> int:
    """Odd window of the running mean: a tenth of the curve; 1, no smoothing, up to 20 points."""
    return 1 if points <= 20 else 2 * (points // 20) + 1


@contextmanager
def _page(theme: Theme) -> Iterator[None]:
    installed = {font.name for font in font_manager.fontManager.ttflist}
    settings: dict[Any, Any] = {
        "font.family": next(name for name in _FONTS if name in installed),
        "font.size": 9.5,
        "text.color": theme.ink,
        "axes.unicode_minus": True,
    }
    with mpl.rc_context(settings):
        yield


def _figure(width: float, height: float, theme: Theme) -> Figure:
    figure = Figure(figsize=(width, height), dpi=DPI, facecolor=theme.surface)
    FigureCanvasAgg(figure)
    return figure


def _dress(axes: Axes, theme: Theme, percent: bool = False) -> None:
    axes.set_facecolor(theme.surface)
    axes.grid(visible=True, axis="y", color=theme.grid, linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(theme.grid)
    axes.tick_params(which="both", colors=theme.muted, length=0, pad=5)
    axes.margins(x=0.02, y=0.08)
    if percent:
        axes.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10], min_n_ticks=3))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda share, _: f"{100 * share:.3g} %"))


def _steps_axis(axes: Axes, label: str) -> None:
    axes.xaxis.set_major_locator(MaxNLocator(7, steps=[1, 2, 2.5, 5, 10], integer=True))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    low, high = axes.dataLim.intervalx
    if high - low < 1:  # a single step
        axes.set_xlim((low + high) / 2 - 1, (low + high) / 2 + 1)
    axes.set_xlabel(label, color=axes.xaxis.get_ticklabels()[0].get_color(), fontsize=9)


def _draw(
    axes: Axes, line: Line, theme: Theme, width: float, marker: bool, smooth: bool = True, band: float = 0.16
) -> None:
    colour = _colour(line.style, theme)
    pattern = (2.0, 1.5) if line.dashed else line.style.dashes
    dashes: dict[str, Any] = {"dashes": pattern} if pattern else {}
    if line.low is not None and line.high is not None:
        if len(line.steps) > 1:
            axes.fill_between(line.steps, line.low, line.high, color=colour, alpha=band, linewidth=0, zorder=2)
        else:
            axes.vlines(line.steps, line.low, line.high, color=colour, linewidth=1.4, zorder=2)
    window = smoothing_window(len(line.values)) if smooth and not marker and not line.smoothed else 1
    if window > 1:
        axes.plot(line.steps, line.values, color=colour, linewidth=0.8, alpha=0.35, zorder=2)
    points: dict[str, Any] = (
        {"marker": line.style.marker, "markersize": 5.5, "markeredgecolor": theme.surface, "markeredgewidth": 1}
        if marker
        else {}
    )
    axes.plot(
        line.steps,
        running_mean(line.values, window),
        color=colour,
        linewidth=width,
        zorder=3,
        solid_capstyle="round",
        label=line.label,
        **points,
        **dashes,
    )


def _heading(figure: Figure, theme: Theme, title: str, subtitle: str) -> None:
    height = figure.get_figheight()
    figure.text(0.004, 1 - 0.22 / height, title, fontsize=15, weight="bold", color=theme.ink, va="center")
    figure.text(0.004, 1 - 0.51 / height, subtitle, fontsize=9.5, color=theme.muted, va="center")


def _apart(lines: Sequence[Line]) -> Sequence[Line]:
    """The curves, a little apart where each is one point at the same step, so that none hides another."""
    places = {float(step) for line in lines for step in line.steps}
    if len(places) != 1:
        return lines
    first = -(len(lines) - 1) / 2
    return [replace(line, steps=line.steps + 0.06 * (first + index)) for index, line in enumerate(lines)]


def _few(line: Line) -> bool:
    """Few enough points to mark each."""
    return len(line.steps) <= 12


def _legend(figure: Figure, lines: Sequence[Line], theme: Theme) -> None:
    unique = {line.label: line for line in lines}
    handles = [
        mpl.lines.Line2D(
            [],
            [],
            color=_colour(line.style, theme),
            linewidth=2.4,
            marker=line.style.marker if _few(line) else None,
            markersize=5.5,
            markeredgecolor=theme.surface,
            label=line.label,
        )
        for line in unique.values()
    ]
    figure.legend(
        handles=handles,
        loc="upper left",
        ncols=min(len(handles), 6),
        frameon=False,
        fontsize=9.5,
        labelcolor=theme.ink,
        handlelength=1.6,
        columnspacing=1.6,
        borderaxespad=0.3,
    )


def _end_labels(figure: Figure, axes: Axes, lines: Sequence[Line], theme: Theme) -> float:
    """Write each arm's name, first and last value and their difference to the right of the axes.

    Returns:
        The width used, as a share of the figure's.
    """
    bottom, top = axes.get_ylim()
    row = _LABEL_ROW * (top - bottom) / (axes.get_position().height * figure.get_figheight())
    order = sorted(lines, key=lambda line: float(line.values[-1]))
    heights = _spread([float(line.values[-1]) for line in order], row)
    # labels pushed out of the axes are moved back in, all together
    shift = min(0.0, top - row / 2 - heights[-1])
    shift = max(shift, bottom + row / 2 - heights[0])
    edges: list[float] = []
    for line, height in zip(order, heights, strict=True):
        edges += _end_label(figure, axes, line, height + shift, theme)
    return (max(edges) - min(edges) + 14 / 72 * DPI) / figure.bbox.width


def _end_label(figure: Figure, axes: Axes, line: Line, height: float, theme: Theme) -> list[float]:
    """One arm's label at a height of the axes; returns the left and right edges of its texts in pixels."""
    first, last = float(line.values[0]), float(line.values[-1])
    colour = _colour(line.style, theme)
    beside: dict[str, Any] = {
        "xy": (1, height),
        "xycoords": axes.get_yaxis_transform(),
        "textcoords": "offset points",
        "va": "center",
        "annotation_clip": False,
    }
    change = f"{100 * first:.1f} → {100 * last:.1f} %" if len(line.values) > 1 else f"{100 * last:.1f} %"
    texts = [
        axes.annotate(line.label, xytext=(8, 7), color=colour, weight="bold", fontsize=11.5, **beside),
        axes.annotate(change, xytext=(8, -7), color=theme.ink, fontsize=10, **beside),
    ]
    if len(line.values) > 1:
        behind: dict[str, Any] = {"xy": (1, 0), "xycoords": texts[1], "textcoords": "offset points", "va": "bottom"}
        points = f"{100 * (last - first):+.1f}".replace("-", "−")
        texts.append(axes.annotate(points, xytext=(7, 0), color=colour, weight="bold", fontsize=10, **behind))
    renderer = figure.canvas.get_renderer()  # type: ignore[attr-defined]
    extents = [text.get_window_extent(renderer) for text in texts]
    return [edge for extent in extents for edge in (extent.x0, extent.x1)]


def _spread(heights: Sequence[float], gap: float) -> list[float]:
    """Move sorted heights apart to at least `gap`, keeping the centre of each cluster that must move."""
    clusters: list[list[float]] = [[height] for height in heights]

    def places(cluster: list[float]) -> list[float]:
        middle = sum(cluster) / len(cluster)
        return [middle + (i - (len(cluster) - 1) / 2) * gap for i in range(len(cluster))]

    merged = True
    while merged:
        merged = False
        for i in range(len(clusters) - 1):
            if places(clusters[i + 1])[0] - places(clusters[i])[-1] < gap:
                clusters[i : i + 2] = [clusters[i] + clusters[i + 1]]
                merged = True
                break
    return [place for cluster in clusters for place in places(cluster)]
