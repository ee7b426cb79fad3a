"""What the quickstart hands to its trainings, and which run it resumes; the whole command is run in tests/e2e."""

import argparse
import io
import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from drive_sweep import FAKE
from rich.console import Console

from gtpo_verl.commands import quickstart
from gtpo_verl.commands.quickstart import QuickstartRecord, Watch
from gtpo_verl.config import compose_config
from gtpo_verl.errors import UserError
from gtpo_verl.experiments import scheduler
from gtpo_verl.experiments.launchers import LocalLauncher
from gtpo_verl.experiments.sweep import Sweep
from gtpo_verl.runs.directory import MetricsRecorder
from gtpo_verl.tasks import Task, task


def parsed(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    quickstart.add_arguments(parser)
    return parser.parse_args(arguments)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sums", "countdown"])
@pytest.mark.parametrize(("arguments", "verdicts"), [((), "compute_score"), (("--random-verdicts",), "random_verdict")])
def test_overrides_compose_to_a_training_on_the_task(tmp_path: Path, arguments: tuple, verdicts: str, name: str):
    prepared = Task(tmp_path / "model", tmp_path / "train.parquet", tmp_path / "val.parquet", {})
    args = parsed("--steps", "3", *arguments, "trainer.save_freq=2", *(["task=countdown"] if name != "sums" else []))
    embedded = quickstart._task(args.overrides)
    assert embedded == task(name)
    sweep = quickstart._sweep(["gtpo"], tmp_path, quickstart._overrides(embedded, prepared, args))
    config = compose_config(sweep.overrides(sweep.members[0]))
    assert config.trainer.run_dir == str(tmp_path / "gtpo")
    assert config.algorithm.adv_estimator == "gtpo"
    assert (config.trainer.total_training_steps, config.trainer.save_freq) == (3, 2)
    assert config.data.val_files == str(tmp_path / "val.parquet")
    function = config.reward.custom_reward_function
    assert (function.path, function.name) == (f"pkg://gtpo_verl.tasks.{name}.reward", verdicts)


@pytest.mark.parametrize(
    ("status", "request_", "resumed"), [("interrupted", 1, True), ("complete", 1, False), ("interrupted", 2, False)]
)
def test_an_unfinished_run_of_the_same_request_resumes(tmp_path: Path, status: str, request_: int, resumed: bool):
    (tmp_path / "quickstart-0").mkdir()
    record = {"status": status, "request": {"steps": request_}}
    (tmp_path / "quickstart-0" / "run.json").write_text(json.dumps(record))
    directory, found = quickstart._run_directory(tmp_path, {"steps": 1}, fresh=False)
    assert found is resumed
    assert (directory.name == "quickstart-0") is resumed
    if resumed:
        assert quickstart._run_directory(tmp_path, {"steps": 1}, fresh=True)[0] != directory


@pytest.mark.slow
def test_two_that_are_started_in_one_second_have_a_directory_each(tmp_path: Path):
    assert len({quickstart._run_directory(tmp_path, {}, fresh=True)[0] for _ in range(2)}) == 2


def test_arms_must_be_presets():
    assert quickstart._arms("gtpo, dapo,gtpo") == ["gtpo", "dapo"]
    with pytest.raises(UserError, match="--arms gttpo: no such algorithm; did you mean gtpo"):
        quickstart._arms("dapo,gttpo")
    with pytest.raises(UserError, match="names no algorithm"):
        quickstart._arms(" , ")
    with pytest.raises(UserError, match="no embedded task 'countdwn'; did you mean countdown"):
        quickstart._task(["task=countdwn"])


def fake(directory: Path, *common: str, arms: Sequence[str] = ("dapo", "gtpo")) -> tuple[Sweep, QuickstartRecord]:
    """A quickstart whose arms are fake trainings, and its record."""
    sweep = quickstart._sweep(arms, directory, common)
    request = {"arms": list(arms), "random_verdicts": False}
    prepared = Task(directory, directory, directory, {"baseline": {"accuracy": 0.5}})
    return sweep, QuickstartRecord(sweep, request, task("sums"), prepared)


def train(sweep: Sweep, record: QuickstartRecord, steps: int, *, places: int = 1, terminal: bool = False) -> str:
    """Train it by fake trainings and return what it printed."""
    console = Console(file=io.StringIO(), force_terminal=terminal, width=200)
    launcher = LocalLauncher([{}] * places, program=FAKE)
    try:
        code = quickstart._train(sweep, record, launcher, steps, console)
    finally:
        printed = console.file.getvalue()
    assert code == 0
    return printed


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "POLL", 0.02)


@pytest.mark.slow
@pytest.mark.parametrize("terminal", [False, True])
def test_progress_moves_with_and_without_a_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quick: None, terminal: bool
) -> None:
    reports: list[bool] = []
    monkeypatch.setattr(quickstart, "_report", lambda directory, console, table=True: reports.append(table))
    printed = train(*fake(tmp_path, "+fake.steps=4", "+fake.seconds=0.5"), steps=4, terminal=terminal)
    moments = ["dapo: started", " 25%", "dapo 2/4: 0.5 s", "left, dapo 3/4", "gtpo: started"]
    assert [text for text in [*moments, "dapo: finished", " 75%", "gtpo: finished"] if text not in printed] == []
    assert reports == [False, True]  # after the first arm, and at the end
    record = json.loads((tmp_path / "run.json").read_text())
    assert (record["status"], record["complete"]) == ("complete", ["dapo", "gtpo"])
    assert "algo=gtpo" in record["commands"]["gtpo"]


@pytest.mark.slow
def test_arms_train_side_by_side_where_there_are_places(tmp_path: Path, quick: None) -> None:
    printed = train(*fake(tmp_path, "+fake.steps=3", "+fake.seconds=1"), steps=3, places=2)
    assert printed.index("gtpo: started") < printed.index("dapo: finished")
    assert "trains after" not in printed
    attempts = [json.loads((tmp_path / arm / "run.json").read_text())["attempts"][0] for arm in ("dapo", "gtpo")]
    assert max(one["started"] for one in attempts) < min(one["ended"] for one in attempts)


@pytest.mark.slow
def test_an_arm_that_fails_ends_the_quickstart_with_its_reason(tmp_path: Path, quick: None) -> None:
    sweep, record = fake(tmp_path, "+fake.fail_at=2", "+fake.seconds=0.5")
    with pytest.raises(UserError, match=r"the arm dapo failed: step 2 went wrong. The whole log is in .*train.log"):
        train(sweep, record, steps=3)
    facts = json.loads((tmp_path / "run.json").read_text())
    assert (facts["status"], facts["complete"], record.left) == ("failed", [], ["dapo", "gtpo"])
    assert (tmp_path / "report.html").exists()  # of what was trained


@pytest.mark.slow
def test_what_was_trained_is_not_trained_again(tmp_path: Path, quick: None) -> None:
    sweep, record = fake(tmp_path, "+fake.steps=2", arms=["dapo"])
    train(sweep, record, steps=2)
    sweep, record = fake(tmp_path, "+fake.steps=2")
    record.facts["arms"] = ["dapo", "gtpo"]
    assert record.left == ["gtpo"]
    printed = train(sweep, record, steps=2)
    assert "dapo: started" not in printed
    assert "gtpo: finished" in printed


def test_steps_of_an_earlier_attempt_do_not_count_as_fast(tmp_path: Path) -> None:
    recorder = MetricsRecorder(tmp_path / "gtpo")
    for step in range(3):
        recorder.write(step, {"training/accuracy": 0.5})
    watch = Watch({"gtpo": tmp_path / "gtpo"}, steps=4, at_once=1)
    assert watch.look() == (0.0, quickstart.SET_UP)
    for step in (3, 4):
        recorder.write(step, {"training/accuracy": 0.25 * step, "credit/entropy_all": 1.2})
        share, text = watch.look()
    assert share == 1
    assert text.endswith("left, gtpo 4/4: accuracy 1.00, entropy 1.20")


def test_a_line_is_due_after_a_time_or_a_tenth():
    now = 0.0
    due = quickstart.Due(0.0, clock=lambda: now)
    assert not due(0.09)
    assert due(0.1)
    now = 29
    assert not due(0.1)
    now = 30
    assert due(0.1)
    assert not due(0.19)
    assert due(0.21)
    assert due(1.0)
    assert not due(1.0)
