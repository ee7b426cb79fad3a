"""The state of a training, from its files."""

import json
from pathlib import Path

import pytest

from gtpo_verl.runs import state as module
from gtpo_verl.runs.directory import record_metrics, record_phase
from gtpo_verl.runs.lock import training_lock
from gtpo_verl.runs.state import RunState, duration, state_of


def record(run_dir: Path, status: str, **attempt: str) -> None:
    (run_dir / "run.json").write_text(json.dumps({"attempts": [attempt], "status": status, "reason": "why"}))


def test_a_directory_without_a_training_has_no_state(tmp_path: Path) -> None:
    state = state_of(tmp_path / "nowhere")
    assert (state.status, state.step, state.steps, state.seconds_left) == ("", 0, None, None)
    assert not state.is_alive
    assert not state.is_complete


def test_a_training_goes_from_running_to_stopping_to_its_end(tmp_path: Path) -> None:
    record(tmp_path, "running")
    with training_lock(tmp_path):
        assert (state_of(tmp_path).status, state_of(tmp_path).reason) == ("running", "starting")
        record_phase(tmp_path, 2, "updating the actor")
        (tmp_path / "STOP").touch()
        state = state_of(tmp_path)
        assert (state.status, state.is_alive) == ("stopping", True)
        assert state.reason.startswith("step 2: updating the actor for ")
    dead = state_of(tmp_path)
    assert (dead.status, dead.killed, dead.is_alive) == ("interrupted", True, False)
    assert dead.reason == "its process was killed, or its machine is gone in step 2, updating the actor"
    record(tmp_path, "complete", started="2026-01-01T00:00:00+00:00", ended="2026-01-01T00:02:05+00:00")
    state = state_of(tmp_path)
    assert (state.is_complete, state.killed, state.reason, state.seconds) == (True, False, "why", 125)


@pytest.mark.parametrize("moment", ["live_owner", "read_record"])
def test_one_that_ends_while_its_state_is_read_was_not_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    lock = training_lock(tmp_path)
    lock.__enter__()
    record(tmp_path, "running")
    read = getattr(module, moment)

    def ends_before(run_dir: Path) -> object:
        record(run_dir, "complete")
        lock.__exit__(None, None, None)
        return read(run_dir)

    monkeypatch.setattr(module, moment, ends_before)
    assert state_of(tmp_path).status == {"live_owner": "complete", "read_record": "running"}[moment]


def test_steps_accuracy_and_time_left_follow_the_files(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("trainer: {total_training_steps: 20}\n")
    record_metrics(tmp_path, 0, {"val/sums/mean@4": 0.25, "val-core/sums/acc/mean@4": 0.2})
    assert state_of(tmp_path).accuracy == {"sums": 0.25}
    assert state_of(tmp_path).step_seconds is None
    for step in range(1, 13):
        record_metrics(tmp_path, step, {"timing_s/step": 100.0 if step < 3 else 4.0, "training/accuracy": 0.5})
    state = state_of(tmp_path)
    assert (state.step, state.steps, state.step_seconds, state.seconds_left) == (12, 20, 4.0, 32.0)
    assert (state.metrics["training/accuracy"], state.accuracy) == (0.5, {"sums": 0.25})
    record_metrics(tmp_path, 21, {"timing_s/step": 4.0})
    assert state_of(tmp_path).seconds_left == 0


def test_without_its_number_of_steps_no_time_left_is_known() -> None:
    assert RunState(step=3, step_seconds=2.0).seconds_left is None


@pytest.mark.parametrize(
    ("seconds", "words"), [(0, "0 s"), (89.4, "89 s"), (90, "2 min"), (1200, "20 min"), (7500, "2 h 05 min")]
)
def test_durations_in_words(seconds: float, words: str) -> None:
    assert duration(seconds) == words
