"""``gtpo-verl stop``: lets a training, a sweep or a job finish its step and save a checkpoint."""

import argparse
from pathlib import Path

from gtpo_verl.commands.options import share
from gtpo_verl.errors import UserError
from gtpo_verl.runs.directory import RECORD_FILE, SWEEP_FILE
from gtpo_verl.runs.lock import GRACE, ask_to_stop


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments on ``parser``."""
    parser.add_argument("what", metavar="X", help="directory of a run or of a sweep, or a job of `gtpo-verl submit`")
    share(parser, {"--address": "of a job: the cluster's dashboard (default: as for gtpo-verl submit)"})
    add_grace(parser)


def add_grace(parser: argparse.ArgumentParser) -> None:
    """Declare ``--grace``."""
    parser.add_argument(
        "--grace",
        type=float,
        default=GRACE,
        metavar="SECONDS",
        help="of a job: how long its step and checkpoint may take; 0: stop at once (default: %(default)g)",
    )


def run(args: argparse.Namespace) -> int:
    """Stop; returns the exit code.

    Raises:
        UserError: nothing runs there.
    """
    directory = Path(args.what)
    if (directory / SWEEP_FILE).is_file():
        from gtpo_verl.experiments import run as experiment

        return experiment.stop(directory)
    if not is_job(args.what):
        if not (directory / RECORD_FILE).is_file():
            raise UserError(f"{directory} is not the directory of a training or of a sweep.")
        if not ask_to_stop(directory):
            raise UserError(f"no training runs in {directory}; `gtpo-verl status {directory}` says how it ended.")
        print(f"Stopping {directory}: it finishes its step and saves a checkpoint; `gtpo-verl status` shows when.")
        return 0
    return stop_job(args.what, args.address, args.grace)


def is_job(name: str) -> bool:
    """Whether a word means a job: it is no path, and nothing here is called so."""
    return not Path(name).exists() and len(Path(name).parts) == 1


def stop_job(name: str, address: str | None, grace: float) -> int:
    """Stop a job, wait for its end and show it; returns the exit code."""
    from gtpo_verl.experiments.jobs import Jobs
    from gtpo_verl.experiments.status import print_jobs

    jobs = Jobs(address)
    jobs.known(name)
    print(f"Stopping {name}: up to {grace:g} s for its step and checkpoint.", flush=True)
    jobs.stop(name, grace=grace)
    print_jobs([jobs.known(name)])
    return 0
