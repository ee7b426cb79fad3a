"""``python -m gtpo_verl.job``: what a job of ``gtpo-verl submit`` runs on the cluster."""

import importlib.util
import os
import sys

# Before the imports, which another Python may not be able to make.
if sys.version_info[:2] not in ((3, 11), (3, 12)):
    sys.exit("error: the cluster has Python {}.{}: gtpo-verl needs 3.11 or 3.12.".format(*sys.version_info))
if importlib.util.find_spec("ray") is None:
    sys.exit(f"error: `python` on the head node is {sys.executable}, without Ray: start Ray in its own environment.")

from pathlib import Path

from gtpo_verl.cli import main
from gtpo_verl.errors import main_guard
from gtpo_verl.experiments import handover
from gtpo_verl.experiments.cluster import prove_cluster
from gtpo_verl.runs.directory import PHASE_FILE
from gtpo_verl.runs.lock import ask_to_stop
from gtpo_verl.runs.state import state_of

REFUSED_OR_FAILED = 2  # exit code of a command that ends with an error


def run() -> int:
    """Do what was handed over; returns the exit code."""
    task = handover.read()
    handover.export_environment()  # Ray calls it in workers, not here
    if task.action == "stop":
        return 0 if ask_to_stop(Path(task.run_dir)) else 1
    files = Path.cwd()
    prove_cluster(task.plugin, Path(task.run_dir))
    # Two nodes on one machine share Ray's directory, and the second has unpacked the job's files anew: the directory of
    # that name is another now, and this process would load libraries from one that is gone.
    os.chdir(files)
    if task.action == "check":
        return main(["train", "--check", *task.overrides])
    return train(task)


def train(task: handover.HandOver) -> int:
    """Train, and after a failure go on from the last checkpoint; returns the exit code of the last attempt.

    No more than ``task.retries`` attempts in a row bring no new step. A run that is refused before it starts, is
    stopped, or whose own process is killed is not tried again.
    """
    run_dir = Path(task.run_dir)
    options = ["--wait"] if task.wait else []
    reached, fruitless = state_of(run_dir).step, 0
    while True:
        began = _phase(run_dir)
        code = main(["train", *options, *task.overrides])
        if code != REFUSED_OR_FAILED or not task.retries or _phase(run_dir) == began:
            return code
        step = state_of(run_dir).step
        reached, fruitless = (step, 0) if step > reached else (reached, fruitless + 1)
        if fruitless > task.retries:
            print(f"Not tried again: {fruitless} attempts in a row have brought no step after {reached}.", flush=True)
            return code
        print(
            f"Trying again after step {reached}: {fruitless} of {task.retries} retries without a new step.", flush=True
        )
        options = ["--wait"]  # a node that was lost may come back


def _phase(run_dir: Path) -> int | None:
    """Changes when a training begins; None where there has been none."""
    file = run_dir / PHASE_FILE
    return file.stat().st_mtime_ns if file.exists() else None


if __name__ == "__main__":
    sys.exit(main_guard(run))
