"""One training in its run directory: the lock, what is recorded about it, and how a signal stops it."""

import os
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import yaml

from gtpo_verl.config import IN_RAY_JOB
from gtpo_verl.errors import first_line
from gtpo_verl.files import write_text
from gtpo_verl.runs import terminal
from gtpo_verl.runs.checkpoints import link_model, tracked_step
from gtpo_verl.runs.continuation import Changes
from gtpo_verl.runs.directory import (
    CONFIG_FILE,
    DIFF_FILE,
    PHASE_FILE,
    STOP_FILE,
    differences,
    flatten,
    in_words,
    now,
    read_record,
    write_record,
)
from gtpo_verl.runs.lock import training_lock
from gtpo_verl.runs.provenance import checksums, code_state, hardware, run_versions
from gtpo_verl.runs.state import state_of

SIGNALS = {
    signal.SIGINT: "Ctrl-C",
    signal.SIGTERM: "SIGTERM, from `ray job stop`, a batch system or kill",
    signal.SIGHUP: "SIGHUP: its terminal was closed",
}


@contextmanager
def training_session(run_dir: Path, *, config: str, command: str, overrides: Sequence[str] = ()) -> Iterator["Record"]:
    """Hold the run directory for the training in the block, and keep ``run.json`` up to date; gives its record.

    The status is ``running``, then ``complete``, ``interrupted`` (a signal, or the file ``STOP``) or ``failed``, with
    the reason; one that is asked to stop in its last step is ``complete``. The first signal asks the trainer to stop
    after its step, by ``STOP``, and is recorded at once, because whoever sent it may kill the process before the step
    ends; a second Ctrl-C raises KeyboardInterrupt.

    ``config``: resolved, as YAML. ``command``: the line that repeats the training. UserError: another training has
    the directory.
    """
    with training_lock(run_dir):
        stop = run_dir / STOP_FILE
        stop.unlink(missing_ok=True)
        (run_dir / PHASE_FILE).unlink(missing_ok=True)  # of an earlier attempt
        write_text(run_dir / CONFIG_FILE, config)
        record = Record(run_dir, yaml.safe_load(config), command, overrides)
        reason = f"the file {STOP_FILE}"
        ending = False

        def asked_to_stop(signum: int, frame: FrameType | None) -> None:
            nonlocal reason
            if ending:  # it will stop anyway, and how it ended must be recorded
                return
            if signum == signal.SIGINT and stop.exists():
                raise KeyboardInterrupt
            stop.touch()
            reason = SIGNALS[signal.Signals(signum)]
            if signum == signal.SIGINT and IN_RAY_JOB in os.environ:  # jobs of `submit` ask Ray for this signal
                reason = "SIGINT, from `ray job stop`"
            record.stopping(reason)
            text = "\nStopping after this step, with a checkpoint. Ctrl-C again stops at once."
            print(text, file=terminal.err(), flush=True)

        with handling_signals(asked_to_stop):
            try:
                yield record
            except KeyboardInterrupt:
                ending = True
                record.interrupted(reason)
                raise
            except Exception as error:
                ending = True
                record.close("failed", first_line(error))
                raise
            ending = True
            state = state_of(run_dir)
            if stop.exists() and (state.steps is None or state.step < state.steps):
                record.interrupted(reason)
            else:
                record.close("complete", "all steps were trained")
        stop.unlink(missing_ok=True)
        if model := link_model(run_dir):
            print(f"Trained model: {model}", flush=True)


class Record:
    """``run.json`` of a training, written as it starts and as it ends."""

    def __init__(self, run_dir: Path, config: dict[str, Any], command: str, overrides: Sequence[str]) -> None:
        self.run_dir, self.config = run_dir, dict(flatten(config))
        earlier, started = read_record(run_dir), now()
        code, changes = code_state()
        (run_dir / DIFF_FILE).unlink(missing_ok=True)
        if changes:
            write_text(run_dir / DIFF_FILE, changes)
        log = run_dir / terminal.LOG_FILE
        self.attempt: dict[str, Any] = {"started": started, "ended": None, "status": "running", "exit_reason": None}
        self.attempt |= {"commit": code["commit"], "log_from": log.stat().st_size if log.exists() else 0}
        self.facts: dict[str, Any] = {
            "name": run_dir.name,
            "created": earlier.get("created", started),
            "command": command,
            "overrides": list(overrides),
            "seed": self.config.get("seed"),
            "code": code,
            "versions": run_versions(),
            "hardware": hardware(),
            "checksums": checksums(self.config),
            "attempts": [*earlier.get("attempts", []), self.attempt],
        }
        if other := earlier and differences(_code(earlier), _code(self.facts)):
            print(f"note: this run goes on with other code: {other}.", flush=True)
        self._write("running")

    def _write(self, status: str, **reason: str) -> None:
        write_record(self.run_dir, self.facts | {"status": status, **reason})

    def goes_on(self, step: int, changes: Changes) -> None:
        """Record from which step the attempt goes on, and what has changed since the attempt before."""
        self.attempt |= {"from_step": step, "changes": {key: list(pair) for key, pair in changes.items()}}
        self._write("running")
        if changes:
            print(f"note: this run goes on with other settings: {in_words(changes)}.", flush=True)

    def stopping(self, reason: str) -> None:
        """Record why the attempt is about to end; it may be killed before it does."""
        self.attempt |= {"status": "interrupted", "exit_reason": reason}
        self._write("interrupted", reason=reason)

    def interrupted(self, reason: str) -> None:
        """Record a stop; say how far the training is, and from where the same command goes on."""
        self.close("interrupted", reason)
        state = state_of(self.run_dir)
        try:
            saved = tracked_step(self.run_dir / "checkpoints")
        except ValueError:  # a tracker that is not readable: the next start says what it takes
            saved = None
        goes_on = f"resumes from global_step_{saved}" if saved else "starts from the first step, for nothing was saved"
        at = f"{max(state.step, saved or 0)} of {state.steps or '?'}"
        print(f"{terminal.STOPPED} {at} ({reason}). The same command {goes_on}.", flush=True)

    def close(self, status: str, reason: str) -> None:
        """Record the end of the attempt."""
        self.attempt |= {"ended": now(), "status": status, "exit_reason": reason}
        if None in self.facts["checksums"].values():  # a model of the hub, which the workers have downloaded since
            self.facts["checksums"] = checksums(self.config)
        self._write(status, reason=reason)


def _code(record: Mapping[str, Any]) -> dict[str, Any]:
    """Commit, checksum of uncommitted changes and versions of an attempt; what is damaged is left out."""
    parts = (record.get(name) for name in ("code", "versions"))
    return {name: value for part in parts if isinstance(part, dict) for name, value in part.items()}


@contextmanager
def handling_signals(handler: Callable[[int, FrameType | None], object]) -> Iterator[None]:
    """Handle the signals that stop a command in the block, but for a SIGHUP that is ignored, as under nohup."""
    ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    wanted = [number for number in SIGNALS if not (number == signal.SIGHUP and ignored)]
    previous = {number: signal.signal(number, handler) for number in wanted}
    try:
        yield
    finally:
        for number, earlier in previous.items():
            signal.signal(number, earlier)
