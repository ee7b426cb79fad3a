"""The results of an audit as text."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jinja2
from rich import table as rich_table
from rich.console import Console
from rich.text import Text

from gtpo_verl.algorithms import algorithms
from gtpo_verl.audit.analysis import BASELINE, ORACLE, RANDOM, Figure, enough_prompts
from gtpo_verl.audit.gradients import FEWEST_STEPS
from gtpo_verl.audit.plan import FEWEST_CONTINUATIONS, Plan, bytes_for_gradients
from gtpo_verl.audit.score import POSITION, STATE, Result

Columns = Sequence[tuple[str, str, str, str]]  # heading, stratum or metric, figure, format
COLUMNS: Columns = (
    ("alignment, correct", "correct", "alignment", "+.2f"),
    ("alignment, wrong", "wrong", "alignment", "+.2f"),
    ("energy in 20 %", "all", "energy@0.2", ".0%"),
    ("sign flips", "all", "flips", ".1%"),
)
GRADIENT_COLUMNS: Columns = (
    ("groups needed, truth", "sgd", "along/dapo", ".2f"),
    ("groups needed, truth, Adam", "adam", "along/dapo", ".2f"),
    ("groups needed, own direction", "sgd", "own/dapo", ".2f"),
    ("SNR of a step", "sgd", "snr", ".3g"),
    ("cosine with truth", "sgd", "cosine", "+.2f"),
    ("gain", "sgd", "gain", "+.2f"),
)
EXPLORATION = (
    "The audit judges credit as the gradient of the expected reward. Credit that keeps the policy exploring need not "
    "agree with it."
)
WIDE = 130  # columns of a terminal in which intervals fit
REFERENCES = {POSITION: "position alone", STATE: "state oracle", RANDOM: "random weights"}


def label(name: str, plan: Plan) -> str:
    """What a row is called."""
    if name == ORACLE:
        return f"{plan.continuations // 2} continuations"
    entry = algorithms().get(name)
    return REFERENCES.get(name) or (entry.label if entry else name)


def main_method(names: Collection[str]) -> str | None:
    """The method that sentences and pictures are about: GTPO, or the first beside DAPO."""
    others = [name for name in names if name not in (BASELINE, ORACLE, *REFERENCES)]
    return "gtpo" if "gtpo" in others else next(iter(others), None)


def cell(figure: Figure, form: str, undefined: str = "–") -> tuple[str, str]:
    """A figure and its interval; empty where there is none."""
    value, *ends = (None if end is None else f"{end:{form}}".replace("%", " %").replace("-", "−") for end in figure)
    return value or undefined, f"{ends[0]} to {ends[1]}" if ends[0] and ends[1] else ""


@dataclass(frozen=True)
class Table:
    """The results of an audit: of each row its label, and of each column the figure, its interval, and whether that
    contains DAPO's figure. sentences: what the table needs to be read, the main result first.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[tuple[str, Sequence[tuple[str, str, bool]]]]
    sentences: Sequence[str]


def values_table(result: Result, plan: Plan, facts: Mapping[str, Any]) -> Table:
    """The table of credit against true advantages."""
    figures = {name: row["figures"] for name, row in result.analysis.methods.items()}
    name = main_method(figures)
    aligned = figures[name].get("wrong", {}).get("alignment") if name else None
    value, interval = cell(aligned or Figure(None), "+.2f", "")
    sentences = _paragraphs(
        "sentences.txt.j2",
        gradients=False,
        name=name and label(name, plan),
        value=value,
        interval=interval,
        facts=facts,
        plan=plan,
        unscored=result.unscored,
        reliability=result.analysis.reliability["all"],
        intervals=enough_prompts(result.values),
    )
    rows, columns = _rows(figures, COLUMNS, plan, "–"), [heading for heading, *_ in COLUMNS]
    return Table("Which credit falls on the steps that decide?", columns, rows, sentences)


def kinds_table(kinds: Mapping[str, Any], plan: Plan) -> Table:
    """The table of `kinds.kind_shares`, with DAPO and the methods whose shares, as they are shown, are not DAPO's."""
    rows = {f"{verdict}, {kind}": shares for verdict, each in kinds.items() for kind, shares in each.items()}
    tokens, energy = ([cell(shares[name], ".0%") for shares in rows.values()] for name in ("tokens", "energy"))
    credit = {
        name: [cell(shares["credit"][name], ".0%") for shares in rows.values()]
        for name in next(iter(rows.values()))["credit"]
    }
    differing = [
        name
        for name, column in credit.items()
        if any(mine not in (dapo, "–") for (mine, _), (dapo, _) in zip(column, credit[BASELINE], strict=True))
    ]
    columns = {"share of tokens": tokens, "share of Σ A²": energy}
    if differing:
        columns |= {label(name, plan): credit[name] for name in (BASELINE, *differing)}
    cells = [[(*each, False) for each in of_row] for of_row in zip(*columns.values(), strict=True)]
    return Table("Breakdown", list(columns), list(zip(rows, cells, strict=True)), ())


def gradients_table(found: Mapping[str, Any], facts: Mapping[str, Any], plan: Plan) -> Table:
    """The table of signal and noise of gradients; found: of `gradients.figures`."""
    figures = found["methods"]
    name = main_method(figures)
    needed = Figure(*figures[name]["sgd"]["along/dapo"]) if name else Figure(None)
    value, interval = cell(needed, ".2f", "")
    sentences = _paragraphs(
        "sentences.txt.j2",
        gradients=True,
        name=name and label(name, plan),
        value=value,
        interval=interval,
        against=(needed.value or 0) < 0,
        decided=not needed.contains(1.0),
        facts=facts,
        unscored=facts["unscored"],
        fewest_steps=FEWEST_STEPS,
    )
    rows, columns = _rows(figures, GRADIENT_COLUMNS, plan, "n.r."), [heading for heading, *_ in GRADIENT_COLUMNS]
    return Table("How much signal and how much noise has each gradient?", columns, rows, sentences)


def print_plan(
    plan: Plan, length: float, prompt: float = 0.0, *, methods: int = 0, measured: bool, cached: bool = True
) -> None:
    """Print what an audit will cost and what it can see. length, prompt: tokens of a response, `measured` or the limit,
    and of a prompt. methods: whose gradients are taken. cached: vLLM has a prefix cache.
    """
    sizes = {"length": length, "prompt": prompt, "methods": methods, "bytes": bytes_for_gradients(methods)}
    sizes |= {"fewest": FEWEST_CONTINUATIONS, "steps": plan.steps}
    plan = replace(plan, steps=max(2, min(plan.steps, round(length))))  # a response has at most as many as tokens
    for line in _paragraphs("cost.txt.j2", plan=plan, measured=measured, cached=cached, **sizes):
        print(line)


def _paragraphs(template: str, **context: Any) -> list[str]:
    loader = jinja2.PackageLoader("gtpo_verl.audit", ".")
    environment = jinja2.Environment(loader=loader, undefined=jinja2.StrictUndefined, trim_blocks=True)
    text = environment.get_template(template).render(context)
    return [" ".join(lines.split()) for lines in text.split("\n\n") if lines.strip()]


def _rows(
    figures: Mapping[str, Mapping[str, Mapping[str, Any]]], columns: Columns, plan: Plan, undefined: str
) -> list[tuple[str, list[tuple[str, str, bool]]]]:
    """figures: by row, stratum or metric, and name."""
    rows = []
    for name in figures:
        cells = []
        for _, part, key, form in columns:
            figure, baseline = (Figure(*figures[each].get(part, {}).get(key, [None])) for each in (name, BASELINE))
            plain = name != BASELINE and baseline.value is not None and figure.contains(baseline.value) is True
            cells.append((*cell(figure, form, undefined), plain))
        rows.append((label(name, plan), cells))
    return rows


def print_table(found: Table, console: Console | None = None) -> None:
    """Print the table and its sentences."""
    console = console or Console(highlight=False, soft_wrap=False)
    wide = console.width >= WIDE
    table = rich_table.Table(box=None, header_style="dim", pad_edge=False, padding=(0, 2 if wide else 1, 0, 0))
    table.add_column("", no_wrap=True)
    for heading in found.columns:
        table.add_column("\n".join(heading.replace(",", "").split()), justify="right", vertical="bottom")
    for name, cells in found.rows:
        drawn = []
        for value, interval, plain in cells:
            text = Text(value, style="dim" if plain else "")
            drawn.append(text.append(f"\n{interval}", style="dim") if interval and wide else text)
        table.add_row(name, *drawn)
    console.print(table)
    if not wide and any(interval for _, cells in found.rows for _, interval, _ in cells):
        console.print("The 95 % intervals do not fit here: the page has them.")
    for line in [*found.sentences, EXPLORATION]:
        console.print(line, markup=False)
