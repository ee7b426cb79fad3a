"""``gtpo-verl status``: where a training is, what it does, and why one that ended did."""

import argparse
from pathlib import Path

from rich.console import Console
from rich.text import Text

from gtpo_verl.runs.status import status_of

STYLES = {"running": "bold green", "complete": "bold green", "failed": "bold red"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments on ``parser``."""
    parser.add_argument("run", type=Path, metavar="RUN", help="a run's directory, also while it trains")


def run(args: argparse.Namespace) -> int:
    """Print the status; returns the exit code: 0, or 1 for a run that failed.

    Raises:
        UserError: the directory holds no training.
    """
    status = status_of(args.run)
    console = Console(soft_wrap=True, highlight=False)
    console.print(Text(f"{args.run}: {status.state}", style=STYLES.get(status.state, "bold yellow")), Text(status.why))
    width = max(len(label) for label in status.lines)
    for label, text in status.lines.items():
        if text:
            console.print(Text(f"  {label:{width}}  {text}"))
    for warning in status.warnings:
        console.print(Text(f"  warning: {warning}", style="yellow"))
    return int(status.state == "failed")
