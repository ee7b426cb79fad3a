"""The page of an audit: the table, and responses coloured by true and by assigned credit beside the curve of V."""

import itertools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from gtpo_verl.algorithms.registry import Style
from gtpo_verl.audit.analysis import BASELINE, Figure
from gtpo_verl.audit.metrics import CERTAIN, first_losses
from gtpo_verl.audit.plan import Plan
from gtpo_verl.audit.render import EXPLORATION, Table, cell, kinds_table, label, main_method
from gtpo_verl.audit.score import Result
from gtpo_verl.audit.store import Store
from gtpo_verl.files import write_text
from gtpo_verl.report.charts import Line, Panel, panel_chart
from gtpo_verl.report.page import render_page
from gtpo_verl.runs.statistics import Floats

PAGE_FILE = "audit.html"
SHOWN = 8  # responses on the page, wrong ones first
MOST_TOKENS = 1500  # of a response on the page
STYLES = {"V": Style(light="#0062b2", dark="#56b4ff", marker="circle")}


def write_page(
    store: Store,
    table: Table,
    facts: Mapping[str, Any],
    *,
    responses: tuple[Result, Plan] | None = None,
    gradients: Mapping[str, Any] | None = None,
) -> Path:
    """Write ``audit.html``, which needs no other file; returns its path.

    responses: shown with their credit and their values. gradients: `gradients.figures`, by entropy.
    """
    model = Path(str(store.facts["model"]))  # `model` alone, as a run's is called, says nothing
    shown: dict[str, Any] = {"shown": [], "first": None, "breakdown": None}
    curves = {}
    if responses is not None:
        result, plan = responses
        chosen = _chosen(result)
        names = [name for name in result.tokens if name != BASELINE]
        credit = {name: [_shades(result, name, number) for number in chosen] for name in names}
        curves = {f"curve-{place}": curve(result, number) for place, number in enumerate(chosen)}
        shown = {
            "shown": [_shown(number, result) for number in chosen],
            "labels": {name: label(name, plan) for name in names},
            "first": main_method(names),
            "breakdown": kinds_table(result.analysis.kinds, plan) if result.analysis.kinds else None,
            "credit": json.dumps(credit, separators=(",", ":")).replace("<", "\\u003c"),
        }
    text = render_page(
        "gtpo_verl.audit",
        "audit.html.j2",
        STYLES,
        curves,
        model="/".join(model.parts[-2:]) if model.name == "model" else model.name,
        facts=store.facts,
        measured=facts,
        table=table,
        exploration=EXPLORATION,
        deciles=None if gradients is None else _deciles(gradients),
        **shown,
    )
    path = store.directory / PAGE_FILE
    write_text(path, text)
    return path


def _deciles(found: Mapping[str, Any]) -> list[tuple[str, list[str]]]:
    """What the wrong and the correct tokens of each decile of the entropy are, and their shares of noise and signal."""
    tokens, other = found["tokens"], main_method(found["methods"])
    rows = []
    for side, verdict in enumerate(("wrong", "correct")):
        for decile, entropy in enumerate(tokens["entropy"][side]):
            cells = [f"{entropy:.3f}", f"{tokens['norm'][side][decile]:.3f}"]
            for shares in (tokens["shares"][name] for name in (BASELINE, other) if name):
                values = (shares[kind][side][decile] for kind in ("noise", "signal"))
                cells += [" ".join(filter(None, cell(Figure(*each), ".0%"))) for each in values]
            rows.append((f"{verdict}, {decile + 1}", cells))
    return rows


def _chosen(result: Result) -> list[int]:
    """Responses for the page: the most continued ones, of median length first, three wrong ones for a correct one."""
    trials = np.where(result.values.is_step[:, 1], result.values.trials[:, :, 1].sum(axis=0), 0.0)
    lengths = np.array([len(rollout.tokens) for rollout in result.chosen.responses])
    distance = np.abs(lengths - np.median(lengths))
    lost = first_losses(result.values) >= 0
    order = np.lexsort((distance, ~lost, -trials)).tolist()
    wrong = [number for number in order if not result.values.correct[number]]
    correct = [number for number in order if result.values.correct[number]]
    some = wrong[: max(SHOWN * 3 // 4, SHOWN - len(correct))]
    return [*some, *correct[: SHOWN - len(some)]]


def _shown(number: int, result: Result) -> dict[str, Any]:
    """A response on the page, its steps with their true advantage, its shade and whether its sign is known."""
    values, rollout = result.values, result.chosen.responses[number]
    A = values.advantages.mean(axis=0)[number]
    certain = np.abs(A) > CERTAIN * values.standard_error[number]
    lost = int(first_losses(values)[number])
    largest = max(float(np.abs(A).max()), 1e-9)
    kept = min(len(rollout.tokens), MOST_TOKENS)
    texts = list(enumerate(rollout.texts[:kept]))
    if kept == len(rollout.tokens) and not texts[-1][1].strip(" \n"):
        texts[-1] = kept - 1, "␄"  # what ends a response is otherwise invisible
    steps = [
        {
            "tokens": texts[start:end],
            "advantage": float(A[step]),
            "shade": float(A[step]) / largest,
            "certain": bool(certain[step]),
            "lost": step == lost,
        }
        for step, (start, end) in enumerate(itertools.pairwise(result.chosen.points[number].tolist()))
        if start < kept
    ]
    left_out = len(rollout.tokens) - kept
    return {"prompt": rollout.prompt, "correct": rollout.correct, "steps": steps, "left_out": left_out}


def _shades(result: Result, name: str, number: int) -> list[float]:
    """The centred credit of each token over the largest of the response, in hundredths."""
    rollout = result.chosen.responses[number]
    credit: Floats = result.tokens[name][number, : len(rollout.tokens)]
    inside = credit - credit.mean()
    largest = float(np.abs(inside).max())
    if largest <= 1e-9 * float(np.abs(credit).max(initial=1e-12)):
        return []
    return [round(value, 2) for value in (inside / largest)[:MOST_TOKENS].tolist()]


def curve(result: Result, number: int) -> dict[str, Any]:
    """V over the tokens of a response with 95 % intervals (Wilson's), and the step that lost it, as a chart."""
    values, points = result.values, result.chosen.points[number].astype(np.float64)
    V, trials = values.mean[number], values.trials[:, number].sum(axis=0)
    line = Line("V", points, V, *wilson(V, trials))
    lost = int(first_losses(values)[number])
    band = (float(points[lost]), float(points[lost + 1]), "lost here") if lost >= 0 else None
    panel = Panel("V", (line,), percent=True, x_label="token", height=160, y_domain=(0, 1), band=band)
    return panel_chart(panel, STYLES, interactive=True)


def wilson(share: Floats, trials: Floats) -> tuple[Floats, Floats]:
    """95 % intervals of binomial shares, as many as there are; a share that is known (infinite trials) has none."""
    z = float(stats.norm.ppf(0.975))
    known = np.isinf(trials)
    n = np.where(known, 1.0, trials)
    middle = (share + z**2 / (2 * n)) / (1 + z**2 / n)
    half = z / (1 + z**2 / n) * np.sqrt(share * (1 - share) / n + z**2 / (4 * n**2))
    return np.where(known, share, middle - half), np.where(known, share, middle + half)
