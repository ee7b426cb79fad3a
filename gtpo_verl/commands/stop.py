"""``gtpo-verl stop``: lets a training, a sweep or a job finish its step and save a checkpoint."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from gtpo_verl.commands.options import declare
from gtpo_verl.errors import UserError
from gtpo_verl.runs.directory import RECORD_FILE, SWEEP_FILE
from gtpo_verl.runs.lock import GRACE, ask_to_stop

if TYPE_CHECKING:
    from gtpo_verl.experiments.jobs import JobInfo, Jobs


def add_arguments(parser: argparse.ArgumentParser) -> None:
    declare(parser, "what", ("--address", "of a job: the cluster's dashboard (default: as for gtpo-verl submit)"))
    text = "of a job: how long its step and checkpoint may take; 0: stop at once (default: %(default)g)"
    parser.add_argument("--grace", type=float, default=GRACE, metavar="SECONDS", help=text)


def run(args: argparse.Namespace) -> int:
    """Stop; returns the exit code. Raises UserError where nothing runs."""
    directory = Path(args.what)
    if (directory / SWEEP_FILE).is_file():
        from gtpo_verl.experiments import run as experiment

        return experiment.stop(directory)
    if is_job(args.what):
        from gtpo_verl.experiments.status import print_jobs

        jobs, _ = job_called(args.what, args.address)
        print(f"Stopping {args.what}: up to {args.grace:g} s for its step and checkpoint.", flush=True)
        jobs.stop(args.what, grace=args.grace)
        print_jobs([jobs.known(args.what)])
        return 0
    if not (directory / RECORD_FILE).is_file():
        raise UserError(f"{directory} is not the directory of a training or of a sweep.")
    if not ask_to_stop(directory):
        raise UserError(f"no training runs in {directory}; `gtpo-verl status {directory}` says how it ended.")
    print(f"Stopping {directory}: it finishes its step and saves a checkpoint; `gtpo-verl status` shows when.")
    return 0


def is_job(name: str) -> bool:
    """Whether a word means a job: it is no path, and nothing here is called so."""
    return not Path(name).exists() and len(Path(name).parts) == 1


def job_called(name: str, address: str | None) -> "tuple[Jobs, JobInfo]":
    """The jobs of a cluster, and the one of this name. Raises UserError: it does not answer, or has none."""
    from gtpo_verl.experiments.jobs import Jobs

    try:
        jobs = Jobs(address)
        return jobs, jobs.known(name)
    except UserError as error:
        raise UserError(f"{name} is no directory here, and as a job: {error}") from error
