"""How far two trainings of one seed are the same: the embedded task twice, every step's batch compared bit for bit.

    python benchmarks/same_seed.py --steps 24 --dir /tmp/same_seed

The second has random delays in its verifier, so that responses end in another order. Both run at once, which disturbs
them further. Prints JSON: for every column of the batch the first step in which it differs (null: in none), the largest
difference of vLLM's log-probs before that, and accuracy and gradient norm of either at every step.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from gtpo_verl.runs.reader import read_metrics
from gtpo_verl.tasks.prepare import prepare_task
from gtpo_verl.tasks.sums.task import TASK

COLUMNS = ("response_mask", "responses", "old_log_probs", "entropy", "rewards", "correct", "advantages")
DELAYED = Path(__file__).parents[1] / "tests" / "e2e" / "delayed_reward.py"
SHOWN = ("training/accuracy", "actor/grad_norm")


def main() -> int:
    """Train, compare, print; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    task = prepare_task(TASK, args.dir / "task", progress=False)
    common = (
        *("algo=gtpo", "setting=quickstart", "hardware=cpu", "algorithm.entropy.source=actor", f"seed={args.seed}"),
        *(f"actor_rollout_ref.model.path={task.model_path}", f"data.train_files={task.train_file}"),
        *(f"data.val_files={task.val_file}", "trainer.val_before_train=False", "trainer.test_freq=-1"),
        *("trainer.save_freq=-1", "trainer.credit_dump_freq=1", f"trainer.total_training_steps={args.steps}"),
    )
    runs = {"first": (), "again": (f"reward.custom_reward_function.path={DELAYED}",)}
    training = [
        subprocess.Popen(
            [sys.executable, "-m", "gtpo_verl.train", *common, *own, f"trainer.run_dir={args.dir / name}"],
            stdout=sys.stderr,
        )
        for name, own in runs.items()
    ]
    codes = [process.wait() for process in training]
    if any(codes):
        return 1
    json.dump(compared(args.dir / "first", args.dir / "again", args.steps), sys.stdout, indent=2)
    print()
    return 0


def compared(first: Path, again: Path, steps: int) -> dict[str, Any]:
    """Where two runs part."""
    parted: dict[str, int | None] = dict.fromkeys(("keys", *COLUMNS))
    largest = 0.0
    for step in range(1, steps + 1):
        one, other = (torch.load(run_dir / "credit" / f"{step}.pt") for run_dir in (first, again))
        for column in parted:
            same = one[column] == other[column] if column == "keys" else torch.equal(one[column], other[column])
            if parted[column] is None and not same:
                parted[column] = step
        if not any(parted.values()):
            mask = one["response_mask"]
            difference = (one["rollout_log_probs"] - other["rollout_log_probs"])[mask].abs().max().item()
            largest = max(largest, difference)
    metrics = [read_metrics(run_dir / "metrics.jsonl")[0] for run_dir in (first, again)]
    return {
        "steps": steps,
        "first_step_that_differs": parted,
        "rollout_log_probs_largest_difference": largest,
        **{key: [[run[step].get(key) for step in range(1, steps + 1)] for run in metrics] for key in SHOWN},
    }


if __name__ == "__main__":
    sys.exit(main())
