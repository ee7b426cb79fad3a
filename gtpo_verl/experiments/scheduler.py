"""Trains the runs of a sweep, as many at once as fit, and goes on where it was interrupted.

Whether a run is finished is read from its own directory. `SWEEP/attempts.json` says which attempts were begun, and is
written before each: whenever this process is killed, the next one finds every attempt that may have been started.
"""

import errno
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gtpo_verl.errors import UserError
from gtpo_verl.experiments.launchers import Launcher
from gtpo_verl.experiments.sweep import Member, Sweep
from gtpo_verl.files import read_json, reading, write_json
from gtpo_verl.runs.directory import STOP_FILE, read_record
from gtpo_verl.runs.lock import LOCK_FILE, DirectoryLock, LockedError, live_owner
from gtpo_verl.runs.process import STOP_SIGNALS
from gtpo_verl.runs.progress import last_step

ATTEMPTS_FILE = "attempts.json"
POLL = 1.0  # seconds between two looks at the runs
PATIENCE = 600.0  # seconds that a cluster may be unreachable, and that runs may take to stop after an error
LEAST_SPACE = 1024**3  # bytes free on the disk, under which the sweep stops while checkpoints can still be saved


@dataclass
class Attempts:
    """The attempts at a run: how many were begun, whether the last may still run, and how many failed in a row.

    step: the last training step that any attempt has logged.
    reason: why the last one ended without finishing the run.
    """

    number: int = 0
    open: bool = False
    failures: int = 0
    step: int = 0
    reason: str = ""


def read_attempts(directory: Path) -> dict[str, Attempts]:
    """The attempts at every run that has had one."""
    file = directory / ATTEMPTS_FILE
    with reading(file):
        found: Mapping[str, Any] = read_json(file) or {"runs": {}}
        return {name: Attempts(**values) for name, values in found["runs"].items()}


def cluster_of(directory: Path) -> str | None:
    """The dashboard of the cluster that the last attempts were submitted to; None where they were processes."""
    file = directory / ATTEMPTS_FILE
    with reading(file):
        found: Mapping[str, Any] = read_json(file) or {}
        return found.get("cluster")


def is_finished(run_dir: Path) -> bool:
    """Whether a run's own record says that it was trained to its end."""
    record = read_record(run_dir)
    return record is not None and record.get("status") == "complete"


@contextmanager
def sweep_lock(directory: Path) -> Iterator[None]:
    """Be the only process that schedules the runs in a directory.

    Raises:
        UserError: another one does.
    """
    lock = DirectoryLock(directory / LOCK_FILE)
    try:
        lock.acquire()
    except LockedError as error:
        raise UserError(
            f"another process trains the runs in {directory}: {error}. Ctrl-C there stops it, or "
            f"`touch {directory / STOP_FILE}` from elsewhere."
        ) from error
    try:
        yield
    finally:
        lock.release()


class Scheduler:
    """Starts runs, waits for them, and starts those again that failed.

    Args:
        sweep: its directory must hold this sweep, or nothing.
        launcher: starts and stops the runs.
        announce: takes a line for every change.
        show: called after every look at the runs.
        least_space: see `LEAST_SPACE`.
        stops: 1 to stop what runs instead of training.
    """

    def __init__(
        self,
        sweep: Sweep,
        launcher: Launcher,
        *,
        announce: Callable[[str], object],
        show: Callable[[], object] = lambda: None,
        least_space: int = LEAST_SPACE,
        stops: int = 0,
    ) -> None:
        self.sweep = sweep
        self.launcher = launcher
        self.announce = announce
        self.show = show
        self.least_space = least_space
        self.stops = stops  # asked to stop: 1 after the step, 2 at once
        self.attempts = read_attempts(sweep.directory)
        self._begun: dict[str, int] = {}  # runs whose attempt the launcher knows, and their last step before it
        self._announced_stop = 0  # as `stops`
        self._trouble: float | None = None  # since when the cluster does not answer

    def run(self) -> list[str]:
        """Train until every run is finished or has failed for good, or a stop was asked for.

        Returns:
            The names of the runs that are not finished.

        Raises:
            OSError, UserError: the disk is full, or the cluster does not answer; what runs was stopped first.
        """
        stop_file = self.sweep.directory / STOP_FILE
        stop_file.unlink(missing_ok=True)
        for state in self.attempts.values():
            if state.failures > self.sweep.retries:  # the same command tries again
                state.failures = 0
        with self._signals():
            try:
                while self._step():
                    if stop_file.exists():
                        self.stops = max(self.stops, 1)
                    time.sleep(POLL)
            except BaseException:
                self._stop_runs()
                raise
            finally:
                self.launcher.close()
        stop_file.unlink(missing_ok=True)
        return [member.name for member in self.sweep.members if not is_finished(self.sweep.run_dir(member.name))]

    # ---------------------------------------------------------------- one look at the runs

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
        except UserError as error:
            self._bear(error)
            return True
        self.show()
        return bool(running or waiting)

    def _look(self) -> tuple[list[Member], list[Member]]:
        """The runs that run, and those that wait for their turn; notes what has ended."""
        running, waiting = [], []
        for member in self.sweep.members:
            state = self._state(member)
            if self._is_running(member, state):
                running.append(member)
                continue
            if state.open and member.name in self._begun:
                self._settle(member, state)
            if not is_finished(self.sweep.run_dir(member.name)) and state.failures <= self.sweep.retries:
                waiting.append(member)
        waiting.sort(key=lambda member: not self._state(member).open)  # of a sweep that was killed: first
        return running, waiting

    def _is_running(self, member: Member, state: Attempts) -> bool:
        run_dir = self.sweep.run_dir(member.name)
        if state.open and self.launcher.is_running(run_dir, state.number):
            self._begun.setdefault(member.name, state.step)
            return True
        return live_owner(run_dir / LOCK_FILE) is not None

    def _settle(self, member: Member, state: Attempts) -> None:
        """Note the end of an attempt."""
        run_dir = self.sweep.run_dir(member.name)
        state.open = False
        del self._begun[member.name]
        step = last_step(run_dir)
        if is_finished(run_dir):
            state.reason = ""
            self.announce(f"{member.name}: finished")
        elif self.stops:
            state.reason = "stopped with the sweep"
            self.announce(f"{member.name}: stopped at step {step}")
        else:
            state.failures = 0 if step > state.step else state.failures + 1
            state.reason = self.launcher.reason(run_dir, state.number).removeprefix("error: ")
            again = state.failures <= self.sweep.retries
            self.announce(
                f"{member.name}: attempt {state.number} ended at step {step}: {state.reason} "
                + ("It is tried again." if again else f"That was the last attempt; see {run_dir}.")
            )
        state.step = max(state.step, step)
        self._save()

    def _fill(self, running: list[Member], waiting: list[Member]) -> None:
        """Start waiting runs in the free places."""
        if any(member.name not in self._begun for member in running) and self.launcher.cluster is None:
            return  # runs of a sweep that was killed hold devices: they are stopping
        while waiting and len(running) < self.launcher.capacity:
            self._start(waiting.pop(0), running)

    def _start(self, member: Member, running: list[Member]) -> None:
        state, run_dir, overrides = self._state(member), self.sweep.run_dir(member.name), self.sweep.overrides(member)
        if not state.open:
            state.open, state.number = True, state.number + 1
            self._save()
        step = last_step(run_dir)
        started = self.launcher.start(run_dir, state.number, overrides)
        self._begun[member.name] = step
        running.append(member)
        if started:
            again = f", attempt {state.number}" if state.number > 1 else ""
            self.announce(f"{member.name}: started{again}")

    def _ask_to_stop(self, running: list[Member]) -> None:
        if self.stops > 2:
            raise KeyboardInterrupt
        count = len(running)
        if count and self._announced_stop < self.stops:
            self._announced_stop = self.stops
            what = "1 run finishes its step and saves" if count == 1 else f"{count} runs finish their step and save"
            gently = f"Stopping: {what} a checkpoint. Ctrl-C again stops at once."
            self.announce(gently if self.stops == 1 else "Stopping at once, without a checkpoint.")
        for member in running:
            self.launcher.stop(self.sweep.run_dir(member.name), self._state(member).number, at_once=self.stops > 1)

    # ---------------------------------------------------------------- what goes wrong

    def _check_space(self) -> None:
        if shutil.disk_usage(self.sweep.directory).free < self.least_space:
            raise OSError(errno.ENOSPC, "little space left")

    def _bear(self, error: UserError) -> None:
        """A cluster may be away for a while, once it has run something of this sweep."""
        now = time.monotonic()
        if self._trouble is None:
            self.announce(f"{error} Waiting for it.")
        self._trouble = self._trouble or now
        if not self._begun or self.stops or now - self._trouble > PATIENCE:
            raise error

    def _stop_runs(self) -> None:
        """Stop what runs, gracefully; nothing is recorded any more."""
        self.stops = max(self.stops, 1)
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline and self.stops < 3:
            members = [member for member in self.sweep.members if member.name in self._begun]
            try:
                running = [member for member in members if self._is_running(member, self._state(member))]
                self._ask_to_stop(running)
            except (UserError, OSError):  # the cluster or the disk that brought us here
                return
            if not running:
                return
            time.sleep(POLL)

    # ---------------------------------------------------------------- state

    def _state(self, member: Member) -> Attempts:
        return self.attempts.setdefault(member.name, Attempts())

    def _save(self) -> None:
        begun = {name: asdict(state) for name, state in self.attempts.items() if state.number}
        write_json(self.sweep.directory / ATTEMPTS_FILE, {"cluster": self.launcher.cluster, "runs": begun})

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """The first SIGINT, SIGTERM or SIGHUP stops the runs after their step, the second at once."""

        def stop(signum: int, frame: Any) -> None:
            self.stops += 1

        previous = {number: signal.signal(number, stop) for number in STOP_SIGNALS}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)
