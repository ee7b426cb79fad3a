"""A training as a child process, with the real command: it fails on a wrong override long before it starts Ray."""

import json
import os
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest

from gtpo_verl.runs import process as module
from gtpo_verl.runs.process import TrainingProcess


@pytest.mark.slow
def test_a_failed_training_is_followed_to_its_end_and_gives_its_error(tmp_path: Path):
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 3, "data": {"x": 0.5}}) + '\n{"step": 4, "da')
    training = TrainingProcess(tmp_path, ["algo=nonsense"])
    with training.stoppable(lambda: None):
        assert list(training.metrics()) == [(3, {"x": 0.5})]
    assert training.returncode == 2
    assert training.stops == 0
    assert training.reason().startswith("error: ")
    assert "nonsense" in training.reason()


def test_a_signal_to_this_process_stops_the_training(tmp_path: Path):
    announced = []
    training = TrainingProcess(tmp_path, ["algo=gtpo"])
    before = signal.getsignal(signal.SIGTERM)
    with training.stoppable(lambda: announced.append(True)):
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGHUP)
        assert list(training.metrics()) == []
    assert (training.stops, announced) == (2, [True])
    assert training.returncode != 0
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_training_that_still_runs_at_the_end_of_the_block_is_killed(tmp_path: Path):
    training = TrainingProcess(tmp_path, ["algo=gtpo"])
    with training.stoppable(lambda: None):
        child = psutil.Process(training._process.pid)
    assert training.returncode == -signal.SIGKILL
    assert not child.is_running()


@pytest.mark.parametrize("handler", ["signal.SIG_IGN", "signal.default_int_handler"])
def test_a_training_ends_at_once_by_itself_or_by_force(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, handler: str
) -> None:
    monkeypatch.setattr(module, "ENDING", 0.5)
    script = f"import signal, time; signal.signal(signal.SIGINT, {handler}); print('up', flush=True); time.sleep(60)"
    training = TrainingProcess(tmp_path, [], program=[sys.executable, "-c", script])
    while "up" not in training.log.read_text():
        time.sleep(0.05)
    training.end()
    assert (training.returncode == -signal.SIGKILL) is (handler == "signal.SIG_IGN")
    training.end()  # again does no harm


def test_a_training_that_printed_nothing_says_so(tmp_path: Path):
    training = TrainingProcess(tmp_path, ["algo=gtpo"])
    with training.stoppable(lambda: None):
        pass
    training.log.write_text("")
    assert training.reason() == "it printed nothing."
    training.log.write_text("error: the reason\nat exit\n")
    assert training.reason() == "error: the reason"
    training.log.write_text("Traceback\nKilled\n")
    assert training.reason() == "Killed"
