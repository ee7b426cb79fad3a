"""One training in its run directory: the lock, what is recorded about it, and how a signal stops it."""

import datetime as dt
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from gtpo_verl.errors import first_line
from gtpo_verl.files import write_text
from gtpo_verl.runs import terminal
from gtpo_verl.runs.directory import CONFIG_FILE, STOP_FILE, link_model, write_record
from gtpo_verl.runs.lock import training_lock
from gtpo_verl.runs.provenance import hardware, run_versions

SIGNALS = {
    signal.SIGINT: "Ctrl-C",
    signal.SIGTERM: "SIGTERM, from `ray job stop`, a batch system or kill",
    signal.SIGHUP: "SIGHUP: its terminal was closed",
}


@contextmanager
def training_session(run_dir: Path, *, config: str, command: str) -> Iterator[None]:
    """Hold the run directory for the training in the block, and keep ``run.json`` up to date.

    The status is ``running``, then ``complete``, ``interrupted`` (a signal, or the file ``STOP``) or ``failed``, with
    the reason. The first signal asks the trainer to stop after its step, by ``STOP``, and is recorded at once, because
    whoever sent it may kill the process before the step ends; a second Ctrl-C raises KeyboardInterrupt.

    Args:
        run_dir: made if it does not exist.
        config: the resolved configuration, written to ``config.yaml``.
        command: the command line that repeats the training.

    Raises:
        UserError: another training writes to the directory.
    """
    with training_lock(run_dir):
        stop = run_dir / STOP_FILE
        stop.unlink(missing_ok=True)
        write_text(run_dir / CONFIG_FILE, config)
        facts = {
            "name": run_dir.name,
            "created": dt.datetime.now().astimezone().isoformat(timespec="seconds"),
            "command": command,
            "versions": run_versions(),
            "hardware": hardware(),
        }

        def record(status: str, reason: str | None = None) -> None:
            write_record(run_dir, facts | {"status": status} | ({"reason": reason} if reason else {}))

        record("running")
        stopper = _Stopper(stop, lambda reason: record("interrupted", reason))
        try:
            with stopper.listening():
                yield
        except KeyboardInterrupt:
            record("interrupted", stopper.reason)
            raise
        except Exception as error:
            record("failed", first_line(error))
            raise
        if stop.exists():
            record("interrupted", stopper.reason)
        else:
            record("complete")
        stop.unlink(missing_ok=True)
        model = link_model(run_dir)
        if model:
            print(f"Trained model: {model}", flush=True)


class _Stopper:
    """What is done about a signal. ``reason`` says in the end why the training was stopped."""

    def __init__(self, stop: Path, record: Callable[[str], None]) -> None:
        self.stop = stop
        self.reason = f"the file {STOP_FILE}"
        self._record = record

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Handle the signals in the block, but for a SIGHUP that is ignored, as under nohup."""
        ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
        wanted = [number for number in SIGNALS if not (number == signal.SIGHUP and ignored)]
        previous = {number: signal.signal(number, self) for number in wanted}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        if signum == signal.SIGINT and self.stop.exists():
            raise KeyboardInterrupt
        self.stop.touch()
        self.reason = SIGNALS[signal.Signals(signum)]
        self._record(self.reason)
        print(
            "\nStopping after this step, with a checkpoint. Ctrl-C again stops at once.",
            file=terminal.err(),
            flush=True,
        )
