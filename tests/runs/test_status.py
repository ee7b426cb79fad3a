"""``gtpo-verl status`` says where a run is, and of a dead one why it died."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from checkpoint_writer import write_fsdp

from gtpo_verl.cli import main
from gtpo_verl.errors import UserError
from gtpo_verl.runs.directory import record_metrics, record_phase, write_record
from gtpo_verl.runs.lock import training_lock
from gtpo_verl.runs.state import status_of


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A training of 10 steps that has logged 3 of them."""
    record(tmp_path, "running")
    (tmp_path / "config.yaml").write_text("trainer: {total_training_steps: 10}\n")
    for step in (1, 2, 3):
        record_metrics(tmp_path, step, {"timing_s/step": 20.0, "training/accuracy": step / 10, "actor/grad_norm": 0.25})
    record_phase(tmp_path, 4, "generating")
    write_fsdp(tmp_path / "checkpoints", 2)
    return tmp_path


def record(run_dir: Path, status: str, reason: str | None = None) -> None:
    (run_dir / "run.json").write_text(json.dumps({"attempts": [{}], "status": status, "reason": reason}))


def test_a_run_that_trains(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = "gtpo_verl WARNING: first\nother\ngtpo_verl WARNING: second\ngtpo_verl WARNING: first\n"
    (run_dir / "train.log").write_text(log)
    with training_lock(run_dir):
        status = status_of(run_dir)
        assert main(["status", str(run_dir)]) == 0
    assert status.state == "running"
    assert status.why.startswith("step 4: generating for ")
    assert status.lines["step"] == "3 of 10"
    assert status.lines["time left"] == "2 min"
    assert status.lines["checkpoints"] == "global_step_2; a restart goes on from global_step_2"
    assert status.warnings == ("first", "second")
    printed = capsys.readouterr().out
    assert "accuracy 0.30" in printed
    assert "actor/grad_norm 0.25" in printed


def test_a_run_that_was_killed_says_where_and_what_its_log_says(run_dir: Path) -> None:
    """By a process that holds the lock and is killed with it."""
    code = (
        "import os, sys; from pathlib import Path; from gtpo_verl.runs.lock import training_lock\n"
        "with training_lock(Path(sys.argv[1])): os._exit(9)"
    )
    subprocess.run([sys.executable, "-c", code, str(run_dir)], check=False)
    (run_dir / "train.log").write_text("step 3\nOSError: [Errno 28] No space left on device\n")
    status = status_of(run_dir)
    assert status.state == "interrupted"
    assert status.why.endswith("in step 4, generating; the log says: the disk is full")
    assert "time left" not in status.lines


def test_what_an_earlier_attempt_logged_is_not_the_cause(run_dir: Path) -> None:
    earlier = "gtpo_verl WARNING: first\nRuntimeError: CUDA out of memory\n"
    log = "A worker died. There are some potential root causes. (1) The process is killed by SIGKILL by OOM killer.\n"
    (run_dir / "train.log").write_text(earlier + log)
    (run_dir / "run.json").write_text(json.dumps({"attempts": [{"log_from": len(earlier)}], "status": "running"}))
    (run_dir / "phase.json").unlink()
    status = status_of(run_dir)
    assert status.why == "its process was killed, or its machine is gone while it started"
    assert status.warnings == ()


def test_an_end_that_was_recorded_is_repeated(run_dir: Path) -> None:
    record(run_dir, "failed", "vLLM died (server 0).")
    assert (status_of(run_dir).state, status_of(run_dir).why) == ("failed", "vLLM died (server 0).")
    assert main(["status", str(run_dir)]) == 1


def test_a_directory_without_a_training_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"it has no run\.json"):
        status_of(tmp_path)
    (tmp_path / "train.log").touch()
    with pytest.raises(UserError, match="has not begun yet"):
        status_of(tmp_path)
    for arm in ("dapo", "gtpo"):
        write_record(tmp_path / arm, {})
    with pytest.raises(UserError, match="holds several trainings: name one of dapo, gtpo in it"):
        status_of(tmp_path)
    (tmp_path / "run.json").write_text("{")
    with pytest.raises(UserError, match="is damaged"):
        status_of(tmp_path)


DAMAGE = {
    "run.json": [b"[" * 100_000, b"\xff\xfe\x00", b'{"attempts": 1e999'],
    "phase.json": [b"\xff\xfe\x00", b'{"step": 1}', b'{"phase": 1}'],
    "LOCK.json": [
        b"[" * 100_000,
        b"[1]",
        b'{"": null}',
        b'{"host": "a", "pid": 1, "heartbeat": "x", "token": ""}',
        b'{"host": "a", "pid": 1e30, "heartbeat": 1, "token": ""}',
    ],
    "config.yaml": [
        b"\xff\xfe\x00",
        b"a: &a [*a",
        b"[1]",
        b"[" * 100_000,
        b"- " * 100_000,
        b"trainer: {total_training_steps: .inf}",
    ],
}


@pytest.mark.parametrize(("name", "content"), [(name, one) for name, all_ in DAMAGE.items() for one in all_])
def test_a_damaged_file_is_one_line(name: str, content: bytes, run_dir: Path) -> None:
    (run_dir / name).write_bytes(content)
    with pytest.raises(UserError, match=name) as caught:
        status_of(run_dir)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["file", "nowhere"])
def test_what_is_no_directory_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=f"{name}: no such directory; name that of a training"):
        status_of(tmp_path / name)
