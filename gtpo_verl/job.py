"""``python -m gtpo_verl.job``: what a job of ``gtpo-verl submit`` runs on the cluster."""

import importlib.util
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
from gtpo_verl.runs.lock import ask_to_stop


def run() -> int:
    """Do what was handed over; returns the exit code."""
    task = handover.read()
    handover.export_environment()  # Ray calls it in workers, not here
    if task.action == "stop":
        return 0 if ask_to_stop(Path(task.run_dir)) else 1
    prove_cluster(task.plugin, Path(task.run_dir))
    options = ["--check"] if task.action == "check" else ["--wait"] if task.wait else []
    return main(["train", *options, *task.overrides])


if __name__ == "__main__":
    sys.exit(main_guard(run))
