"""``gtpo-verl status``: where a training, a sweep or a job is, what it does, and why one that ended did."""

import argparse
from pathlib import Path

from rich.console import Console
from rich.text import Text

from gtpo_verl.commands.options import declare
from gtpo_verl.commands.stop import is_job, job_called
from gtpo_verl.runs.directory import SWEEP_FILE
from gtpo_verl.runs.state import status_of

STYLES = {"running": "bold green", "complete": "bold green", "failed": "bold red"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    declare(parser, "what", ("--address", "of a job: the cluster's dashboard (default: as for gtpo-verl submit)"))


def run(args: argparse.Namespace) -> int:
    """Print the status; returns the exit code: 1 where the run, the job or a run of the sweep failed, else 0."""
    directory = Path(args.what)
    if (directory / SWEEP_FILE).is_file():
        from gtpo_verl.experiments import run as experiment

        return experiment.status(directory)
    if is_job(args.what):
        from gtpo_verl.experiments.status import print_jobs

        _, job = job_called(args.what, args.address)
        print_jobs([job])
        return int(job.status == "FAILED")
    status = status_of(directory)
    console = Console(soft_wrap=True, highlight=False)
    console.print(Text(f"{directory}: {status.state}", style=STYLES.get(status.state, "bold yellow")), Text(status.why))
    width = max(len(label) for label in status.lines)
    for label, text in status.lines.items():
        if text:
            console.print(Text(f"  {label:{width}}  {text}"))
    for warning in status.warnings:
        console.print(Text(f"  warning: {warning}", style="yellow"))
    return int(status.state == "failed")
