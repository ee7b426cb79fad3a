"""Trains the runs of a sweep, as many at once as fit, and goes on where it was interrupted.

Whether a run is finished is read from its own directory. `SWEEP/attempts.json` says which attempts were begun, and is
written before each: whenever this process is killed, the next one finds every attempt that may have been started.
"""

import errno
import shutil
import signal
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from gtpo_verl.errors import UserError
from gtpo_verl.experiments.jobs import PATIENCE
from gtpo_verl.experiments.launchers import Launcher
from gtpo_verl.files import read_json, reading, write_json
from gtpo_verl.runs.directory import STOP_FILE
from gtpo_verl.runs.lock import live_owner
from gtpo_verl.runs.session import handling_signals
from gtpo_verl.runs.state import state_of
from gtpo_verl.runs.sweep import Sweep

ATTEMPTS_FILE = "attempts.json"
POLL = 1.0  # seconds between two looks at the runs
FULL = (errno.ENOSPC, errno.EDQUOT)
LEAST_SPACE = 1024**3  # bytes free on the disk, under which the sweep stops while checkpoints can still be saved


@dataclass
class Attempts:
    """The attempts at a run."""

    number: int = 0  # that were begun
    open: bool = False  # whether the last may still run
    failures: int = 0  # in a row
    step: int = 0  # the last one that any attempt has logged
    reason: str = ""  # why the last one ended without finishing the run


def read_attempts(directory: Path) -> dict[str, Attempts]:
    """The attempts at every run that has had one."""
    with reading(directory / ATTEMPTS_FILE):
        found: Mapping[str, Any] = read_json(directory / ATTEMPTS_FILE) or {"runs": {}}
        return {name: Attempts(**values) for name, values in found["runs"].items()}


def cluster_of(directory: Path) -> str | None:
    """The dashboard of the cluster that the last attempts were submitted to; None where they were processes."""
    with reading(directory / ATTEMPTS_FILE):
        found: Mapping[str, Any] = read_json(directory / ATTEMPTS_FILE) or {}
        return found.get("cluster")


def unfinished(sweep: Sweep) -> list[str]:
    """The runs of a sweep that were not trained to their end, as their own records say."""
    return [name for name in sweep.runs if not state_of(sweep.run_dir(name)).is_complete]


@dataclass(eq=False, kw_only=True)
class Scheduler:
    """Starts runs, waits for them, and starts those again that failed."""

    sweep: Sweep = field(kw_only=False)  # its directory must hold this sweep, or nothing
    launcher: Launcher = field(kw_only=False)
    announce: Callable[[str], object]  # takes a line for every change
    show: Callable[[], object] = lambda: None  # called after every look at the runs
    ended: Callable[[str], object] = lambda name: None  # with a run whose attempt has ended; `attempts` says how
    least_space: int = LEAST_SPACE
    stops: int = 0  # 1 to stop what runs after its step instead of training, 2 at once

    def __post_init__(self) -> None:
        self.attempts = defaultdict(Attempts, read_attempts(self.sweep.directory))
        self._begun: set[str] = set()  # runs whose attempt the launcher knows
        self._announced_stop = 0  # as `stops`
        self._trouble: float | None = None  # since when the cluster or the disk does not answer

    def run(self) -> list[str]:
        """Train until every run is finished or has failed for good, or a stop was asked for; returns the unfinished.

        OSError, UserError: the disk is full, or the cluster does not answer; what runs was stopped first.
        """
        stop_file = self.sweep.directory / STOP_FILE
        for state in self.attempts.values():
            if state.failures > self.sweep.retries:  # the same command tries again
                state.failures = 0
        with handling_signals(self._signal):
            try:
                while True:
                    if stop_file.exists():
                        self.stops = max(self.stops, 1)
                    if not self._step():
                        break
                    time.sleep(POLL)
            except BaseException:
                self._stop_runs()
                raise
            finally:
                self.launcher.close()
        stop_file.unlink(missing_ok=True)
        return unfinished(self.sweep)

    def _step(self) -> bool:
        """Look at every run, start what fits; returns whether there is anything left to do."""
        try:
            if not self.stops:
                self._check_space()
            running, waiting = self._look()
            if self.stops:
                self._ask_to_stop(running)
                waiting = []
            else:
                self._fill(running, waiting)
            self._trouble = None
        except (UserError, OSError) as error:
            if isinstance(error, OSError) and error.errno in FULL:
                raise
            self._wait(error)
            return True
        self.show()
        return bool(running or waiting)

    def _look(self) -> tuple[list[str], list[str]]:
        """The runs that run, and those that wait for their turn; notes what has ended."""
        running, waiting = [], []
        for name in self.sweep.runs:
            attempts = self.attempts[name]
            if self._is_running(name):
                running.append(name)
                continue
            if attempts.open and name in self._begun:
                self._settle(name, attempts)
            if attempts.failures <= self.sweep.retries and not state_of(self.sweep.run_dir(name)).is_complete:
                waiting.append(name)
        waiting.sort(key=lambda name: not self.attempts[name].open)  # of a sweep that was killed: first
        return running, waiting

    def _is_running(self, name: str) -> bool:
        run_dir, attempts = self.sweep.run_dir(name), self.attempts[name]
        if attempts.open and self.launcher.is_running(run_dir, attempts.number):
            self._begun.add(name)
            return True
        return live_owner(run_dir) is not None

    def _settle(self, name: str, attempts: Attempts) -> None:
        """Note the end of an attempt."""
        run_dir = self.sweep.run_dir(name)
        training = state_of(run_dir)
        attempts.open = False
        self._begun.remove(name)
        if training.is_complete:
            attempts.reason = ""
            line = "finished"
        elif self.stops:
            attempts.failures, attempts.reason = 0, "stopped with the sweep"
            line = f"stopped at step {training.step}"
        else:
            attempts.failures = 0 if training.step > attempts.step else attempts.failures + 1
            attempts.reason = self.launcher.reason(run_dir, attempts.number)
            again = attempts.failures <= self.sweep.retries
            line = f"attempt {attempts.number} ended at step {training.step}: {attempts.reason} " + (
                "It is tried again." if again else f"That was the last attempt; see {run_dir}."
            )
        self.announce(f"{name}: {line}")
        attempts.step = max(attempts.step, training.step)
        self._save()
        self.ended(name)

    def _fill(self, running: list[str], waiting: list[str]) -> None:
        """Start waiting runs in the free places."""
        if self.launcher.cluster is None and not self._begun.issuperset(running):
            return  # runs of a sweep that was killed hold devices: they are stopping
        while waiting and len(running) < self.launcher.capacity:
            name = waiting.pop(0)
            self._start(name)
            running.append(name)

    def _start(self, name: str) -> None:
        attempts = self.attempts[name]
        if not attempts.open:
            attempts.open, attempts.number = True, attempts.number + 1
            self._save()
        started = self.launcher.start(self.sweep.run_dir(name), attempts.number, self.sweep.overrides(name))
        self._begun.add(name)
        if started:
            self.announce(f"{name}: started" + (f", attempt {attempts.number}" if attempts.number > 1 else ""))

    def _ask_to_stop(self, running: list[str]) -> None:
        if self.stops > 2:
            raise KeyboardInterrupt
        count = len(running)
        if count and self._announced_stop < self.stops:
            self._announced_stop = self.stops
            what = "1 run finishes its step and saves" if count == 1 else f"{count} runs finish their step and save"
            gently = f"Stopping: {what} a checkpoint. Ctrl-C again stops at once."
            self.announce(gently if self.stops == 1 else "Stopping at once, without a checkpoint.")
        for name in running:
            self.launcher.stop(self.sweep.run_dir(name), self.attempts[name].number, at_once=self.stops > 1)

    def _check_space(self) -> None:
        if shutil.disk_usage(self.sweep.directory).free < self.least_space:
            raise OSError(errno.ENOSPC, "little space left")

    def _wait(self, error: UserError | OSError) -> None:
        """A cluster or a shared file system may be away for a while, once something of this sweep has run."""
        now = time.monotonic()
        if self._trouble is None:
            self.announce(f"{error} Waiting for it.")
        self._trouble = self._trouble or now
        if not self._begun or self.stops or now - self._trouble > PATIENCE:
            raise error

    def _stop_runs(self) -> None:
        """Stop what runs, gracefully, within `PATIENCE`; nothing is recorded any more."""
        self.stops = max(self.stops, 1)
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline and self.stops < 3:
            try:
                running = [name for name in self.sweep.runs if name in self._begun and self._is_running(name)]
                self._ask_to_stop(running)
            except (UserError, OSError):  # the cluster or the disk that brought us here
                return
            if not running:
                return
            time.sleep(POLL)

    def _save(self) -> None:
        begun = {name: asdict(state) for name, state in self.attempts.items() if state.number}
        write_json(self.sweep.directory / ATTEMPTS_FILE, {"cluster": self.launcher.cluster, "runs": begun})

    def _signal(self, signum: int, frame: Any) -> None:
        """The first one stops the runs after their step, Ctrl-C after it at once: a closed terminal signals twice."""
        self.stops = self.stops + 1 if signum == signal.SIGINT else max(self.stops, 1)
