"""A long training whose processes are measured: does memory, or what else a process holds, grow with the steps?

    python benchmarks/soak.py --dir outputs/soak --steps 300 --output benchmarks/results/soak.json

The embedded task with dynamic sampling, saving every 10 steps and validating every 50. Every 10 seconds: resident
memory and file handles of each process, the objects in Ray's store, and the step. Prints the slope of each over the
last two thirds of the steps, per 100 steps, by least squares. Ctrl-C loses the measurement.
"""

import argparse
import contextlib
import json
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from breaking.lab import SHORT
from breaking.training import KINDS, Attempt, turn

from gtpo_verl.files import write_json
from gtpo_verl.tasks.prepare import prepare_task
from gtpo_verl.tasks.sums.task import TASK

EVERY = 10.0  # seconds
SKIPPED = 1 / 3  # of the steps: caches fill, allocators settle
OVERRIDES = (
    *("algorithm.filter_groups.enable=true", "algorithm.filter_groups.carry_over.max_age=2"),
    *("trainer.save_freq=10", "trainer.test_freq=50", "data.val_max_samples=64"),
    "actor_rollout_ref.actor.optim.lr=1.0e-5",  # at the quickstart's, 16 responses a step ruin the policy by step 189
)


def measure(attempt: Attempt) -> dict[str, float]:
    """What its processes hold now: {name: number}."""
    found: dict[str, float] = {}
    for kind in ("driver", *KINDS):
        for number, process in enumerate(attempt.of_kind(kind)):
            with contextlib.suppress(psutil.Error):
                found[f"{kind} {number}: MiB"] = process.memory_info().rss / 2**20
                found[f"{kind} {number}: file handles"] = process.num_fds()
    found["all processes: number"] = len(attempt.of_kind("whole cluster"))
    found |= dict(objects(attempt.ray_files))
    return found


def objects(ray_files: Path) -> Iterator[tuple[str, float]]:
    """Objects in Ray's store, from what its node daemon writes down every 10 seconds."""
    for file in ray_files.glob("ray/session_latest/logs/debug_state.txt"):
        for name in ("num local plasma objects", "num pinned objects"):
            match = re.search(rf"- {name}: (\d+)", file.read_text(errors="replace"))
            if match:
                yield f"Ray: {name.removeprefix('num ')}", float(match[1])


def slopes(samples: list[tuple[int, dict[str, float]]], steps: int) -> dict[str, dict[str, float]]:
    """Per name: first and last value, and the slope per 100 steps, without the first `SKIPPED` of the steps."""
    series: dict[str, list[tuple[int, float]]] = defaultdict(list)
    for step, values in samples:
        for name, value in values.items():
            if step >= SKIPPED * steps:
                series[name].append((step, value))
    return {
        name: {"first": points[0][1], "last": points[-1][1], "per_100_steps": 100 * float(np.polyfit(*xy, 1)[0])}
        for name, points in series.items()
        if len({step for step, _ in points}) > 2
        for xy in [np.array(points, dtype=float).T]
    }


def main() -> int:
    """Train, measure, print; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, default=Path("outputs/soak"))
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--limit", type=float, default=4 * 3600.0, metavar="SECONDS")
    parser.add_argument("--lock", type=Path, help="hold this file's lock while it trains")
    parser.add_argument("--output", type=Path, help="write the samples and the result as JSON")
    args = parser.parse_args()
    directory = args.dir.resolve()
    directory.mkdir(parents=True, exist_ok=True)
    task = prepare_task(TASK, directory / "task", progress=False)
    files = (
        f"actor_rollout_ref.model.path={task.model_path}",
        *(f"data.train_files={task.train_file}", f"data.val_files={task.val_file}"),
    )
    samples: list[tuple[int, dict[str, float]]] = []

    with turn(args.lock):
        attempt = Attempt(directory / "run", [*SHORT, *OVERRIDES, *files, f"trainer.total_training_steps={args.steps}"])
        try:
            while attempt.process.poll() is None and attempt.age < args.limit:
                attempt.wait(lambda one: False, EVERY)
                if attempt.phase is not None and attempt.phase.step:
                    samples.append((attempt.phase.step, measure(attempt)))
            ended = attempt.end(1.0)
        finally:
            attempt.kill()
    result: dict[str, Any] = {
        "steps": samples[-1][0] if samples else 0,
        "exit_code": ended.code,
        "samples": len(samples),
        "slopes": slopes(samples, args.steps),
    }
    json.dump(result, sys.stdout, indent=2)
    print()
    if args.output:
        write_json(args.output, result | {"measured": samples})
    return 0 if ended.code == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
