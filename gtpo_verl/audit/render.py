"""The results of an audit as text."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich import table as rich_table
from rich.console import Console
from rich.text import Text

from gtpo_verl.algorithms import algorithms
from gtpo_verl.audit.analysis import BASELINE, ORACLE, RANDOM, Figure
from gtpo_verl.audit.plan import FEWEST_CONTINUATIONS, Plan
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
    figures = {row.name: row.figures for row in result.analysis.rows}
    rows = _rows(figures, COLUMNS, plan, "–")
    columns = [heading for heading, *_ in COLUMNS]
    return Table("Which credit falls on the steps that decide?", columns, rows, sentences(result, plan, facts))


def gradients_table(found: Mapping[str, Any], facts: Mapping[str, Any], plan: Plan) -> Table:
    """The table of signal and noise of gradients; found: of `gradients.figures`."""
    rows = _rows(found["methods"], GRADIENT_COLUMNS, plan, "n.r.")
    columns = [heading for heading, *_ in GRADIENT_COLUMNS]
    lines = _of_gradients(found["methods"], facts, plan)
    return Table("How much signal and how much noise has each gradient?", columns, rows, lines)


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


def _of_gradients(methods: Mapping[str, Any], facts: Mapping[str, Any], plan: Plan) -> list[str]:
    name = main_method(methods) or BASELINE
    value, interval = cell(Figure(*methods[name]["sgd"]["along/dapo"]), ".2f", "")
    chosen = f" with a name like {facts['chosen']}" if facts["chosen"] else ""
    lines = [
        f"For as much progress along the true gradient {label(name, plan)} needs {value} times the groups of DAPO "
        f"[{interval}]."
        if value
        else f"Whether {label(name, plan)} needs fewer groups than DAPO is not resolved.",
        (
            f"{facts['groups']} groups of {facts['samples']} responses with contrast and {facts['others']} more in the "
            f"true gradient; {facts['parameters']:,} parameters{chosen}; credits of {facts['step']} groups at a time, "
            "which is a step. Intervals: 95 %, jackknife over groups. log π here and in the rollouts differ by at most "
            f"{facts['log_prob_difference']:.1e}."
        ),
    ]
    if facts["groups"] < facts["wanted"]:
        lines.append(f"Asked for were {facts['wanted']} groups: the data has no more with contrast.")
    lines.append(
        "n.r.: not resolved, because the interval of the squared signal, of the true gradient or of their product "
        "includes 0. A negative number of groups: the method goes against the true gradient."
    )
    if facts["unscored"]:
        lines.append(f"With DAPO's credit at ratios of 1: {', '.join(facts['unscored'])}.")
    return lines


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


def sentences(result: Result, plan: Plan, facts: Mapping[str, Any]) -> list[str]:
    """What the table needs to be read."""
    reliability = result.analysis.reliability["all"]
    half, binomial, oracle = (reliability[name].value for name in ("half", "half_binomial", "oracle"))
    agreement = (
        "No measurable signal: the two halves of the continuations do not agree. Take more continuations."
        if half is None or binomial is None
        else f"Reliability of a half {half:.2f} by the other half and {binomial:.2f} by its number of continuations; "
        f"the first half scored by the second reaches {oracle or 0:.2f}, which is the most that "
        f"{plan.continuations // 2} continuations allow."
    )
    lines = [
        _main_result(result, plan),
        (
            f"{facts['responses_audited']} responses to {facts['prompts_with_contrast']} prompts with contrast "
            f"({facts['solved']} prompts always solved and {facts['never']} never, not audited), {plan.steps} steps "
            f"each; {facts['continuations']:,} continuations, {facts['tokens_of_continuations']:,} tokens."
        ),
        agreement,
    ]
    if facts["responses_too_short"]:
        lines.append(f"{facts['responses_too_short']} responses of fewer than {plan.steps} tokens were left out.")
    if facts["responses_truncated"]:
        lines.append(f"{facts['responses_truncated']} of the audited responses were cut off by the length limit.")
    if result.unscored:
        lines.append(f"With DAPO's credit at ratios of 1: {', '.join(result.unscored)}.")
    if not result.analysis.intervals:
        lines.append("No intervals: they are over prompts, and audited responses belong to fewer than 20.")
    return [line for line in lines if line]


def _main_result(result: Result, plan: Plan) -> str:
    """How the credit of `main_method` is aligned in wrong responses, in words."""
    figures = {row.name: row.figures for row in result.analysis.rows}
    name = main_method(figures)
    figure = figures[name].get("wrong", {}).get("alignment") if name else None
    if not name or not figure or figure.value is None:
        return ""
    value, interval = cell(figure, "+.2f")
    return (
        f"On wrong responses the credit of {label(name, plan)} has an alignment of {value}"
        f"{f' [{interval}]' if interval else ''} with the true advantages; a uniform credit has 0."
    )


def print_plan(plan: Plan, length: float, prompt: float, *, measured: bool, cached: bool) -> None:
    """Print what an audit will cost and what it can see."""
    tokens = plan.decoded(length)
    print(
        f"{plan.responses} responses ({_lengths(length, measured)}) in {plan.steps} steps, {plan.continued:,} "
        f"continuations.\nTokens to sample: {'about' if measured else 'at most'} {tokens:,.0f}; to read: "
        f"{plan.prefilled(length, prompt, cached=cached):,.0f} {'with' if cached else 'without'} vLLM's prefix cache.\n"
        f"Reliability λ = K / (K + M) = {plan.reliability:.2f}. Smallest alignment seen at 5 %, power 80 %: "
        f"{plan.detectable:.2f} over all responses, {plan.detectable * 2**0.5:.2f} over half of them; of a single step "
        f"|A| = {plan.smallest_step:.2f}."
    )
    if plan.continuations < 2 * FEWEST_CONTINUATIONS:
        print("Twice the continuations would cost less than twice, and steady the estimate of the reliability.")


def print_plan_of_gradients(plan: Plan, length: float, methods: int, *, measured: bool) -> None:
    """Print what an audit of gradients will cost."""
    print(
        f"{plan.gradients} groups with contrast and {plan.prompts - plan.gradients} more in the true gradient, "
        f"{plan.samples} responses each ({_lengths(length, measured)}): {plan.prompts * plan.samples * length:,.0f} "
        "tokens, and those of the prompts without contrast.\n"
        f"Two passes over the groups, with a backward pass for each of at most {methods + 1} different credits. "
        f"Memory: the model and its activations in float32, and {12 * (methods + 1)} bytes a parameter; "
        "--gradient-params restricts them."
    )


def _lengths(length: float, measured: bool) -> str:
    return f"mean length {length:.0f}, measured" if measured else f"at most {length:.0f} tokens each, the limit"
