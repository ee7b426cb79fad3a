"""A training as a child process: started, asked to stop, killed; for commands that run several."""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path

from gtpo_verl.runs.terminal import LOG_FILE

TRAIN = (sys.executable, "-m", "gtpo_verl.train")
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
        with (run_dir / LOG_FILE).open("a") as log:
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

    def stop(self) -> None:
        """Ask it to stop after its step, with a checkpoint; the second time, to stop at once."""
        self._process.send_signal(signal.SIGINT)

    def kill(self) -> None:
        """End it, and what runs in its session, if it still runs."""
        if self.returncode is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


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
