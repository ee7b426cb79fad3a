"""Time and memory of the advantages against verl's `grpo` estimator, at the size of the DAPO paper.

    python benchmarks/bench_advantages.py                 # 8,192 responses on the CPU, with two threads
    python benchmarks/bench_advantages.py --groups 32     # a sixteenth of the batch

512 shuffled groups of 16 responses of up to 20,480 tokens; float32 entropies with NaN in the padding, bool mask, checks
and metrics on. verl's estimator and ours take turns in one process, so that other load on the machine affects them
alike. Writes `advantages-cpu.json` and `.md` into benchmarks/results.
"""

import argparse
import json
import math
import os
import platform
import re
import resource
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage

from gtpo_verl.algorithms import GRPOSConfig, GTPOConfig, grpo_s_advantages, gtpo_advantages

RESULTS = Path(__file__).parent / "results"
GROUP_SIZE, MAX_LENGTH = 16, 20480
BATCH_SCOPES = {"scope": "batch", "norm_scope": "batch", "mean": "geometric", "normalization": "within"}


def steps_of(groups: int, log_length: float) -> tuple[int, dict[str, Callable[[], object]]]:
    """Valid tokens of a batch, and what is measured on it, by name. Lengths are log-normal around e^log_length."""
    draw = torch.Generator().manual_seed(0)
    rows = groups * GROUP_SIZE
    lengths = (log_length + 0.75 * torch.randn(rows, generator=draw)).exp().long().clamp(16, MAX_LENGTH)
    group = (torch.arange(rows) // GROUP_SIZE)[torch.randperm(rows, generator=draw)]
    correct = torch.rand(rows, generator=draw) < torch.rand(groups, generator=draw)[group]
    entropy = torch.full((rows, MAX_LENGTH), math.nan)
    mask = torch.zeros(rows, MAX_LENGTH, dtype=torch.bool)
    rewards = torch.zeros(rows, MAX_LENGTH)  # as in verl, at the last token
    for row, length in enumerate(lengths.tolist()):
        entropy[row, :length].exponential_(2.0, generator=draw)
        mask[row, :length] = True
        rewards[row, length - 1] = float(correct[row])
    index = np.array([f"prompt-{ident}" for ident in group.tolist()], dtype=object)
    batch = entropy, correct, mask, group
    return int(lengths.sum()), {
        "verl grpo": lambda: compute_grpo_outcome_advantage(rewards, mask, index),
        "GTPO": lambda: gtpo_advantages(*batch, GTPOConfig(), return_shaped=False),
        "GRPO-S": lambda: grpo_s_advantages(*batch, GRPOSConfig(), return_shaped=False),
        "GTPO, batch scopes, geometric, within": lambda: gtpo_advantages(
            *batch, GTPOConfig(**BATCH_SCOPES), return_shaped=False
        ),
    }


def measure(steps: dict[str, Callable[[], object]], runs: int) -> dict[str, dict[str, float]]:
    """Medians of seconds, and of seconds of CPU time, and the peak of memory beyond that before, in bytes."""
    taken: dict[str, list[tuple[float, float, float]]] = {name: [] for name in steps}
    for number in range(runs + 1):
        for name, step in steps.items():
            Path("/proc/self/clear_refs").write_text("5")  # the peak of the resident set starts anew
            before, cpu, start = resident("VmRSS"), cpu_seconds(), time.perf_counter()
            result = step()
            found = time.perf_counter() - start, cpu_seconds() - cpu, resident("VmHWM") - before
            del result
            if number:  # the first warms up
                taken[name].append(found)
    return {
        name: dict(
            zip(("seconds", "cpu_seconds", "bytes"), map(statistics.median, zip(*rows, strict=True)), strict=True)
        )
        for name, rows in taken.items()
    }


def cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def resident(field: str) -> int:
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return 1024 * int(found[1])


def machine(threads: int) -> str:
    cpu = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    return (
        f"{cpu[1] if cpu else platform.machine()}, {os.cpu_count()} cores, {threads} threads, torch "
        f"{torch.__version__}, load before {os.getloadavg()[0]:.1f}"
    )


def report(results: dict) -> str:
    lines = [
        "# Advantages on CPU, against verl's `grpo` estimator",
        "",
        f"benchmarks/bench_advantages.py, medians of {results['runs']} runs; {results['machine']}.",
    ]
    for batch in results["batches"]:
        theirs = batch["steps"]["verl grpo"]["seconds"]
        lines += [
            "",
            f"## {batch['responses']:,} responses, {batch['tokens'] / 1e6:.0f} million valid tokens",
            "",
            "| estimator | seconds | times verl's | CPU seconds | peak beyond the batch, MiB |",
            "|---|---|---|---|---|",
        ]
        for name, each in batch["steps"].items():
            lines.append(
                f"| {name} | {each['seconds']:.2f} | {each['seconds'] / theirs:.1f} | {each['cpu_seconds']:.2f} "
                f"| {each['bytes'] / 2**20:.0f} |"
            )
    return "\n".join([*lines, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=512)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    warnings.filterwarnings("ignore", message=".*not 1, as in", category=UserWarning)
    torch.set_num_threads(options.threads)
    results = {"machine": machine(options.threads), "runs": options.runs, "batches": []}
    for log_length in (8.45, 9.25):  # at 512 groups 49 and 92 million tokens
        tokens, steps = steps_of(options.groups, log_length)
        found = measure(steps, options.runs)
        results["batches"].append({"responses": options.groups * GROUP_SIZE, "tokens": tokens, "steps": found})
        del steps
    (options.out / "advantages-cpu.json").write_text(json.dumps(results, indent=1) + "\n")
    (options.out / "advantages-cpu.md").write_text(report(results))
    print(report(results))


if __name__ == "__main__":
    main()
