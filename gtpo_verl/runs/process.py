"""A training as a child process: started, followed through its metrics, stopped; for commands that run several."""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from gtpo_verl.runs.directory import read_metrics_from
from gtpo_verl.runs.terminal import LOG_FILE

TRAIN = (sys.executable, "-m", "gtpo_verl.train")
POLL = 0.5  # seconds between looks at the metrics
ENDING = 20.0  # seconds that a training may take to stop at once
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_libc = ctypes.CDLL(None)  # loaded before a process forks, not after


class TrainingProcess:
    """``gtpo-verl train`` in a child process with a session of its own, so that Ctrl-C reaches it only when passed on.

    It is asked to stop, as by Ctrl-C, when its parent is killed.

    Args:
        run_dir: made if need be; stdout and stderr are appended to its ``train.log``.
        overrides: Hydra overrides of the training, ``trainer.run_dir`` included.
        environment: variables that it has beside those of this process.
        program: the command that trains.
    """

    def __init__(
        self,
        run_dir: Path,
        overrides: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
        program: Sequence[str] = TRAIN,
    ) -> None:
        run_dir.mkdir(parents=True, exist_ok=True)
        self.run_dir = run_dir
        self.log = run_dir / LOG_FILE
        self.stops = 0
        with self.log.open("a") as log:
            self._process = subprocess.Popen(
                [*program, *overrides],
                env={**os.environ, **(environment or {})},
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                preexec_fn=_stop_with_parent,
            )

    @property
    def returncode(self) -> int | None:
        """Exit code; None while the process runs."""
        return self._process.poll()

    def metrics(self, waiting: Callable[[], object] = lambda: None) -> Iterator[tuple[int, dict[str, float]]]:
        """Steps and their metrics as the training writes them, until it ends; ``waiting`` is called twice a second."""
        offset = 0
        while True:
            ended = self.returncode is not None
            lines, offset = read_metrics_from(self.run_dir, offset)
            for line in lines:
                yield line["step"], line["data"]
            if ended:
                return
            waiting()
            time.sleep(POLL)

    @contextlib.contextmanager
    def stoppable(self, announce: Callable[[], object]) -> Iterator[None]:
        """Within the block, SIGINT, SIGTERM and SIGHUP stop the training after its step, a second one at once.

        ``stops`` counts them; ``announce`` is called at the first. A training still running at the end of the block is
        killed.
        """

        def stop(signum: int, frame: Any) -> None:
            self.stops += 1
            if self.stops == 1:
                announce()
            self.stop()

        previous = {number: signal.signal(number, stop) for number in STOP_SIGNALS}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)
            self.kill()

    def stop(self) -> None:
        """Ask it to stop after its step, with a checkpoint; the second time, to stop at once."""
        self._process.send_signal(signal.SIGINT)

    def end(self) -> None:
        """Have it stop at once, which leaves nothing behind; kill it where it has not after `ENDING`."""
        for patience in (POLL, ENDING):
            self.stop()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(patience)
        self.kill()

    def kill(self) -> None:
        """End it, and what runs in its session, if it still runs."""
        if self.returncode is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def reason(self) -> str:
        """Why it failed, in one line; see `reason_in`."""
        return reason_in(self.log)


def reason_in(log: Path) -> str:
    """Why a training failed, in one line: the last ``error:`` among the last lines of its log, else the last line."""
    with log.open(errors="replace") as content:
        lines = deque((line.strip() for line in content if line.strip()), maxlen=200)
    errors = [line for line in lines if line.startswith("error: ")]
    return [*lines, *errors][-1] if lines else "it printed nothing."


def _stop_with_parent() -> None:
    """In a child: ask the kernel for SIGINT when the parent dies. Without prctl (not Linux) nothing happens."""
    with contextlib.suppress(AttributeError):
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGINT)
