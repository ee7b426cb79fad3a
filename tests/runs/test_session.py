"""What a training leaves in its run directory, however it ends."""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import pytest

from gtpo_verl.config import IN_RAY_JOB
from gtpo_verl.errors import UserError
from gtpo_verl.runs.checkpoints import HF_WEIGHTS, TRACKER
from gtpo_verl.runs.directory import read_record, record_metrics, record_phase
from gtpo_verl.runs.session import Record, training_session


@pytest.fixture(autouse=True)
def signals() -> Iterator[None]:
    """Signals as a terminal starts a process, also where these tests run under nohup, which ignores SIGHUP."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


def session(run_dir: Path) -> AbstractContextManager[Record]:
    return training_session(run_dir, config="a: 1\n", command="gtpo-verl train")


def status(run_dir: Path) -> str:
    record = read_record(run_dir)
    assert record is not None
    return record["status"]


def reason(run_dir: Path) -> str:
    record = read_record(run_dir)
    assert record is not None
    return record["reason"]


@pytest.mark.parametrize("place", HF_WEIGHTS)
def test_a_training_that_ends_is_complete_and_its_last_model_is_linked(tmp_path: Path, place: str) -> None:
    before = signal.getsignal(signal.SIGINT)
    with session(tmp_path):
        assert status(tmp_path) == "running"
        assert (tmp_path / "config.yaml").read_text() == "a: 1\n"
        for name in ("9", "10", "999", "10_backup"):  # the last two are no checkpoints of it: the tracker decides
            weights = tmp_path / "checkpoints" / f"global_step_{name}" / place
            weights.mkdir(parents=True)
            (weights / "model.safetensors").touch()
        (tmp_path / "checkpoints" / TRACKER).write_text("10")
    assert status(tmp_path) == "complete"
    assert (tmp_path / "model").resolve() == (tmp_path / "checkpoints" / "global_step_10" / place).resolve()
    assert signal.getsignal(signal.SIGINT) == before


def test_an_attempt_knows_where_its_log_begins_and_is_in_no_phase_yet(tmp_path: Path) -> None:
    record_phase(tmp_path, 4, "updating the actor")
    (tmp_path / "train.log").write_text("of an earlier attempt\n")
    with session(tmp_path):
        record = read_record(tmp_path)
        assert record is not None
        assert record["attempts"][-1]["log_from"] == 22
        assert not (tmp_path / "phase.json").exists()


def test_an_attempt_with_other_code_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for commit, version in (("a1", "2.0"), ("a1", "2.0"), ("b2", "2.1")):
        assert capsys.readouterr().out == ""
        monkeypatch.setattr("gtpo_verl.runs.session.code_state", lambda commit=commit: ({"commit": commit}, ""))
        monkeypatch.setattr("gtpo_verl.runs.session.run_versions", lambda version=version: {"torch": version})
        with session(tmp_path):
            pass
    said = capsys.readouterr().out
    assert said == "note: this run goes on with other code: commit was a1, is b2; torch was 2.0, is 2.1.\n"
    (tmp_path / "run.json").write_text('{"code": 3, "versions": []}')
    with session(tmp_path):
        assert "commit was not set, is b2" in capsys.readouterr().out


def test_ctrl_c_asks_the_trainer_to_stop_and_the_run_is_interrupted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with session(tmp_path):
        os.kill(os.getpid(), signal.SIGINT)
        assert (tmp_path / "STOP").exists()
        assert "Stopping after this step" in capsys.readouterr().err
    assert status(tmp_path) == "interrupted"
    assert not (tmp_path / "STOP").exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_is_recorded_at_once_because_the_sender_may_kill_soon(tmp_path: Path, number: signal.Signals) -> None:
    with session(tmp_path):
        for _ in range(2):  # unlike Ctrl-C, the second changes nothing
            os.kill(os.getpid(), number)
        assert (tmp_path / "STOP").exists()
        assert status(tmp_path) == "interrupted"
        assert number.name in reason(tmp_path)
    assert (status(tmp_path), number.name in reason(tmp_path)) == ("interrupted", True)


def test_a_training_under_nohup_outlives_its_terminal(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with session(tmp_path):
            os.kill(os.getpid(), signal.SIGHUP)
            assert not (tmp_path / "STOP").exists()
    finally:
        signal.signal(signal.SIGHUP, before)
    assert status(tmp_path) == "complete"


def test_the_file_stop_is_the_reason_where_there_was_no_signal(tmp_path: Path) -> None:
    with session(tmp_path):
        (tmp_path / "STOP").touch()
    assert (status(tmp_path), reason(tmp_path)) == ("interrupted", "the file STOP")


def test_ray_stops_a_job_with_the_signal_of_ctrl_c(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with session(tmp_path):
        os.kill(os.getpid(), signal.SIGINT)
    assert reason(tmp_path) == "Ctrl-C"
    monkeypatch.setenv(IN_RAY_JOB, "{}")
    with session(tmp_path):
        os.kill(os.getpid(), signal.SIGINT)
    assert reason(tmp_path) == "SIGINT, from `ray job stop`"


@pytest.mark.parametrize(("step", "expected"), [(2, "interrupted"), (3, "complete")])
def test_one_that_is_stopped_in_its_last_step_is_complete(tmp_path: Path, step: int, expected: str) -> None:
    with training_session(tmp_path, config="trainer: {total_training_steps: 3}\n", command="gtpo-verl train"):
        os.kill(os.getpid(), signal.SIGTERM)
        record_metrics(tmp_path, step, {"timing_s/step": 1.0})
    assert status(tmp_path) == expected


def test_one_that_is_stopped_says_how_far_it_is_and_how_to_go_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def stop() -> str:
        with training_session(tmp_path, config="trainer: {total_training_steps: 30}\n", command="gtpo-verl train"):
            os.kill(os.getpid(), signal.SIGTERM)
        return capsys.readouterr().out.splitlines()[-1]

    why = "(SIGTERM, from `ray job stop`, a batch system or kill)"
    assert stop() == (
        f"Stopped after step 0 of 30 {why}. The same command starts from the first step, for nothing was saved."
    )
    record_metrics(tmp_path, 12, {"timing_s/step": 1.0})
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "latest_checkpointed_iteration.txt").write_text("12")
    assert stop() == f"Stopped after step 12 of 30 {why}. The same command resumes from global_step_12."


def test_a_second_ctrl_c_stops_at_once(tmp_path: Path) -> None:
    def train() -> None:
        with session(tmp_path):
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        train()
    assert status(tmp_path) == "interrupted"


@pytest.mark.parametrize(
    ("raised", "expected", "why"),
    [
        (None, "complete", "all steps were trained"),
        (UserError("no GPU"), "failed", "no GPU"),
        (KeyboardInterrupt(), "interrupted", "Ctrl-C"),
    ],
)
def test_a_signal_while_the_end_is_recorded_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, raised: BaseException | None, expected: str, why: str
) -> None:
    def interrupted(write: Callable[..., None]) -> Callable[..., None]:
        def with_signals(*args: str) -> None:
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGINT):
                os.kill(os.getpid(), number)
            write(*args)
            os.kill(os.getpid(), signal.SIGINT)

        return with_signals

    def train() -> None:
        with session(tmp_path):
            if expected == "interrupted":
                os.kill(os.getpid(), signal.SIGINT)
            monkeypatch.setattr(Record, "close", interrupted(Record.close))
            if raised is not None:
                raise raised

    with nullcontext() if raised is None else pytest.raises(type(raised)):
        train()
    assert (status(tmp_path), reason(tmp_path)) == (expected, why)
    assert read_record(tmp_path)["attempts"][-1]["ended"] is not None
    assert (tmp_path / "STOP").exists() == (expected == "interrupted")


def test_a_training_that_fails_is_failed_and_a_stop_of_an_earlier_one_is_gone(tmp_path: Path) -> None:
    (tmp_path / "STOP").touch()

    def train() -> None:
        with session(tmp_path):
            assert not (tmp_path / "STOP").exists()
            raise UserError("no GPU")

    with pytest.raises(UserError, match="no GPU"):
        train()
    assert (status(tmp_path), reason(tmp_path)) == ("failed", "no GPU")


def test_a_refused_training_leaves_the_record_of_the_first(tmp_path: Path) -> None:
    with session(tmp_path):
        (tmp_path / "config.yaml").write_text("first: 1\n")
        with pytest.raises(UserError, match="another training writes to"), session(tmp_path):
            pass
        assert (status(tmp_path), (tmp_path / "config.yaml").read_text()) == ("running", "first: 1\n")
