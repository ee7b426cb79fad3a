"""What is known of the runs of a sweep, from its directory alone."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table

from gtpo_verl.experiments.scheduler import Attempts, is_finished, read_attempts
from gtpo_verl.experiments.sweep import load
from gtpo_verl.runs.directory import STOP_FILE
from gtpo_verl.runs.lock import LOCK_FILE, live_owner
from gtpo_verl.runs.pace import in_words
from gtpo_verl.runs.progress import Progress, progress_of

STYLES = {"finished": "green", "running": "cyan", "failed": "bold red"}


@dataclass(frozen=True)
class RunStatus:
    """A run of a sweep; ``state`` is waiting, starting, running, stopping, stopped, failed or finished."""

    name: str
    state: str
    attempts: Attempts
    progress: Progress


def statuses(directory: Path) -> list[RunStatus]:
    """The status of every run of the sweep in a directory.

    Raises:
        UserError: there is no sweep.
    """
    attempts = read_attempts(directory)
    found = []
    for member in load(directory).members:
        run_dir, state = directory / member.name, attempts.get(member.name, Attempts())
        found.append(RunStatus(member.name, _state(run_dir, state), state, progress_of(run_dir)))
    return found


def is_scheduled(directory: Path) -> bool:
    """Whether a sweep is at work in a directory."""
    return live_owner(directory / LOCK_FILE) is not None


def _state(run_dir: Path, attempts: Attempts) -> str:
    if live_owner(run_dir / LOCK_FILE) is not None:
        return "stopping" if (run_dir / STOP_FILE).exists() else "running"
    if is_finished(run_dir):
        return "finished"
    if attempts.open:
        return "starting" if is_scheduled(run_dir.parent) else "stopped"
    if attempts.failures:
        return "failed"
    return "stopped" if attempts.number else "waiting"


def summary(runs: Sequence[RunStatus]) -> str:
    """One line: how many runs are in which state."""
    count = Counter(run.state for run in runs)
    order = ("finished", "running", "starting", "stopping", "stopped", "failed", "waiting")
    return f"{len(runs)} runs: " + ", ".join(f"{count[state]} {state}" for state in order if count[state])


def running_line(runs: Sequence[RunStatus]) -> str:
    """One line: `summary`, and where those are that run."""
    found = [summary(runs)]
    for run in runs:
        if run.state == "running":
            step, _, left = _cells(run)
            found.append(f"{run.name} at step {step or 0}" + (f", {left} left" if left else ""))
    return "; ".join(found)


def table(runs: Sequence[RunStatus]) -> Table:
    """State, step, accuracy of the last validation, and time left of every run."""
    found = Table(box=None, pad_edge=False, caption=summary(runs), caption_justify="left")
    for name in ("run", "state", "step", "accuracy", "left"):
        found.add_column(name, justify="right" if name in ("step", "accuracy", "left") else "left", overflow="fold")
    for run in runs:
        found.add_row(run.name, run.state, *_cells(run), style=STYLES.get(run.state))
    return found


def _cells(run: RunStatus) -> tuple[str, str, str]:
    progress = run.progress
    step = f"{progress.step}/{progress.steps}" if progress.steps is not None else ""
    accuracy = progress.accuracy or {}
    shown = [f"{value:.3f}" if len(accuracy) == 1 else f"{source} {value:.3f}" for source, value in accuracy.items()]
    left = in_words(progress.seconds_left) if progress.seconds_left and run.state == "running" else ""
    return step, ", ".join(shown), left
