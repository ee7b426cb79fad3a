"""What the quickstart hands to its trainings, and which run it resumes; the whole command is run in tests/e2e."""

import argparse
import io
import json
import os
import re
import signal
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from drive_sweep import FAKE
from rich.console import Console

from gtpo_verl.commands import quickstart
from gtpo_verl.config import compose_config
from gtpo_verl.errors import UserError
from gtpo_verl.experiments import run as experiment
from gtpo_verl.experiments import scheduler
from gtpo_verl.experiments.launchers import LocalLauncher
from gtpo_verl.experiments.scheduler import unfinished
from gtpo_verl.runs.directory import write_record
from gtpo_verl.runs.reader import read_run
from gtpo_verl.runs.state import state_of
from gtpo_verl.runs.sweep import Sweep, load, write


def parsed(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    quickstart.add_arguments(parser)
    return parser.parse_args(arguments)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sums", "countdown"])
@pytest.mark.parametrize(("arguments", "verdicts"), [((), "compute_score"), (("--random-verdicts",), "random_verdict")])
def test_overrides_compose_to_a_training_on_the_task(tmp_path: Path, arguments: tuple, verdicts: str, name: str):
    args = parsed("--steps", "3", *arguments, "trainer.save_freq=2", *(["task=countdown"] if name != "sums" else []))
    sweep, _ = quickstart._sweep(tmp_path, ["gtpo"], quickstart._common(args, tmp_path / "task"), fresh=True)
    config = compose_config(sweep.overrides("gtpo"))
    assert config.trainer.run_dir == str(sweep.directory / "gtpo")
    assert config.algorithm.adv_estimator == "gtpo"
    assert (config.trainer.total_training_steps, config.trainer.save_freq) == (3, 2)
    assert config.data.val_files == str(tmp_path / "task" / "val.parquet")
    function = config.reward.custom_reward_function
    assert (function.path, function.name) == (f"pkg://gtpo_verl.tasks.{name}.reward", verdicts)
    assert sweep.about["notes"] == ([quickstart.CONTROL_NOTE] if arguments else [])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("status", "common", "resumed"),
    [("interrupted", ("a=1",), True), ("complete", ("a=1",), False), ("interrupted", ("a=2",), False)],
)
def test_an_unfinished_run_of_the_same_overrides_resumes(tmp_path: Path, status: str, common: tuple, resumed: bool):
    (tmp_path / "quickstart-9").mkdir()  # killed before it began
    write(Sweep("quickstart-0", tmp_path / "quickstart-0", {"algo": ("gtpo",)}, common, {"gtpo": ("algo=gtpo",)}))
    write_record(tmp_path / "quickstart-0" / "gtpo", {"status": status})
    sweep, found = quickstart._sweep(tmp_path, ["gtpo"], ["a=1"], fresh=False)
    assert found is resumed
    assert (sweep.name == "quickstart-0") is resumed
    assert sweep.retries == 0
    if resumed:
        assert not quickstart._sweep(tmp_path, ["dapo", "gtpo"], ["a=1"], fresh=False)[1]
        (tmp_path / "quickstart-0" / "sweep.json").write_text("damaged")
        assert not quickstart._sweep(tmp_path, ["gtpo"], ["a=1"], fresh=True)[1]


@pytest.mark.slow
def test_two_that_are_started_in_one_second_have_a_directory_each(tmp_path: Path):
    assert len({quickstart._new_directory(tmp_path) for _ in range(2)}) == 2


def test_arms_must_be_presets():
    assert quickstart._arms("gtpo, dapo,gtpo") == ["gtpo", "dapo"]
    with pytest.raises(UserError, match="--arms gttpo: no such algorithm; did you mean gtpo"):
        quickstart._arms("dapo,gttpo")
    with pytest.raises(UserError, match="names no algorithm"):
        quickstart._arms(" , ")
    with pytest.raises(UserError, match="no embedded task 'countdwn'; did you mean countdown"):
        quickstart.run(parsed("task=countdwn"))


def fake(directory: Path, *common: str, arms: Sequence[str] = ("dapo", "gtpo")) -> Sweep:
    """A quickstart in a directory of its own, whose arms are fake trainings."""
    sweep, _ = quickstart._sweep(directory.parent, arms, common, fresh=True)
    return replace(sweep, directory=directory)


def train(sweep: Sweep, *, places: int = 1, terminal: bool = False, code: int = 0) -> str:
    """Train it by fake trainings and return what it printed."""
    console = Console(file=io.StringIO(), force_terminal=terminal, width=200)
    launcher = LocalLauncher([{}] * places, program=FAKE)
    with experiment.locked(sweep.directory):
        assert quickstart.train_and_report(sweep, launcher, console) == code
    return console.file.getvalue()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "POLL", 0.02)
    monkeypatch.setattr(quickstart, "LINE_EVERY", 0.2)


@pytest.mark.slow
@pytest.mark.parametrize("terminal", [False, True])
def test_progress_moves_with_and_without_a_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quick: None, terminal: bool
) -> None:
    reports: list[bool] = []
    monkeypatch.setattr(quickstart, "_report", lambda directory, console, table=True: reports.append(table))
    printed = train(fake(tmp_path / "run", "+fake.steps=4", "+fake.seconds=1.5"), terminal=terminal)
    moments = ["dapo: started", "1 running, 1 waiting", "about ", "dapo: finished", "gtpo: started", "gtpo: finished"]
    step = r"[1-3]/4" if terminal else r"dapo [1-3]/4: 1\.5 s"
    assert [text for text in moments if text not in printed] == []
    assert re.search(step, printed)
    assert reports == [False, True]  # after the first arm, and at the end
    assert load(tmp_path / "run").runs["gtpo"] == ("algo=gtpo",)


@pytest.mark.slow
def test_arms_train_side_by_side_where_there_are_places(tmp_path: Path, quick: None) -> None:
    printed = train(fake(tmp_path / "run", "+fake.steps=3", "+fake.seconds=3"), places=2)
    assert printed.index("gtpo: started") < printed.index("dapo: finished")
    records = [json.loads((tmp_path / "run" / arm / "run.json").read_text()) for arm in ("dapo", "gtpo")]
    attempts = [record["attempts"][0] for record in records]
    assert max(one["started"] for one in attempts) < min(one["ended"] for one in attempts)


@pytest.mark.slow
def test_an_arm_that_fails_ends_the_quickstart_with_its_reason(tmp_path: Path, quick: None) -> None:
    sweep = fake(tmp_path / "run", "+fake.fail_at=2", "+fake.seconds=0.5")
    with pytest.raises(UserError, match=r"the arm dapo failed: step 2 went wrong. The whole log is in .*train.log"):
        train(sweep)
    assert unfinished(sweep) == ["dapo", "gtpo"]
    assert not (tmp_path / "run" / "gtpo").exists()  # it was not tried
    assert (tmp_path / "run" / "report.html").exists()  # of what was trained


@pytest.mark.slow
def test_ctrl_c_stops_after_the_step_and_reports_what_was_trained(tmp_path: Path, quick: None) -> None:
    sweep = fake(tmp_path / "run", "+fake.steps=200", "+fake.seconds=0.2")

    def interrupt() -> None:
        while not (tmp_path / "run" / "dapo" / "metrics.jsonl").exists():
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    printed = train(sweep, code=130)
    assert "Stopping: 1 run finishes its step and saves a checkpoint." in printed
    assert printed.splitlines()[-1] == "The same command goes on."
    stopped = state_of(sweep.run_dir("dapo"))
    assert (stopped.status, 0 < stopped.step < 200) == ("interrupted", True)
    assert (tmp_path / "run" / "report.html").exists()


@pytest.mark.slow
def test_what_was_trained_is_not_trained_again(tmp_path: Path, quick: None) -> None:
    train(fake(tmp_path / "run", "+fake.steps=2", arms=["dapo"]))
    sweep = fake(tmp_path / "run", "+fake.steps=2")
    assert unfinished(sweep) == ["gtpo"]
    printed = train(sweep)
    assert "dapo: started" not in printed
    assert "gtpo: finished" in printed
    run = read_run(tmp_path / "run")
    assert (run.record["status"], run.missing, run.record["command"]) == ("complete", (), sweep.about["command"])
