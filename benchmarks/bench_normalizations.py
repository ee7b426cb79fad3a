"""Signs and means of GTPO's advantages under each normalisation, on groups with few or many correct responses.

    python benchmarks/bench_normalizations.py

Groups of 16, lengths 50 to 400, and token entropies like those of language models: four in five tokens nearly certain
(mean 0.05 nats), one in five uncertain (mean 0.8). Preset `gtpo`. Writes `normalizations.json` and `.md` into
benchmarks/results.
"""

import argparse
import json
import warnings
from pathlib import Path

import torch

from gtpo_verl.algorithms import GTPOConfig, gtpo_advantages

GROUPS, GROUP_SIZE = 64, 16
RESULTS = Path(__file__).parent / "results"


def make_batch(right: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(entropy, correct, mask, group) with `right` correct responses in every group."""
    generator = torch.Generator().manual_seed(right)
    rows = GROUPS * GROUP_SIZE
    lengths = torch.randint(50, 401, (rows,), generator=generator)
    mask = torch.arange(400) < lengths[:, None]
    unit = torch.empty(rows, 400, dtype=torch.float64).exponential_(generator=generator)
    entropy = torch.where(torch.rand(rows, 400, generator=generator) < 0.8, 0.05, 0.8) * unit
    return entropy, torch.arange(rows) % GROUP_SIZE < right, mask, torch.arange(rows) // GROUP_SIZE


def advantages(batch: tuple[torch.Tensor, ...], **settings: object) -> torch.Tensor:
    entropy, correct, mask, group = batch
    config = GTPOConfig.from_mapping(settings)
    return gtpo_advantages(entropy, correct, mask, group, config, return_shaped=False).advantages


def measure(right: int, normalization: str) -> dict[str, float]:
    batch = make_batch(right)
    _, correct, mask, _ = batch
    found = advantages(batch, normalization=normalization)
    good, bad = found[mask & correct[:, None]], found[mask & ~correct[:, None]]
    other = advantages(batch, normalization=normalization, alpha1=5.0, alpha2=1.0)
    return {
        "correct": right,
        "mean_correct": good.mean().item(),
        "mean_wrong": bad.mean().item(),
        "negative_correct": (good < 0).double().mean().item(),
        "positive_wrong": (bad > 0).double().mean().item(),
        "change": (found - other).abs().max().item(),
    }


def report(results: dict[str, list[dict[str, float]]]) -> str:
    lines = [
        "# What each normalisation leaves of the verdict",
        "",
        f"GTPO, preset `gtpo`, {GROUPS} groups of {GROUP_SIZE}; see benchmarks/bench_normalizations.py.",
        "The last column is the largest change of an advantage when α1, α2 go from 1, 0.1 to 5, 1.",
        "",
        (
            "| normalization | correct of 16 | mean A, correct | mean A, wrong | correct tokens with A < 0 "
            "| wrong tokens with A > 0 | change |"
        ),
        "|---|---|---|---|---|---|---|",
    ]
    for name, rows in results.items():
        lines += [
            f"| `{name}` | {row['correct']} | {row['mean_correct']:+.3f} | {row['mean_wrong']:+.3f} "
            f"| {row['negative_correct']:.1%} | {row['positive_wrong']:.1%} | {row['change']:.1e} |"
            for row in rows
        ]
    return "\n".join([*lines, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description="How much of the verdict survives each normalisation.")
    parser.add_argument("--out", type=Path, default=RESULTS)
    out = parser.parse_args().out
    warnings.filterwarnings("ignore", message=".*not 1: the rewards", category=UserWarning)
    results = {name: [measure(right, name) for right in (1, 4, 8, 12, 15)] for name in ("all", "joint", "within")}
    out.mkdir(parents=True, exist_ok=True)
    (out / "normalizations.json").write_text(json.dumps(results, indent=1) + "\n")
    (out / "normalizations.md").write_text(report(results))
    print(report(results))


if __name__ == "__main__":
    main()
