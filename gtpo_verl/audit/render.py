"""The results of an audit as text."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich import table as rich_table
from rich.console import Console
from rich.text import Text

from gtpo_verl.algorithms import algorithms
from gtpo_verl.audit.analysis import BASELINE, ORACLE, RANDOM, Figure, Row
from gtpo_verl.audit.gradients import figure_of
from gtpo_verl.audit.plan import FEWEST_CONTINUATIONS, Plan
from gtpo_verl.audit.score import POSITION, STATE, Result

# heading, stratum, figure, format
COLUMNS: tuple[tuple[str, str, str, str], ...] = (
    ("alignment, correct", "correct", "alignment", "+.2f"),
    ("alignment, wrong", "wrong", "alignment", "+.2f"),
    ("energy in 20 %", "all", "energy@0.2", ".0%"),
    ("sign flips", "all", "flips", ".1%"),
)
# heading, metric, figure, format
GRADIENT_COLUMNS: tuple[tuple[str, str, str, str], ...] = (
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


@dataclass(frozen=True)
class Table:
    """The results of an audit: of each row its label, and of each column the figure, its interval, and whether that
    contains DAPO's figure. sentences: what the table needs to be read, the main result first.
    """

    title: str
    columns: tuple[str, ...]
    rows: Sequence[tuple[str, Sequence[tuple[str, str, bool]]]]
    sentences: Sequence[str]


def values_table(result: Result, plan: Plan, facts: Mapping[str, Any]) -> Table:
    """The table of credit against true advantages."""
    baseline = result.analysis.row(BASELINE)
    rows = []
    for row in result.analysis.rows:
        cells = []
        for _, stratum, name, form in COLUMNS:
            figure = row.figures.get(stratum, {}).get(name, Figure(None))
            plain = row is not baseline and stratum in row.figures and is_plain(row, baseline, stratum, name)
            cells.append((*cell(figure, form), plain))
        rows.append((label(row.name, plan), cells))
    columns = tuple(heading for heading, *_ in COLUMNS)
    return Table("Which credit falls on the steps that decide?", columns, rows, sentences(result, plan, facts))


def gradients_table(found: Mapping[str, Any], facts: Mapping[str, Any], plan: Plan) -> Table:
    """The table of signal and noise of gradients; found: of `gradients.figures`."""
    rows = []
    for name in found["methods"]:
        cells = []
        for _, metric, key, form in GRADIENT_COLUMNS:
            figure, baseline = (figure_of(found, each, metric, key) for each in (name, BASELINE))
            plain = name != BASELINE and baseline.value is not None and figure.contains(baseline.value) is True
            cells.append((*(cell(figure, form) if figure.value is not None else ("n.r.", "")), plain))
        rows.append((label(name, plan), cells))
    columns = tuple(heading for heading, *_ in GRADIENT_COLUMNS)
    return Table("How much signal and how much noise has each gradient?", columns, rows, _of_gradients(found, facts))


def _of_gradients(found: Mapping[str, Any], facts: Mapping[str, Any]) -> list[str]:
    name = next(
        (each for each in ("gtpo", *found["methods"]) if each in found["methods"] and each != BASELINE), BASELINE
    )
    needed = figure_of(found, name, "sgd", "along/dapo")
    value, interval = cell(needed, ".2f")
    chosen = f" with a name like {facts['chosen']}" if facts["chosen"] else ""
    entry = algorithms().get(name)
    lines = [
        f"Whether {entry.label if entry else name} needs fewer groups than DAPO is not resolved."
        if needed.value is None
        else f"For as much progress along the true gradient {entry.label if entry else name} needs {value} times the "
        f"groups of DAPO [{interval}]."
    ]
    lines.append(
        f"{facts['groups']} groups of {facts['samples']} responses with contrast and {facts['others']} more in the "
        f"true gradient; {facts['parameters']:,} parameters{chosen}; credits of {facts['step']} groups at a time, "
        "which is a step. Intervals: 95 %, jackknife over groups. log π here and in the rollouts differ by at most "
        f"{facts['log_prob_difference']:.1e}."
    )
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
    """How GTPO's credit, or that of the first method beside DAPO, is aligned in wrong responses, in words."""
    rows = [row for row in result.analysis.rows if row.name not in (BASELINE, *REFERENCES, ORACLE)]
    row = next((row for row in rows if row.name == "gtpo"), rows[0] if rows else None)
    figure = row.figures.get("wrong", {}).get("alignment") if row else None
    if row is None or figure is None or figure.value is None:
        return ""
    entry = algorithms().get(row.name)
    value, interval = cell(figure, "+.2f")
    return (
        f"On wrong responses the credit of {entry.label if entry else row.name} has an alignment of {value}"
        f"{f' [{interval}]' if interval else ''} with the true advantages; a uniform credit has 0."
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


def print_plan_of_gradients(plan: Plan, length: float, methods: int, *, measured: bool) -> None:
    """Print what an audit of gradients will cost."""
    which = f"mean length {length:.0f}, measured" if measured else f"at most {length:.0f} tokens each, the limit"
    print(
        f"{plan.gradients} groups with contrast and {plan.prompts - plan.gradients} more in the true gradient, "
        f"{plan.samples} responses each ({which}): {plan.prompts * plan.samples * length:,.0f} tokens, and those of "
        "the prompts without contrast."
    )
    print(
        f"Two passes over the groups, with a backward pass for each of at most {methods + 1} different credits. "
        f"Memory: the model and its activations in float32, and {12 * (methods + 1)} bytes a parameter; "
        "--gradient-params restricts them."
    )
