"""The results of an audit as text."""

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from gtpo_verl.algorithms import algorithms
from gtpo_verl.audit.analysis import BASELINE, ORACLE, RANDOM, Figure, Row
from gtpo_verl.audit.plan import FEWEST_CONTINUATIONS, Plan
from gtpo_verl.audit.score import POSITION, STATE, Result

# heading, stratum, figure, format
COLUMNS: tuple[tuple[str, str, str, str], ...] = (
    ("alignment, correct", "correct", "alignment", "+.2f"),
    ("alignment, wrong", "wrong", "alignment", "+.2f"),
    ("energy in 20 %", "all", "energy@0.2", ".0%"),
    ("blame on the loss", "wrong", "blame_lift", ".2f"),
    ("blame after it", "wrong", "wasted", ".0%"),
    ("rollouts needed", "all", "rollouts", ".2f"),
    ("sign flips", "all", "flips", ".1%"),
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


def number(value: float, form: str) -> str:
    """A number as the tables write it."""
    return f"{value:{form}}".replace("%", " %").replace("-", "−")


def cell(figure: Figure, form: str) -> tuple[str, str]:
    """A figure and its interval; empty where there is none."""
    if figure.value is None:
        return "–", ""
    interval = ""
    if figure.low is not None and figure.high is not None:
        interval = f"{number(figure.low, form)} to {number(figure.high, form)}"
    return number(figure.value, form), interval


def is_plain(row: Row, baseline: Row, stratum: str, name: str) -> bool:
    """Whether a figure's interval contains that of DAPO."""
    reference = baseline.figures[stratum][name].value
    return reference is not None and row.figures[stratum][name].contains(reference) is True


def table_rows(result: Result, plan: Plan) -> list[tuple[str, list[tuple[str, str, bool]]]]:
    """Of each row its label, and of each column the figure, its interval, and whether that contains DAPO's figure."""
    baseline = result.analysis.row(BASELINE)
    rows = []
    for row in result.analysis.rows:
        cells = []
        for _, stratum, name, form in COLUMNS:
            figure = row.figures.get(stratum, {}).get(name, Figure(None))
            plain = row is not baseline and stratum in row.figures and is_plain(row, baseline, stratum, name)
            cells.append((*cell(figure, form), plain))
        rows.append((label(row.name, plan), cells))
    return rows


def print_result(result: Result, plan: Plan, facts: Mapping[str, Any], console: Console | None = None) -> None:
    """Print the table, the reliability of the measurement, and what was left out."""
    console = console or Console(highlight=False, soft_wrap=False)
    wide = console.width >= WIDE
    table = Table(box=None, header_style="dim", pad_edge=False, padding=(0, 2 if wide else 1, 0, 0))
    table.add_column("", no_wrap=True)
    for heading, *_ in COLUMNS:
        table.add_column("\n".join(heading.replace(",", "").split()), justify="right", vertical="bottom")
    for name, cells in table_rows(result, plan):
        drawn = []
        for value, interval, plain in cells:
            text = Text(value, style="dim" if plain else "")
            drawn.append(text.append(f"\n{interval}", style="dim") if interval and wide else text)
        table.add_row(name, *drawn)
    console.print(table)
    if result.analysis.intervals and not wide:
        console.print("The 95 % intervals do not fit here: the page has them.")
    for line in [*sentences(result, plan, facts), EXPLORATION]:
        console.print(line, markup=False)


def sentences(result: Result, plan: Plan, facts: Mapping[str, Any]) -> list[str]:
    """What the table needs to be read."""
    found = result.analysis
    reliability = found.reliability["all"]
    half, binomial, oracle = (reliability[name].value for name in ("half", "half_binomial", "oracle"))
    lines = [verdict(result)] if verdict(result) else []
    lines.append(
        f"{facts['responses_audited']} responses to {facts['prompts_with_contrast']} prompts with contrast "
        f"({facts['solved']} prompts always solved and {facts['never']} never, not audited), {plan.steps} steps each; "
        f"{facts['continuations']:,} continuations, {facts['tokens_of_continuations']:,} tokens."
    )
    if half is None or binomial is None:
        lines.append("No measurable signal: the two halves of the continuations do not agree. Take more continuations.")
    else:
        lines.append(
            f"Reliability of a half {half:.2f} by the other half and {binomial:.2f} by its number of continuations; "
            f"the first half scored by the second reaches {oracle or 0:.2f}, which is the most that "
            f"{plan.continuations // 2} continuations allow."
        )
    losses = found.losses
    lines.append(
        f"Of {losses['wrong']} wrong responses {losses['lost before the last step']} were lost at a step before the "
        f"last, {losses['lost at the end']} in it, and {losses['never had a chance']} never had a chance."
    )
    if facts["responses_too_short"]:
        lines.append(f"{facts['responses_too_short']} responses of fewer than {plan.steps} tokens were left out.")
    if facts["responses_truncated"]:
        lines.append(f"{facts['responses_truncated']} of the audited responses were cut off by the length limit.")
    if result.unscored:
        lines.append(f"With DAPO's credit at ratios of 1: {', '.join(result.unscored)}.")
    if not found.intervals:
        lines.append("No intervals: they are over prompts, and audited responses belong to fewer than 20.")
    return lines


def verdict(result: Result) -> str:
    """What GTPO, or the first method beside DAPO, does to wrong responses, in words."""
    rows = [row for row in result.analysis.rows if row.name not in (BASELINE, *REFERENCES, ORACLE)]
    row = next((row for row in rows if row.name == "gtpo"), rows[0] if rows else None)
    figure = row.figures.get("wrong", {}).get("blame_lift") if row else None
    if row is None or figure is None or figure.value is None:
        return ""
    entry = algorithms().get(row.name)
    value, interval = cell(figure, ".2f")
    return (
        f"On wrong responses {entry.label if entry else row.name} puts {value} times the uniform share of blame on the "
        f"step that lost the answer{f' [{interval}]' if interval else ''}."
    )


def print_plan(plan: Plan, length: float, prompt: float, *, measured: bool, cached: bool) -> None:
    """Print what an audit will cost and what it can see."""
    tokens = plan.decoded(length)
    which = f"mean length {length:.0f}, measured" if measured else f"at most {length:.0f} tokens each, the limit"
    print(f"{plan.responses} responses ({which}) in {plan.steps} steps, {plan.continued:,} continuations.")
    print(
        f"Tokens to sample: {'about' if measured else 'at most'} {tokens:,.0f}; to read: "
        f"{plan.prefilled(length, prompt, cached=cached):,.0f} {'with' if cached else 'without'} vLLM's prefix cache."
    )
    print(
        f"Reliability λ = K / (K + M) = {plan.reliability:.2f}. Smallest alignment seen at 5 %, power 80 %: "
        f"{plan.detectable:.2f} over all responses, {plan.detectable * 2**0.5:.2f} over half of them; of a single step "
        f"|A| = {plan.smallest_step:.2f}."
    )
    if plan.continuations < 2 * FEWEST_CONTINUATIONS:
        print("Twice the continuations would cost less than twice, and steady the estimate of the reliability.")
