"""Charts as Vega-Lite: interactive in a page, and PNGs of the same specification.

Colours in a specification are the page's CSS variables, ``var(--ink)``, so one copy serves the light and the dark page;
a PNG has their values in their places. Arms can be told apart without colour vision, by marker and dashes.
"""

import functools
import itertools
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import vl_convert

from gtpo_verl.algorithms.registry import Style, algorithms
from gtpo_verl.runs.statistics import Floats

THEMES = ("light", "dark")
# of pages and charts, for each theme; credit, debit, entropy: red, green, blue of what is above and below 0
_COLOURS = {
    "page": ("#f5f6f9", "#0e131b"),
    "surface": ("#ffffff", "#161c26"),
    "ink": ("#1b2330", "#e8ecf3"),
    "muted": ("#5c6675", "#97a3b6"),
    "line": ("#e2e6ee", "#2a3342"),
    "soft": ("#f0f2f7", "#1d2532"),
    "credit": ("0, 98, 178", "86, 180, 255"),
    "debit": ("200, 84, 0", "255, 140, 66"),
    "entropy": ("112, 72, 168", "178, 140, 255"),
    "warn": ("#fff5dd", "#2c2413"),
    "warn-ink": ("#7a4b00", "#ffd98a"),
    "warn-line": ("#f1d594", "#5a4a1e"),
}

# For arms whose method has no style of its own. Like those of the registry, from Okabe and Ito's palette (2008), which
# stays distinguishable under the common colour blindnesses; brightened for the dark page.
_FREE_STYLES = (
    Style(light="#009e73", dark="#2fd0a2", marker="triangle-up"),
    Style(light="#b3568b", dark="#e79ac6", marker="triangle-down"),
    Style(light="#8a6d00", dark="#f0d544", marker="cross"),
    Style(light="#2b3a8f", dark="#9aa8ff", marker="triangle-right"),
)
GLYPHS = {
    "circle": "●",
    "square": "■",
    "diamond": "◆",
    "triangle-up": "▲",
    "triangle-down": "▼",
    "cross": "✚",
    "triangle-right": "▶",
}
# Tol's muted palette (2021), readable on both pages
_PHASES = (
    *("#88ccee", "#44aa99", "#ddcc77", "#cc6677", "#a99bdc", "#999933"),
    *("#e0a070", "#6fb3a8", "#c97ab0", "#88a9d8", "#c3c9d4", "#97a2b4"),
)

_MOST_POINTS = 400  # of a curve in a chart, which is some 1,000 pixels wide; more would only make the page larger
_NO_TREND = 3  # up to so many points are not joined: three points are no trend
_FEW_POINTS = 12  # up to so many, each is marked
_NEAREST = {"type": "point", "on": "pointerover", "nearest": True, "clear": "pointerout"}
_CONFIG: dict[str, Any] = {
    "background": None,
    "font": "Inter, Helvetica Neue, Helvetica, Arial, Liberation Sans, sans-serif",
    "view": {"stroke": None},
    "axis": {
        "labelColor": "var(--muted)",
        "titleColor": "var(--muted)",
        "gridColor": "var(--line)",
        "domainColor": "var(--line)",
        "ticks": False,
        "labelPadding": 6,
        "titleFontWeight": "normal",
        "labelFontSize": 11,
        "titleFontSize": 11,
        "labelOverlap": True,
    },
    "axisX": {"grid": False, "tickCount": 6},
    "axisY": {"domain": False, "tickCount": 5},
    "legend": {
        "labelColor": "var(--ink)",
        "labelFontSize": 12,
        "orient": "top",
        "title": None,
        "symbolSize": 90,
        "symbolOpacity": 1,
    },
    "title": {"color": "var(--ink)", "fontSize": 13, "fontWeight": 600, "anchor": "start"},
}


@dataclass(frozen=True)
class Line:
    """One arm's curve: positions, values, and the bounds of its intervals, NaN where there is none; all (N,)."""

    label: str
    steps: Floats
    values: Floats
    low: Floats | None = None
    high: Floats | None = None
    raw: Floats | None = None  # what the values are the running mean of, drawn faintly behind them
    dashed: bool = False


@dataclass(frozen=True)
class Panel:
    """A chart: its title and the curves in it."""

    title: str
    lines: tuple[Line, ...]
    percent: bool = False
    log: bool = False
    x_label: str = "step"
    x_scale: str = "linear"
    height: int = 200  # CSS pixels
    y_domain: tuple[float, float] | None = None
    band: tuple[float, float, str] | None = None  # (from, to, text) of a range of the horizontal axis that is marked


def arm_styles(methods: Mapping[str, str | None]) -> dict[str, Style]:
    """A style for each arm, from {label: the name of its method, or None}.

    The first arm of a registered method has the method's, the others take a free one, with dashes where they run out.
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
        styles[label] = replace(palette[place], dashes=(8.0 / lap, 3.0)) if lap else palette[place]
    return {label: styles[label] for label in methods}


def variables(styles: Mapping[str, Style], theme: str) -> dict[str, str]:
    """The CSS variables of a page: those of the theme, and the colour of each arm, ``arm1`` and so on."""
    of_theme = {name: pair[THEMES.index(theme)] for name, pair in _COLOURS.items()}
    return of_theme | {f"arm{number}": getattr(style, theme) for number, style in enumerate(styles.values(), 1)}


def panel_chart(panel: Panel, styles: Mapping[str, Style], *, interactive: bool = False) -> dict[str, Any]:
    """The Vega-Lite specification of a panel with at least one curve, without width and configuration.

    ``styles``: of every arm of the page. ``interactive``: the nearest point says its values, and all arms but that in
    the parameter ``chosen`` are faint.
    """
    most = max(len(line.steps) for line in panel.lines)
    sparse, marked = most <= _NO_TREND, most <= _FEW_POINTS
    positions = sorted({float(step) for line in panel.lines for step in line.steps})
    has_bounds = any(line.low is not None for line in panel.lines)
    number = ".3~p" if panel.percent else ".3~g" if panel.log else ",.3~r"
    y = {"field": "y", "type": "quantitative", "title": None, "scale": _y_scale(panel), "axis": {"format": number}}
    dashed = {"condition": {"test": "datum.dashed", "value": [5, 3]}, **_scale("strokeDash", styles)}
    layers: list[dict[str, Any]] = []
    if has_bounds:
        mark = {"type": "rule", "strokeWidth": 1.5} if sparse else {"type": "area", "opacity": 0.16}
        bounds = {"y": y | {"field": "low"}, "y2": {"field": "high"}}
        layers.append({"transform": [{"filter": "isValid(datum.low)"}], "mark": mark, "encoding": bounds})
    if any(line.raw is not None for line in panel.lines):
        faint = {"type": "line", "strokeWidth": 0.8, "opacity": 0.35}
        layers.append({"mark": faint, "encoding": {"y": y | {"field": "raw"}, "strokeDash": dashed}})
    if not sparse:
        layers.append({"mark": {"type": "line", "strokeWidth": 2.2}, "encoding": {"y": y, "strokeDash": dashed}})
    points: dict[str, Any] = {"y": y, "shape": _scale("shape", styles)}
    layer: dict[str, Any] = {"mark": {"type": "point", "filled": True, "size": 55, "opacity": 1}, "encoding": points}
    if interactive:
        layer["params"] = [{"name": "near", "select": _NEAREST}]
        value = {"format": ".3~p" if panel.percent else ".4~g"}
        fields = {"arm": {}, "x": {"title": panel.x_label, "format": ",.4~r"}, "y": {"title": "value", **value}}
        of_bounds = {name: {"title": f"95 % interval, {name}", **value} for name in ("low", "high") if has_bounds}
        points["tooltip"] = [{"field": name, **form} for name, form in (fields | of_bounds).items()]
        if not marked:  # too many to be seen, they are there to be pointed at
            points["opacity"] = {"condition": {"param": "near", "empty": False, "value": 1}, "value": 0}
    if marked or interactive:
        layers.append(layer)
    if panel.band:
        layers += _band(*panel.band)
    chart: dict[str, Any] = {
        "height": panel.height,
        "data": {"values": [_values(line, panel.log) for line in panel.lines]},
        "transform": [{"flatten": ["x", "y", "low", "high", "raw"]}],
        "encoding": {**_x(panel, styles, positions), "color": _scale("color", styles), "detail": {"field": "dashed"}},
        "layer": layers,
    }
    if interactive:
        chart["params"] = [{"name": "chosen", "value": ""}]
        chosen = {"test": "!chosen || chosen == datum.arm", "value": 1}
        chart["encoding"]["strokeOpacity"] = chart["encoding"]["fillOpacity"] = {"condition": chosen, "value": 0.12}
    return chart


def _x(panel: Panel, styles: Mapping[str, Style], positions: Sequence[float]) -> dict[str, Any]:
    x: dict[str, Any] = {"field": "x", "title": panel.x_label, "type": "quantitative"}
    if len(positions) <= _NO_TREND:  # intervals at the same few places would hide one another: they are side by side
        offset = {"field": "arm", "scale": {"domain": list(styles), "paddingOuter": 1 / len(styles)}}
        return {"x": x | {"type": "ordinal", "axis": {"labelAngle": 0, "format": ",d"}}, "xOffset": offset}
    if panel.x_scale == "linear":
        axis = {"tickCount": 6, "tickMinStep": 1, "format": ",d"}
        return {"x": x | {"scale": {"zero": False, "nice": False}, "axis": axis}}
    return {"x": x | {"scale": {"type": panel.x_scale, "base": 2}, "axis": {"values": positions, "format": "d"}}}


def _band(start: float, end: float, text: str) -> list[dict[str, Any]]:
    data: dict[str, Any] = {"values": [{}]}
    rect = {"type": "rect", "color": "rgb(var(--debit))", "opacity": 0.16}
    label = {"type": "text", "text": text, "color": "rgb(var(--debit))"}
    middle = {"x": {"datum": (start + end) / 2}, "y": {"value": 8}}
    return [
        {"mark": rect, "data": data, "encoding": {"x": {"datum": start}, "x2": {"datum": end}}},
        {"mark": label, "data": data, "encoding": middle},
    ]


def bars_chart(rows: Mapping[str, Mapping[str, float]], *, legend: bool) -> dict[str, Any]:
    """Stacked bars of seconds: a row for each name, a segment for each phase, and the sum at the end."""
    colours = phase_colours(rows)
    values = [{"arm": name, "phase": key, "x": value} for name, row in rows.items() for key, value in row.items()]
    y = {"field": "arm", "type": "nominal", "sort": list(rows), "title": None, "axis": {"labelLimit": 160}}
    scale = {"domain": list(colours), "range": list(colours.values())}
    colour = {"field": "phase", "scale": scale, "legend": {"columns": 7} if legend else None}
    segment = {
        "x": {"field": "x", "type": "quantitative", "title": "mean seconds per training step"},
        "color": colour,
        "order": {"field": "index"},
        "tooltip": [{"field": "arm"}, {"field": "phase"}, {"field": "x", "title": "s", "format": ".3~g"}],
    }
    total = {"x": {"field": "sum", "type": "quantitative"}, "text": {"field": "sum", "format": ".3~g"}}
    order = {"calculate": f"indexof({json.dumps(list(colours))}, datum.phase)", "as": "index"}
    summed = {"aggregate": [{"op": "sum", "field": "x", "as": "sum"}], "groupby": ["arm"]}
    text = {"type": "text", "align": "left", "dx": 5, "color": "var(--ink)", "fontWeight": 600}
    return {
        "height": 38 * len(rows),
        "data": {"values": values},
        "params": [{"name": "chosen", "value": ""}],
        "encoding": {"y": y},
        "layer": [
            {"mark": {"type": "bar", "height": {"band": 0.7}}, "encoding": segment, "transform": [order]},
            {"mark": text, "transform": [summed], "encoding": total},
        ],
    }


def phase_colours(rows: Mapping[str, Mapping[str, float]]) -> dict[str, str]:
    """The phases of `bars_chart`, in the order in which they are stacked, and the colour of each."""
    phases = dict.fromkeys(phase for row in rows.values() for phase in row)
    return dict(zip(phases, itertools.cycle(_PHASES), strict=False))


def for_page(chart: Mapping[str, Any]) -> dict[str, Any]:
    """The chart as wide as its place in a page, which has the legend as text."""
    return {
        "width": "container",
        "autosize": {"type": "fit-x", "contains": "padding"},
        **chart,
        "config": _CONFIG | {"legend": {"disable": True}},
    }


def png(charts: Mapping[str, Mapping[str, Any]], theme: str = "light", styles: Mapping[str, Style] = {}) -> bytes:
    """Charts by title, which may be empty, in one PNG, at most three in a row under one legend, without a browser."""
    columns = min(len(charts), 3)
    width = {1: 860, 2: 400, 3: 255}[columns]
    drawn = [{**chart, "title": title, "width": width} for title, chart in charts.items()]
    together = {"resolve": {"scale": {"color": "shared", "shape": "shared", "strokeDash": "shared"}}}
    whole = {"concat": drawn, "columns": columns, "spacing": 24, **(together if len(drawn) > 1 else {})}
    whole |= {"config": _CONFIG | {"background": "var(--surface)", "padding": 16}}
    colours = variables(styles, theme)
    text = re.sub(r"var\(--([\w-]+)\)", lambda found: colours[found[1]], json.dumps(whole))
    return vl_convert.vegalite_to_png(text, scale=2)


@functools.cache
def javascript() -> str:
    """Vega, Vega-Lite and Vega-Embed in one script, as vl-convert carries them; nothing is loaded from elsewhere."""
    return vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;")


def running_mean(values: Floats, window: int) -> Floats:
    """Centred running mean over an odd number of points, (N,) to (N,); at both ends the window is cut to the data."""
    sums, counts = (np.convolve(one, np.ones(window)) for one in (values, np.ones(len(values))))
    return (sums / counts)[window // 2 :][: len(values)]


def smoothing_window(points: int) -> int:
    """Odd window of the running mean: a tenth of the curve; 1, no smoothing, up to 20 points."""
    return 1 if points <= 20 else 2 * (points // 20) + 1


def _values(line: Line, log: bool) -> dict[str, Any]:
    """A curve as columns, which Vega flattens: a tenth of the bytes of a row for each point."""
    count = len(line.steps)
    kept = np.unique(np.linspace(0, count - 1, min(count, _MOST_POINTS)).round().astype(np.int64))
    values: dict[str, Any] = {"arm": line.label, "dashed": line.dashed}
    columns = {"x": line.steps, "y": line.values, "low": line.low, "high": line.high, "raw": line.raw}
    for name, column in columns.items():  # what Vega flattens must be there
        shown = np.empty(0) if column is None else column[kept]
        values[name] = [float(f"{one:.5g}") if math.isfinite(one) and (one > 0 or not log) else None for one in shown]
    return values


def _y_scale(panel: Panel) -> dict[str, Any]:
    if panel.y_domain:
        return {"domain": list(panel.y_domain)}
    shown = [one for line in panel.lines for one in (line.values, line.low, line.high, line.raw) if one is not None]
    values = np.concatenate(shown)
    values = values[np.isfinite(values)]
    if panel.log and (values > 0).any():
        ends = np.log10([values[values > 0].min(), values[values > 0].max()])
        return {"type": "log", "domain": [10.0 ** math.floor(ends[0]), 10.0 ** (math.floor(ends[1]) + 1)]}
    if not values.any():
        return {"domain": [0, 1]}
    return {"zero": bool(np.ptp(values) == 0)}


def _scale(channel: str, styles: Mapping[str, Style]) -> dict[str, Any]:
    ranges = {
        "color": [f"var(--arm{number})" for number in range(1, len(styles) + 1)],
        "shape": [style.marker for style in styles.values()],
        "strokeDash": [list(style.dashes) if style.dashes else [1, 0] for style in styles.values()],
    }
    return {"field": "arm", "type": "nominal", "scale": {"domain": list(styles), "range": ranges[channel]}}
