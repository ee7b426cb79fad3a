"""A sweep that is killed: is every run finished in the end, none of them twice, and all of one configuration?

    python tests/support/interrupted_sweep.py --dir /tmp/killed --kills 2 -- algo=dapo,gtpo seed=1,2 --local
    python tests/support/interrupted_sweep.py --dir /shared/killed --kills 2 --stop-job -- ... --address http://HEAD:8265

The scheduler is killed by SIGKILL at random moments, and its command is repeated; with --stop-job a running job is
stopped by Ray, too, in its first step. The runs are shortened trainings of the embedded task (`SHORT`). Prints JSON;
the exit code is 1 where a run is missing, was trained again after it had finished, or differs in more than the axes.
"""

import argparse
import json
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from gtpo_verl.experiments.launchers import job_id
from gtpo_verl.experiments.scheduler import read_attempts
from gtpo_verl.experiments.status import statuses
from gtpo_verl.runs.directory import CONFIG_FILE, RECORD_FILE, SWEEP_FILE, flatten
from gtpo_verl.runs.state import state_of
from gtpo_verl.runs.sweep import load

SHORT = (
    *("setting=quickstart", "hardware=cpu", "trainer.total_training_steps=2", "trainer.save_freq=1"),
    *("trainer.test_freq=2", "trainer.val_before_train=false", "data.val_max_samples=64"),
    *("data.train_batch_size=4", "actor_rollout_ref.rollout.n=4", "actor_rollout_ref.actor.ppo_mini_batch_size=4"),
    *(
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=16",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=16",
    ),
    "algorithm.filter_groups.enable=false",
)
POLL = 0.5  # seconds


def main() -> int:
    """Kill, continue, check; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, required=True)
    parser.add_argument("--kills", type=int, default=2)
    parser.add_argument("--within", type=float, default=300.0, metavar="SECONDS", help="latest moment of a kill")
    parser.add_argument("--stop-job", action="store_true", help="also stop a running job by Ray")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("arguments", nargs="+", help="axes and options of `gtpo-verl sweep`")
    args = parser.parse_args()
    moments = random.Random(args.seed)
    command = [sys.executable, "-m", "gtpo_verl.cli", "sweep", "--output", str(args.dir), *args.arguments, *SHORT]
    began = time.monotonic()
    finished: dict[str, int] = {}
    killed = [_killed(command, args.dir, moments.uniform(5, args.within), finished) for _ in range(args.kills)]
    code = _followed(command, args.dir, finished, stop_job=args.stop_job)
    report = verdict(args.dir, finished) | {
        "exit_code": code,
        "killed_after_s": killed,
        "seconds": round(time.monotonic() - began),
    }
    json.dump(report, sys.stdout, indent=2)
    print()
    return 0 if code == 0 and not report["problems"] else 1


def _killed(command: list[str], directory: Path, after: float, finished: dict[str, int]) -> float:
    process = subprocess.Popen(command)
    deadline = time.monotonic() + after
    while process.poll() is None and time.monotonic() < deadline:
        note_finished(directory, finished)
        time.sleep(POLL)
    process.kill()
    process.wait()
    return round(after, 1)


def _followed(command: list[str], directory: Path, finished: dict[str, int], *, stop_job: bool) -> int:
    process = subprocess.Popen(command)
    while process.poll() is None:
        note_finished(directory, finished)
        if stop_job:
            stop_job = not _stop_a_job(command, directory)
        time.sleep(POLL)
    note_finished(directory, finished)
    return process.returncode


def _stop_a_job(command: list[str], directory: Path) -> bool:
    """Let Ray stop the job of a run in its first step, so that steps are left; False where there is none yet."""
    if not (directory / SWEEP_FILE).exists():
        return False
    running = [run for run in statuses(directory) if run.state == "running" and not run.training.step]
    if not running:
        return False
    address = command[command.index("--address") + 1]
    job = job_id(directory.resolve() / running[0].name, running[0].attempts.number)
    subprocess.run(["ray", "job", "stop", "--no-wait", "--address", address, job], check=True)
    return True


def note_finished(directory: Path, finished: dict[str, int]) -> None:
    """Remember when each run's record was last written, as soon as it says that the run is finished."""
    for run_dir in (file.parent for file in directory.glob(f"*/{RECORD_FILE}")):
        if run_dir.name not in finished and state_of(run_dir).is_complete:
            finished[run_dir.name] = (run_dir / RECORD_FILE).stat().st_mtime_ns


def verdict(directory: Path, finished: dict[str, int]) -> dict[str, Any]:
    """What became of every run, and what is wrong."""
    sweep = load(directory)
    problems, steps = [], {}
    configs = {}
    for name in sweep.runs:
        run_dir = sweep.run_dir(name)
        state = state_of(run_dir)
        if not state.is_complete:
            problems.append(f"{name} is not finished: {state.status}")
            continue
        if (run_dir / RECORD_FILE).stat().st_mtime_ns != finished.get(name):
            problems.append(f"{name} was run again after it had finished")
        configs[name] = _without_place(run_dir)
        steps[name] = state.step
    differing = {
        key
        for config in configs.values()
        for key in config
        if any(other.get(key) != config[key] for other in configs.values())
    }
    attempts = read_attempts(directory)
    return {
        "runs": len(sweep.runs),
        "finished": len(configs),
        "attempts": sum(state.number for state in attempts.values()),
        "failures": sum(state.failures for state in attempts.values()),
        "steps": sorted(set(steps.values())),
        "axes": sorted(sweep.axes),
        "keys_that_differ": sorted(differing),
        "problems": problems,
    }


def _without_place(run_dir: Path) -> dict[str, Any]:
    """The configuration that the run recorded, without its name and its directory."""
    import yaml

    config = dict(flatten(yaml.safe_load((run_dir / CONFIG_FILE).read_text())))
    return {key: value for key, value in config.items() if run_dir.name not in str(value)}


if __name__ == "__main__":
    sys.exit(main())
