"""A training as a child process, with the real command: it fails on a wrong override long before it starts Ray."""

import signal
import sys
import time
from pathlib import Path

import psutil
import pytest

from gtpo_verl.runs.process import TrainingProcess, reason_in

# A shell in the background has its children ignore Ctrl-C.
SLEEPS = "import signal, time; signal.signal(signal.SIGINT, {}); print('up', flush=True); time.sleep(60)"


def ended(training: TrainingProcess) -> int:
    """The exit code, which must come within a minute."""
    deadline = time.monotonic() + 60
    while training.returncode is None:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return training.returncode


def sleeping(run_dir: Path, handler: str) -> TrainingProcess:
    """A process that sleeps, with its handler of SIGINT."""
    training = TrainingProcess(run_dir, [], program=[sys.executable, "-c", SLEEPS.format(handler)])
    while "up" not in (run_dir / "train.log").read_text():
        time.sleep(0.05)
    return training


@pytest.mark.slow
def test_the_log_of_a_failed_training_has_its_error(tmp_path: Path):
    assert ended(TrainingProcess(tmp_path, ["algo=nonsense"])) == 2
    reason = reason_in(tmp_path / "train.log")
    assert reason.startswith("error: ")
    assert "nonsense" in reason


def test_a_training_is_asked_to_stop_and_killed_where_it_does_not(tmp_path: Path):
    willing = sleeping(tmp_path / "willing", "signal.default_int_handler")
    deaf = sleeping(tmp_path / "deaf", "signal.SIG_IGN")
    child = psutil.Process(deaf._process.pid)
    willing.stop()
    deaf.stop()
    assert ended(willing) != 0
    assert deaf.returncode is None
    deaf.kill()
    deaf.kill()  # again does no harm
    assert deaf.returncode == -signal.SIGKILL
    assert not child.is_running()


def test_the_reason_is_the_last_error_or_the_last_line(tmp_path: Path):
    log = tmp_path / "train.log"
    log.write_text("")
    assert reason_in(log) == "it printed nothing."
    log.write_text("error: the reason\nat exit\n")
    assert reason_in(log) == "error: the reason"
    log.write_text("Traceback\nKilled\n")
    assert reason_in(log) == "Killed"
