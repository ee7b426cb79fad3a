"""Whether the figures of an audit on a real model hold, and what they are.

    gtpo-verl audit MODEL ... --second-stage 10 --second-continuations 528 --output AUDIT
    gtpo-verl audit MODEL ... --continuations 32 --output DOUBLED
    python benchmarks/audit_check.py NAME AUDIT --doubled DOUBLED

Four checks, each of which can fail: V by the first stage's continuations against the hundreds of the second stage at
the same prefixes (independent samples: the standardised differences have mean square 1); the alignment of the first
half of the continuations, scored by the second, against √λ of a half by binomial noise; of 20 credits with random
weights, how many intervals of alignment leave out 0 (one is expected); every method's alignment with twice the
continuations against its interval.
Writes `audit-NAME.json` and `.md` into benchmarks/results. Nothing is sampled here.
"""

import argparse
import json
import re
from pathlib import Path
from typing import Any

import numpy as np

from gtpo_verl.algorithms import algorithms
from gtpo_verl.audit.analysis import ORACLE, Figure, Row, analyse
from gtpo_verl.audit.methods import methods
from gtpo_verl.audit.metrics import Credit
from gtpo_verl.audit.references import RANDOM_SEEDS, random_credit
from gtpo_verl.audit.sampling import choose_responses, measured
from gtpo_verl.audit.score import Result, measurement, score
from gtpo_verl.audit.store import OF_BRANCH, Store, plan_of, reopen
from gtpo_verl.integrations.context import Overlong

RESULTS = Path(__file__).parent / "results"
FEWEST_REFERENCE = 400  # continuations of a point in the second stage
COLUMNS = (
    ("alignment, correct", "correct", "alignment"),
    ("alignment, wrong", "wrong", "alignment"),
    ("energy in 20 %", "all", "energy@0.2"),
)


def first_stage_only(store: Store) -> Result:
    """Every figure without the second stage, which only some points have."""
    overlong = store.facts["overlong"]
    store.counts = {key: count for key, count in store.counts.items() if count.stage != 2}
    settings = None if overlong is None else Overlong(*overlong)
    return score(store, plan_of(store), store.facts["seed"], methods(), settings)


def against_reference(store: Store) -> dict[str, float] | None:
    """The first stage's shares of correct continuations against the second's; None without a second stage."""
    first: dict[tuple[int, int, int], list[int]] = {}
    second: dict[tuple[int, int, int], list[int]] = {}
    halves: dict[tuple[int, int, int], dict[int, float]] = {}
    for count in store.counts.values():
        if count.stage == OF_BRANCH:
            continue
        point = count.row, count.sample, count.place
        total = (first if count.stage == 1 else second).setdefault(point, [0, 0])
        total[0] += count.successes
        total[1] += count.trials
        if count.stage == 1:
            halves.setdefault(point, {})[count.half] = count.successes / count.trials
    points = [point for point, (_, trials) in second.items() if trials >= FEWEST_REFERENCE]
    if not points:
        return None
    k, n = np.array([first[point] for point in points], dtype=float).T
    reference, trials = np.array([second[point] for point in points], dtype=float).T
    share = (k + reference) / (n + trials)
    noise = np.sqrt(share * (1 - share) * (1 / n + 1 / trials))
    known = noise > 0
    z = (k / n - reference / trials)[known] / noise[known]
    errors = np.array([[halves[point][half] for half in (0, 1)] for point in points]) - (reference / trials)[:, None]
    return {
        "prefixes": len(points),
        "continuations": float(trials.mean()),
        "known": int((~known).sum()),
        "mean z": float(z.mean()),
        "mean z²": float((z**2).mean()),
        "standard error": float(np.sqrt(2 / len(z))),
        "largest": float(abs(z).max()),
        "correlation": float(np.corrcoef(errors.T)[0, 1]),
    }


def oracle(result: Result) -> dict[str, float | None]:
    """Half of the continuations as credit, scored by the other half: √λ of a half, with λ from binomial noise alone.

    λ from the agreement of the halves would be the same figure written in another way.
    """
    row = result.analysis.row(ORACLE).figures["all"]["alignment"]
    binomial = result.analysis.reliability["all"]["half_binomial"].value
    error = None if row.low is None or row.high is None else (row.high - row.low) / 3.92
    return {"alignment": row.value, "standard error": error, "expected": binomial and max(binomial, 0.0) ** 0.5}


def rejected(store: Store, result: Result) -> int:
    """Random credits whose interval of alignment leaves out 0."""
    chosen = choose_responses(store.rollouts, plan_of(store), store.facts["seed"])
    values = measured(store, chosen, stages=(1,))
    mask = (
        np.arange(result.tokens["dapo"].shape[1]) < np.array([len(each.tokens) for each in chosen.responses])[:, None]
    )
    uniform = Credit.of_tokens(result.tokens["dapo"], mask, chosen.points, values.correct)
    drawn = {
        f"weights {seed}": random_credit(result.tokens["dapo"], mask, chosen.points, values.correct, 10_000 + seed)
        for seed in range(RANDOM_SEEDS)
    }
    rows = analyse(values, {"dapo": uniform, **drawn})
    return sum(rows.row(name).figures["all"]["alignment"].contains(0.0) is False for name in drawn)


def doubled(result: Result, other: Result) -> dict[str, Any]:
    """Alignments of wrong and of correct responses with more continuations, outside the interval with fewer."""
    outside, compared = [], 0
    for row in result.analysis.rows:
        for stratum in ("correct", "wrong"):
            figure = row.figures.get(stratum, {}).get("alignment")
            value = other.analysis.row(row.name).figures[stratum]["alignment"].value
            if row.name == ORACLE or figure is None or figure.low is None or value is None:
                continue  # the oracle's own alignment grows with the number of continuations
            compared += 1
            if not figure.contains(value):
                outside.append(f"{row.name}, {stratum}: {value:+.2f} outside {figure.low:+.2f} to {figure.high:+.2f}")
    return {"compared": compared, "outside": outside}


def rounded(figure: Figure) -> list[float | None]:
    return [None if value is None else round(value, 4) for value in (figure.value, figure.low, figure.high)]


def cell(figure: Figure | None) -> str:
    if figure is None or figure.value is None:
        return ""
    if figure.low is None or figure.high is None:
        return f"{figure.value:.2f}"
    return f"{figure.value:.2f} ({figure.low:.2f} to {figure.high:.2f})"


def label(row: Row) -> str:
    entry = algorithms().get(row.name)
    return entry.label if entry else row.name


def table(result: Result) -> list[str]:
    lines = [f"| | {' | '.join(name for name, _, _ in COLUMNS)} |", f"|---|{'---|' * len(COLUMNS)}"]
    for row in result.analysis.rows:
        cells = [cell(row.figures.get(stratum, {}).get(name)) for _, stratum, name in COLUMNS]
        lines.append(f"| {label(row)} | {' | '.join(cells)} |")
    return lines


def report(name: str, found: dict[str, Any], result: Result) -> str:
    plan = ", ".join(f"`{option} {value}`" for option, value in found["plan"].items())
    sizes, reliable, half = found["measurement"], found["reliability"], found["oracle"]
    lines = [
        f"# Audit of `{name}`",
        "",
        (
            f"`benchmarks/audit_check.py`. Model: that of {found['model']}, before training. {plan}. "
            f"{sizes['continuations']:,} continuations in {found['seconds']:.0f} s on two cores, starting included. "
            "Figures by the first stage, with intervals over prompts; docs/audit.md explains them."
        ),
        "",
        *table(result),
        "",
        (
            f"Reliability of a half {reliable['half']:.2f} (by binomial counts {reliable['half_binomial']:.2f}); "
            f"Σ A² over V(0)(1 − V(0)) {reliable['released']:.2f}."
        ),
        "",
        "Checks:",
        "",
        (
            f"- half of the continuations as credit, scored by the other: alignment {half['alignment']:.3f}, √λ by "
            f"binomial noise {half['expected']:.3f}, standard error {half['standard error'] or 0:.3f}"
        ),
        f"- random weights: {found['random credits rejected']} of {RANDOM_SEEDS} intervals leave out 0",
    ]
    if reference := found["reference"]:
        lines.append(
            f"- V at {reference['prefixes']} prefixes, {reference['known']} of them 0 or 1 in both samples, against "
            f"{reference['continuations']:.0f} other continuations each: mean z {reference['mean z']:+.2f}, mean z² "
            f"{reference['mean z²']:.2f} (1 ± {reference['standard error']:.2f} expected), largest |z| "
            f"{reference['largest']:.1f}; the errors of the halves correlate by {reference['correlation']:+.2f}"
        )
    if more := found.get("doubled"):
        inside = more["compared"] - len(more["outside"])
        lines.append(
            f"- alignments with twice the continuations: {inside} of {more['compared']} inside the intervals above"
            + "".join(f"; {each}" for each in more["outside"])
        )
    return "\n".join([*lines, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name")
    parser.add_argument("audit", type=Path)
    parser.add_argument("--doubled", type=Path, help="the same audit with twice the continuations")
    options = parser.parse_args()
    store = reopen(options.audit)
    whole = reopen(options.audit)
    result = first_stage_only(store)
    found: dict[str, Any] = {
        "plan": {name: value for name, value in store.facts["settings"].items() if name.startswith("--")},
        "model": Path(store.facts["model"]).parent.name,
        "seconds": store.facts["seconds"],
        "measurement": measurement(whole, result),
        "reliability": {name: each.value for name, each in result.analysis.reliability["all"].items()},
        "reference": against_reference(whole),
        "oracle": oracle(result),
        "random credits rejected": rejected(store, result),
        "methods": {
            row.name: {
                stratum: {name: rounded(each) for name, each in figures.items()}
                for stratum, figures in row.figures.items()
            }
            for row in result.analysis.rows
        },
    }
    if options.doubled:
        found["doubled"] = doubled(result, first_stage_only(reopen(options.doubled)))
    text = report(options.name, found, result)
    content = re.sub(r"\[[^\[\]{}]*\]", lambda numbers: " ".join(numbers[0].split()), json.dumps(found, indent=1))
    (RESULTS / f"audit-{options.name}.json").write_text(content + "\n")
    (RESULTS / f"audit-{options.name}.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
