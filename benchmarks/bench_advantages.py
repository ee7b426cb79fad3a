"""Time and memory of the advantages against verl's `grpo` estimator and a dense implementation, at the paper's size.

8,192 responses in 512 shuffled groups of 16, up to 20,480 tokens, about 50 million of them valid; float32 entropies
with NaN in the padding, bool mask, checks and metrics on. Runs alternate, so that other load on the machine affects all
sides.

    python benchmarks/bench_advantages.py                 # everything, on the CPU with two threads
    python benchmarks/bench_advantages.py --device cuda   # the same on a GPU
    python benchmarks/bench_advantages.py --scale 0.0625  # the same on a sixteenth of the batch
    python benchmarks/bench_advantages.py --parts main memory

Writes `advantages-DEVICE.json` and `.md` into benchmarks/results.
"""

import argparse
import itertools
import json
import math
import os
import platform
import re
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from dense import dense_grpo_s, dense_gtpo
from rich.progress import track

from gtpo_verl.algorithms import (
    GRPOSConfig,
    GTPOConfig,
    grpo_s_advantages,
    gtpo_advantages,
    length_penalty_for,
    response_lengths,
)

GROUPS, GROUP_SIZE, MAX_LENGTH = 512, 16, 20480
CACHE_LENGTH = 4096
GRID_SCALE = 1 / 16
RESULTS = Path(__file__).parent / "results"
PARTS = ["memory", "scaling", "combinations", "main", "options", "holes"]

# Goals: time as a multiple of verl's grpo estimator, memory as a multiple of the entropy tensor.
GOAL_GTPO, GOAL_GRPO_S, GOAL_OTHER = 1.3, 1.0, 3.0
GOAL_MEMORY, GOAL_MEMORY_SHAPED = 1.25, 2.25

# Defaults first; every other value is measured alone at the full size, and all combinations at a sixteenth of it.
SHARED_OPTIONS: dict[str, tuple[Any, ...]] = {
    "negatives": ("based_inverse", "inverse", "zero"),
    "mean": ("arithmetic", "geometric"),
    "scope": ("group", "batch"),
    "norm_scope": ("group", "batch"),
    "normalization": ("all", "joint", "within", "none"),
    "degenerate": ("zero", "shape"),
    "length_penalty": ("none", "soft", "grop"),
    "preserve_sign": (False, True),
    "entropy_clip": (None, (0.2, 0.28)),
}
GTPO_OPTIONS = SHARED_OPTIONS | {"axis": ("position", "response", "matrix"), "clip_kappa": (None, 2.0)}
GRPO_S_OPTIONS = SHARED_OPTIONS | {"entropy_mean": ("arithmetic", "geometric")}
CHEAP = (
    "length_penalty",
    "preserve_sign",
    "entropy_clip",
    "clip_kappa",
)  # in the grid all at their default or all at their last

Step = Callable[[], Any]


@dataclass
class Batch:
    """Inputs of all estimators. As in verl, `rewards` (B, T) has the verdict at the last token; `index` names
    groups.
    """

    entropy: torch.Tensor
    correct: torch.Tensor
    mask: torch.Tensor
    group: torch.Tensor
    rewards: torch.Tensor
    index: np.ndarray

    @property
    def tokens(self) -> int:
        return int(response_lengths(self.mask).sum())


def make_batch(scale: float, device: str) -> Batch:
    """A fraction `scale` of the batch: log-normal lengths, exponential entropies, a share of correct ones per group."""
    generator = torch.Generator().manual_seed(0)
    groups = max(1, round(GROUPS * scale))
    rows = groups * GROUP_SIZE
    lengths = (8.45 + 0.75 * torch.randn(rows, generator=generator)).exp().long().clamp(16, MAX_LENGTH)
    group = (torch.arange(rows) // GROUP_SIZE)[torch.randperm(rows, generator=generator)]
    correct = torch.rand(rows, generator=generator) < torch.rand(groups, generator=generator)[group]
    entropy = torch.full((rows, MAX_LENGTH), math.nan)
    mask = torch.zeros(rows, MAX_LENGTH, dtype=torch.bool)
    rewards = torch.zeros(rows, MAX_LENGTH)
    for row, length in enumerate(lengths.tolist()):
        entropy[row, :length].exponential_(2.0, generator=generator)
        mask[row, :length] = True
        rewards[row, length - 1] = float(correct[row])
    index = np.array([f"prompt-{ident}" for ident in group.tolist()], dtype=object)
    return Batch(entropy.to(device), correct.to(device), mask.to(device), group.to(device), rewards.to(device), index)


def punch_holes(batch: Batch) -> None:
    """Remove three spans from the mask of every response, as for tool outputs, each up to a tenth of the response."""
    generator = torch.Generator().manual_seed(1)
    lengths = response_lengths(batch.mask)
    starts = torch.rand(len(lengths), 3, generator=generator)
    for row, (length, shares) in enumerate(zip(lengths.tolist(), starts.tolist(), strict=True)):
        for start in (int(share * length) for share in shares):
            batch.mask[row, start : min(start + length // 10, length - 1)] = False


def verl_step(batch: Batch) -> Step:
    from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage

    return lambda: compute_grpo_outcome_advantage(batch.rewards, batch.mask, batch.index)


def step(batch: Batch, config: GTPOConfig | GRPOSConfig, return_shaped: bool = False) -> Step:
    """This package on a batch, including the length penalty of the config."""
    function: Callable[..., Any] = gtpo_advantages if isinstance(config, GTPOConfig) else grpo_s_advantages

    def run() -> Any:
        penalty = None
        if config.length_penalty != "none":
            penalty = length_penalty_for(config, response_lengths(batch.mask), batch.correct, batch.group)
        return function(
            batch.entropy,
            batch.correct,
            batch.mask,
            batch.group,
            config,
            length_penalty=penalty,
            return_shaped=return_shaped,
        )

    return run


def dense_step(batch: Batch, config: GTPOConfig | GRPOSConfig) -> Step:
    function: Callable[..., Any] = dense_gtpo if isinstance(config, GTPOConfig) else dense_grpo_s
    return lambda: function(batch.entropy, batch.correct, batch.mask, batch.group, config)


def alternate(steps: dict[str, Step], runs: int, device: str) -> dict[str, list[float]]:
    """Seconds of each step: all steps in turn, `runs` times, after one warm-up run."""
    synchronize = torch.cuda.synchronize if device == "cuda" else nullcontext
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(runs + 1):
        for name, work in steps.items():
            synchronize()
            start = time.perf_counter()
            result = work()
            synchronize()
            if number:
                seconds[name].append(time.perf_counter() - start)
            del result
    return seconds


def ratio(seconds: dict[str, list[float]], name: str) -> float:
    """Median time over verl's median time."""
    return statistics.median(seconds[name]) / statistics.median(seconds["verl grpo"])


def varied(options: dict[str, tuple[Any, ...]]) -> Iterable[dict[str, Any]]:
    """Each non-default value by itself."""
    for name, (_, *others) in options.items():
        for value in others:
            yield {name: value}


def combined(options: dict[str, tuple[Any, ...]]) -> Iterable[dict[str, Any]]:
    """All combinations; the cheap options are all at their default or all at their last value."""
    names = [name for name in options if name not in CHEAP]
    for values in itertools.product(*(options[name] for name in names)):
        for position in (0, -1):
            cheap = {name: options[name][position] for name in options if name in CHEAP}
            yield dict(zip(names, values, strict=True)) | cheap


def config_of(kind: str, settings: dict[str, Any]) -> GTPOConfig | GRPOSConfig:
    lengths = {"max_length": MAX_LENGTH, "cache_length": CACHE_LENGTH}
    return GTPOConfig(**lengths, **settings) if kind == "GTPO" else GRPOSConfig(**lengths, **settings)


def label(kind: str, settings: dict[str, Any]) -> str:
    return f"{kind} " + (", ".join(f"{name}={value}" for name, value in settings.items()) or "defaults")


def measure_main(batch: Batch, runs: int, device: str) -> dict[str, Any]:
    steps = {"verl grpo": verl_step(batch)}
    steps |= {kind: step(batch, config_of(kind, {})) for kind in ("GTPO", "GRPO-S")}
    seconds = alternate(steps, runs, device)
    return {
        name: {"seconds": times, "median": statistics.median(times), "ratio": ratio(seconds, name)}
        for name, times in seconds.items()
    }


def measure_options(batch: Batch, runs: int, device: str) -> dict[str, float]:
    """Ratio of each option by itself, at the size of the batch."""
    found = {}
    for kind, options in (("GTPO", GTPO_OPTIONS), ("GRPO-S", GRPO_S_OPTIONS)):
        steps = {label(kind, settings): step(batch, config_of(kind, settings)) for settings in varied(options)}
        seconds = alternate({"verl grpo": verl_step(batch)} | steps, runs, device)
        found |= {name: ratio(seconds, name) for name in steps}
    return found


def measure_grid(batch: Batch, device: str) -> dict[str, float]:
    """Ratio of every combination, the fastest of three runs: a median of so few would pick up noise of the machine."""
    every = [
        (label(kind, settings), step(batch, config_of(kind, settings)))
        for kind, options in (("GTPO", GTPO_OPTIONS), ("GRPO-S", GRPO_S_OPTIONS))
        for settings in combined(options)
    ]
    blocks = [
        dict(every[start : start + 8]) for start in range(0, len(every), 8)
    ]  # verl's estimator takes its turn in each
    found = {}
    for block in track(blocks, description="combinations"):
        seconds = alternate({"verl grpo": verl_step(batch)} | block, 3, device)
        found |= {name: min(seconds[name]) / min(seconds["verl grpo"]) for name in block}
    return found


def confirm(batch: Batch, grid: dict[str, float], count: int, runs: int, device: str) -> dict[str, float]:
    """The `count` slowest combinations of the grid again, at full size and with as many runs as the others."""
    every = {
        label(kind, settings): (kind, settings)
        for kind, options in (("GTPO", GTPO_OPTIONS), ("GRPO-S", GRPO_S_OPTIONS))
        for settings in combined(options)
    }
    found = {}
    for name in sorted(grid, key=grid.__getitem__, reverse=True)[:count]:
        kind, settings = every[name]
        steps = {"verl grpo": verl_step(batch), name: step(batch, config_of(kind, settings))}
        found[name] = ratio(alternate(steps, runs, device), name)
    return found


def measure_scaling(scale: float, device: str) -> list[dict[str, Any]]:
    rows = []
    for part in (1 / 16, 1 / 4, 1):
        batch = make_batch(scale * part, device)
        steps = {"verl grpo": verl_step(batch)}
        for kind in ("GTPO", "GRPO-S"):
            steps[kind] = step(batch, config_of(kind, {}))
        seconds = alternate(steps, 5, device)
        # The dense implementation takes long enough for one run to say what there is to say.
        for kind in ("GTPO", "GRPO-S"):
            start = time.perf_counter()
            dense_step(batch, config_of(kind, {}))()
            if device == "cuda":
                torch.cuda.synchronize()
            seconds[f"dense {kind}"] = [time.perf_counter() - start]
        medians = {name: statistics.median(times) for name, times in seconds.items()}
        rows.append({"scale": scale * part, "tokens": batch.tokens, "seconds": medians})
        del batch, steps
    return rows


MEMORY_CASES: dict[str, Callable[[Batch], Step]] = {
    "verl grpo": verl_step,
    "GTPO": lambda batch: step(batch, config_of("GTPO", {})),
    "GTPO with shaped rewards": lambda batch: step(batch, config_of("GTPO", {}), return_shaped=True),
    "GTPO, batch scopes, within, geometric": lambda batch: step(
        batch,
        config_of("GTPO", {"scope": "batch", "norm_scope": "batch", "normalization": "within", "mean": "geometric"}),
    ),
    "GRPO-S": lambda batch: step(batch, config_of("GRPO-S", {})),
    "GTPO through verl's registry, int64 mask": lambda batch: adapter_step(batch, "gtpo"),
    "GRPO-S through verl's registry, int64 mask": lambda batch: adapter_step(batch, "grpo_s"),
    "dense GTPO": lambda batch: dense_step(batch, config_of("GTPO", {})),
}


def adapter_step(batch: Batch, name: str) -> Step:
    """The estimator as the trainer calls it, with verl's mask type."""
    from omegaconf import OmegaConf
    from verl.trainer.ppo.core_algos import get_adv_estimator_fn

    import gtpo_verl.integrations.estimators as estimators
    from gtpo_verl.integrations.context import CreditContext, credit_context

    estimators.register()
    estimate = get_adv_estimator_fn(name)
    batch.mask = batch.mask.long()
    lengths = {"max_length": MAX_LENGTH, "cache_length": CACHE_LENGTH}
    config = OmegaConf.create({"adv_estimator": name, "gtpo": {}, "grpo_s": {}})

    def run() -> Any:
        with credit_context(CreditContext(batch.correct, batch.entropy, lengths)):
            return estimate(
                token_level_rewards=batch.rewards, response_mask=batch.mask, config=config, index=batch.index
            )

    return run


def memory_of(case: str, scale: float, device: str) -> dict[str, float]:
    """Peak memory of one call above that before it, in multiples of the entropy tensor; run in its own process."""
    warm = MEMORY_CASES[case](make_batch(1 / GROUPS, device))
    warm()  # loads code and thread pools, which do not count
    batch = make_batch(scale, device)
    work = MEMORY_CASES[case](batch)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        result = work()
        peak = torch.cuda.max_memory_allocated()
    else:
        Path("/proc/self/clear_refs").write_text("5")  # the peak of the resident set starts anew
        before = resident("VmRSS")
        result = work()
        peak = resident("VmHWM")
    del result
    return {"extra_bytes": peak - before, "multiple": (peak - before) / (batch.entropy.numel() * 4)}


def resident(field: str) -> int:
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return 1024 * int(found[1])


def measure_memory(scale: float, device: str, threads: int) -> dict[str, dict[str, float]]:
    found = {}
    for case in MEMORY_CASES:
        command = [sys.executable, __file__, "--memory-case", case, "--scale", str(scale), "--device", device]
        done = subprocess.run([*command, "--threads", str(threads)], capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"memory case {case!r} failed:\n{done.stderr}")
        found[case] = json.loads(done.stdout.splitlines()[-1])
    return found


def machine(device: str, threads: int) -> dict[str, str]:
    import verl

    cpu = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    memory = re.search(r"MemTotal:\s+(\d+) kB", Path("/proc/meminfo").read_text())
    return {
        "device": torch.cuda.get_device_name() if device == "cuda" else "CPU",
        "CPU": f"{cpu[1] if cpu else platform.machine()}, {os.cpu_count()} cores, {threads} threads used",
        "memory": f"{int(memory[1]) / 2**20:.0f} GiB" if memory else "unknown",
        "software": f"Python {platform.python_version()}, torch {torch.__version__}, verl {verl.__version__}",
        "load before": f"{os.getloadavg()[0]:.1f}",
    }


def report(results: dict[str, Any]) -> str:
    lines = [
        f"# Advantages on {results['machine']['device']}",
        "",
        f"{results['responses']:,} responses, {results['tokens'] / 1e6:.1f} million valid tokens; from `make bench`.",
        "",
        *(f"- {name}: {value}" for name, value in results["machine"].items()),
    ]
    if "main" in results:
        goals = {"GTPO": f"≤ {GOAL_GTPO}", "GRPO-S": f"≤ {GOAL_GRPO_S}"}
        lines += heading(
            f"Time against verl's `grpo` estimator (median of {results['runs']} alternating runs)",
            ["estimator", "median s", "times verl", "goal"],
        )
        lines += [
            f"| {name} | {row['median']:.3f} | {row['ratio']:.2f} | {goals.get(name, '')} |"
            for name, row in results["main"].items()
        ]
    if "holes" in results:
        lines += heading(
            "The same with three holes in every mask, as tool calls make them", ["estimator", "times verl"]
        )
        lines += [f"| {name} | {row['ratio']:.2f} |" for name, row in results["holes"].items()]
    if "options" in results:
        lines += heading(f"Every option alone (goal ≤ {GOAL_OTHER})", ["option", "times verl"])
        lines += [f"| {name} | {value:.2f} |" for name, value in results["options"].items()]
    if "combinations" in results:
        grid = sorted(results["combinations"].values())
        high = grid[int(0.99 * (len(grid) - 1))]
        lines += heading(
            f"{len(grid):,} combinations (goal ≤ {GOAL_OTHER}), the cheap options ({', '.join(CHEAP)}) all on or all "
            "off; the slowest again at full size",
            ["combination", "times verl"],
        )
        lines += [f"| {name} | {value:.2f} |" for name, value in results["slowest combinations"].items()]
        lines += [
            "",
            f"At {results['grid_scale']:g} of the size, fastest of three runs; all of them are in the JSON file:",
            f"median {statistics.median(grid):.2f}, 99th percentile {high:.2f}, highest {grid[-1]:.2f} times verl.",
        ]
    if "scaling" in results:
        names = list(results["scaling"][0]["seconds"])
        lines += heading("Linear in valid tokens: seconds (and nanoseconds a valid token)", ["million tokens", *names])
        for row in results["scaling"]:
            times = [f"{row['seconds'][name]:.3f} ({1e9 * row['seconds'][name] / row['tokens']:.0f})" for name in names]
            lines.append(f"| {row['tokens'] / 1e6:.1f} | " + " | ".join(times) + " |")
    if "memory" in results:
        lines += heading(
            f"Peak extra memory (goal ≤ {GOAL_MEMORY} times the entropy tensor, ≤ {GOAL_MEMORY_SHAPED} with shaped "
            "rewards)",
            ["call", "MiB", "times the entropy tensor"],
        )
        lines += [
            f"| {name} | {row['extra_bytes'] / 2**20:.0f} | {row['multiple']:.2f} |"
            for name, row in results["memory"].items()
        ]
    return "\n".join([*lines, ""])


def heading(title: str, columns: list[str]) -> list[str]:
    return ["", f"## {title}", "", "| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]


def main() -> None:
    parser = argparse.ArgumentParser(description="Time and memory of the advantages against verl's grpo estimator.")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--scale", type=float, default=1.0, help="share of the 512 groups")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--runs", type=int, default=7, help="alternating runs of a comparison")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="what to measure")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--memory-case", choices=list(MEMORY_CASES), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore", message=".*not 1: the rewards", category=UserWarning)
    torch.set_num_threads(arguments.threads)
    device, scale, runs, parts = arguments.device, arguments.scale, arguments.runs, arguments.parts
    if arguments.memory_case:
        print(json.dumps(memory_of(arguments.memory_case, scale, device)))
        return
    arguments.out.mkdir(parents=True, exist_ok=True)
    target = arguments.out / f"advantages-{device}"
    file = target.with_suffix(".json")
    results: dict[str, Any] = {"machine": machine(device, arguments.threads), "runs": runs, "scale": scale}
    if file.exists() and set(parts) != set(PARTS):  # the parts that are not measured now stay, if they are of this size
        before = json.loads(file.read_text())
        results = before | results if (before["scale"], before["runs"]) == (scale, runs) else results

    def keep(**found: Any) -> None:
        results.update(found)
        file.write_text(json.dumps(results, indent=1) + "\n")

    if "memory" in parts:
        keep(memory=measure_memory(scale, device, arguments.threads))
    if "scaling" in parts:
        keep(scaling=measure_scaling(scale, device))
    batch = make_batch(scale, device)
    keep(responses=len(batch.group), tokens=batch.tokens)
    if "main" in parts:
        keep(main=measure_main(batch, runs, device))
    if "options" in parts:
        keep(options=measure_options(batch, runs, device))
    if "combinations" in parts:
        grid = measure_grid(make_batch(scale * GRID_SCALE, device), device)
        slowest = confirm(batch, grid, 5, runs, device)
        keep(grid_scale=scale * GRID_SCALE, combinations=grid, **{"slowest combinations": slowest})
    if "holes" in parts:
        punch_holes(batch)  # last: it changes the batch
        keep(holes=measure_main(batch, runs, device))
    target.with_suffix(".md").write_text(report(results))
    print(report(results))


if __name__ == "__main__":
    main()
