"""What is known of the runs of a sweep, from its directory alone; and a table of a cluster's jobs."""

import math
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from gtpo_verl.experiments.jobs import JobInfo
from gtpo_verl.experiments.scheduler import Attempts, read_attempts
from gtpo_verl.runs.lock import live_owner
from gtpo_verl.runs.state import RunState, duration, state_of
from gtpo_verl.runs.sweep import load
from gtpo_verl.runs.terminal import describe

STYLES = {"finished": "green", "running": "cyan", "failed": "bold red"}


@dataclass(frozen=True)
class RunStatus:
    """A run of a sweep; ``state`` is waiting, starting, running, stopping, stopped, failed or finished."""

    name: str
    state: str
    training: RunState


def statuses(directory: Path) -> list[RunStatus]:
    """The status of every run of the sweep in a directory. UserError: there is no sweep."""
    attempts, scheduled = read_attempts(directory), live_owner(directory) is not None
    found = []
    for name in load(directory).runs:
        training = state_of(directory / name)
        found.append(RunStatus(name, _state(training, attempts.get(name, Attempts()), scheduled), training))
    return found


def _state(training: RunState, attempts: Attempts, scheduled: bool) -> str:
    if training.is_alive:
        return training.status
    if training.is_complete:
        return "finished"
    if attempts.open:
        return "starting" if scheduled else "stopped"
    if attempts.failures:
        return "failed"
    return "stopped" if attempts.number else "waiting"


def summary(runs: Sequence[RunStatus]) -> str:
    """One line: how many runs are in which state."""
    count = Counter(run.state for run in runs)
    order = ("finished", "running", "starting", "stopping", "stopped", "failed", "waiting")
    return f"{len(runs)} runs: " + ", ".join(f"{count[state]} {state}" for state in order if count[state])


def progress_line(runs: Sequence[RunStatus], at_once: int) -> str:
    """One line: `summary`, where those are that run, and the time left for all."""
    left = seconds_left(runs, at_once)
    running = [(run.name, run.training) for run in runs if run.state == "running"]
    steps = [f"{name} {one.step}/{one.steps or '?'}: {describe(one.step, one.metrics)}" for name, one in running]
    return "; ".join([summary(runs), *steps, *([f"about {duration(left)} left"] if left else [])])


def seconds_left(runs: Sequence[RunStatus], at_once: int) -> float | None:
    """The time until all runs of a sweep have ended, ``at_once`` at a time; None where none has taken a step.

    Those to come are taken to last as long as the slowest of those that run or have finished.
    """
    known = [run for run in runs if run.training.seconds_left is not None]
    running, finished = ([run.training for run in known if run.state == state] for state in ("running", "finished"))
    if not running and not finished:
        return None
    to_come = sum(run.state not in ("finished", "failed") for run in runs) - len(running)
    whole = max(one.seconds + (one.seconds_left or 0.0) for one in (*running, *finished))
    return max((one.seconds_left or 0.0 for one in running), default=0.0) + math.ceil(to_come / at_once) * whole


def table(runs: Sequence[RunStatus], at_once: int | None = None) -> Table:
    """State, step, accuracy of the last validation, and time left of every run; of all too, where ``at_once`` run."""
    left = None if at_once is None else seconds_left(runs, at_once)
    caption = summary(runs) + (f"; about {duration(left)} left" if left else "")
    found = Table(box=None, pad_edge=False, caption=caption, caption_justify="left")
    for name in ("run", "state", "step", "accuracy", "left"):
        found.add_column(name, justify="right" if name in ("step", "accuracy", "left") else "left", overflow="fold")
    for run in runs:
        one = run.training
        step = f"{one.step}/{one.steps}" if one.steps is not None else ""
        shown = [f"{v:.3f}" if len(one.accuracy) == 1 else f"{source} {v:.3f}" for source, v in one.accuracy.items()]
        time = duration(one.seconds_left) if one.seconds_left and run.state == "running" else ""
        found.add_row(run.name, run.state, step, ", ".join(shown), time, style=STYLES.get(run.state))
    return found


def print_jobs(jobs: Sequence[JobInfo]) -> None:
    """Print a table of jobs, and why one failed."""
    table = Table(box=None, pad_edge=False)
    for column in ("job", "status", "started", "ended", "run directory"):
        table.add_column(column, overflow="fold")
    for job in jobs:
        moments = (f"{one:%Y-%m-%d %H:%M:%S}" if one else "" for one in (job.start, job.end))
        table.add_row(job.id, job.status, *moments, job.run_dir)
    console = Console(highlight=False, markup=False, soft_wrap=True, width=None if sys.stdout.isatty() else 200)
    console.print(table if jobs else "No training was submitted to this cluster.")
    for job in jobs:
        if job.status == "FAILED":
            console.print(f"{job.id}: {job.reason}")
