"""Statistics over seeds on simulated runs whose truth is known: coverage, false positives, power, and the warning.

    python benchmarks/seed_statistics.py

Draws paired differences of n seeds from five distributions with mean 0 (standard deviation 1, but for t with 2 degrees
of freedom, which has none) and passes them to the functions that the report uses (`gtpo_verl/evaluation/paired.py`).
Nothing is trained. Writes `seed-statistics.json` and `seed-statistics.md` into benchmarks/results, in seconds on one
core; the seed of the generator is fixed, so the numbers are repeated exactly.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from gtpo_verl.evaluation.paired import ALPHA, SKEWED, holm, sign_flip_p, student_bounds, student_p

RESULTS = Path(__file__).parent / "results"
SEEDS = range(5, 11)
DESIGN = 8  # seeds of the recommended design
EFFECTS = (0.5, 0.75, 1.0, 1.25, 1.5, 2.0)  # true differences in standard deviations of the paired differences

Draw = Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]
DISTRIBUTIONS: dict[str, Draw] = {
    "normal": lambda rng, shape: rng.normal(size=shape),
    "Laplace": lambda rng, shape: rng.laplace(size=shape) / np.sqrt(2),
    "Student's t, 3 d.o.f.": lambda rng, shape: rng.standard_t(3, size=shape) / np.sqrt(3),
    "Student's t, 2 d.o.f.": lambda rng, shape: rng.standard_t(2, size=shape),
    "exponential (skewed)": lambda rng, shape: rng.exponential(size=shape) - 1,
}


def null(draw: Draw, rng: np.random.Generator, n: int, runs: int) -> dict[str, float]:
    """What happens where the true difference is 0: coverage of intervals, false positives, the warning of skewness."""
    differences = draw(rng, (runs, n))
    low, high = student_bounds(differences)
    found = {
        "t coverage": float(((low <= 0) & (high >= 0)).mean()),
        "t false positives": float((student_p(differences) <= ALPHA).mean()),
        "sign-flip false positives": float((sign_flip_p(differences) <= ALPHA).mean()),
        "warned": float((np.abs(stats.skew(differences, axis=1)) >= SKEWED).mean()),
    }
    return found


def bootstrap_coverage(draw: Draw, rng: np.random.Generator, n: int, runs: int) -> float:
    """Coverage of a percentile bootstrap over n seeds, which the report does not use."""
    drawn = rng.integers(n, size=(2_000, n))
    means = draw(rng, (runs, n))[:, drawn].mean(axis=-1)
    low, high = np.quantile(means, [ALPHA / 2, 1 - ALPHA / 2], axis=1)
    return float(((low <= 0) & (high >= 0)).mean())


def families(draw: Draw, rng: np.random.Generator, n: int, arms: int, runs: int) -> dict[str, float]:
    """Share of reports with any false positive: arms compared with one baseline that they share, so correlated."""
    accuracy = draw(rng, (runs, arms + 1, n))
    differences = (accuracy[:, 1:] - accuracy[:, :1]) / np.sqrt(2)
    p_values = student_p(differences), sign_flip_p(differences)
    return {
        name: float((holm(p) <= ALPHA).any(axis=1).mean()) for name, p in zip(("t", "sign-flip"), p_values, strict=True)
    }


def power(rng: np.random.Generator, n: int, effect: float, arms: int, runs: int) -> dict[str, float]:
    """Share of experiments that show the first of the arms' differences, the other arms being equal to the baseline."""
    differences = rng.normal(size=(runs, arms, n))
    differences[:, 0] += effect
    p_values = student_p(differences), sign_flip_p(differences)
    return {name: float((holm(p)[:, 0] <= ALPHA).mean()) for name, p in zip(("t", "sign-flip"), p_values, strict=True)}


def simulate(runs: int, seed: int) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return {
        "data sets": runs,
        "generator": seed,
        "null": {name: {n: null(draw, rng, n, runs) for n in SEEDS} for name, draw in DISTRIBUTIONS.items()},
        "bootstrap": {name: bootstrap_coverage(draw, rng, 5, runs // 20) for name, draw in DISTRIBUTIONS.items()},
        "families": {
            name: {arms: families(draw, rng, DESIGN, arms, runs // 2) for arms in (2, 3, 5)}
            for name, draw in DISTRIBUTIONS.items()
        },
        "power": {
            n: {e: {arms: power(rng, n, e, arms, runs // 4) for arms in (1, 2, 3)} for e in EFFECTS}
            for n in (5, DESIGN)
        },
    }


def table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def share(value: float) -> str:
    return f"{100 * value:.1f}"


def markdown(found: dict[str, Any]) -> str:
    sizes = (
        f"Per cent of {found['data sets']:,} simulated data sets a cell; half as many for Holm's procedure, a\n"
        "quarter for power, a twentieth for the bootstrap.\n"
    )
    parts = [f"# Statistics over seeds, simulated\n\n{sizes}"]
    for title, key in (
        ("Coverage of Student's 95 % interval", "t coverage"),
        ("False positives of the t test at 5 %", "t false positives"),
        ("False positives of the sign-flip test at 5 %", "sign-flip false positives"),
        (f"Reports that warn: skewness of at least {SKEWED:g}", "warned"),
    ):
        rows = [[name, *(share(cells[n][key]) for n in SEEDS)] for name, cells in found["null"].items()]
        parts.append(f"## {title}\n\n" + table(["differences", *(f"{n} seeds" for n in SEEDS)], rows))
    rows = [[name, share(coverage)] for name, coverage in found["bootstrap"].items()]
    parts.append("## Coverage of a percentile bootstrap over 5 seeds\n\n" + table(["differences", "5 seeds"], rows))
    rows = [
        [name, *(share(cells[arms][test]) for arms in cells for test in ("t", "sign-flip"))]
        for name, cells in found["families"].items()
    ]
    header = ["accuracies", *(f"{arms} arms, {test}" for arms in (2, 3, 5) for test in ("t", "sign-flip"))]
    parts.append(f"## Any false positive after Holm, {DESIGN} seeds, one baseline\n\n" + table(header, rows))
    for n, effects in found["power"].items():
        rows = [
            [f"{effect:g}", *(share(cells[arms][test]) for arms in cells for test in ("t", "sign-flip"))]
            for effect, cells in effects.items()
        ]
        header = [
            "true difference / s.d.",
            *(f"{m} compared, {test}" for m in (1, 2, 3) for test in ("t", "sign-flip")),
        ]
        parts.append(f"## Power with {n} seeds, normal differences, after Holm\n\n" + table(header, rows))
    return "\n".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-sets", type=int, default=40_000, help="per cell (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=20251122)
    args = parser.parse_args()
    found = simulate(args.data_sets, args.seed)
    (RESULTS / "seed-statistics.json").write_text(json.dumps(found, indent=1) + "\n")
    (RESULTS / "seed-statistics.md").write_text(markdown(found))
    print(markdown(found))


if __name__ == "__main__":
    main()
