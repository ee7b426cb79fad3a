"""What the quickstart hands to its trainings, and which run it resumes; the whole command is run in tests/e2e."""

import argparse
import functools
import io
import json
import sys
import time
from pathlib import Path

import psutil
import pytest
from rich.console import Console

from gtpo_verl.commands import quickstart
from gtpo_verl.config import compose_config
from gtpo_verl.errors import UserError
from gtpo_verl.runs.pace import Pace
from gtpo_verl.runs.process import TrainingProcess
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
    config = compose_config(quickstart._overrides("gtpo", tmp_path / "run", embedded, prepared, args))
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
    with pytest.raises(UserError, match="--arms nonsense: no such algorithm"):
        quickstart._arms("gtpo,nonsense")
    with pytest.raises(UserError, match="names no algorithm"):
        quickstart._arms(" , ")
    with pytest.raises(UserError, match="no embedded task 'countdwn'; did you mean countdown"):
        quickstart._task(["task=countdwn"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("show", "shown"),
    [
        (quickstart._show_lines, ["  33%  ", " gtpo 4/4: accuracy 0.50, entropy 1.20"]),
        (quickstart._show_bar, [" 33%", "gtpo 4/4: accuracy 0.50, entropy 1.20"]),
    ],
)
def test_progress_moves_with_and_without_a_terminal(tmp_path: Path, show, shown: list[str]):
    """The real command, which fails on a wrong override after a while, with steps that an earlier one has written."""
    data = {"training/accuracy": 0.5, "credit/entropy_all": 1.2}
    lines = [json.dumps({"step": step, "data": data}) for step in range(5)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    console = Console(file=io.StringIO(), force_terminal=show is quickstart._show_bar, width=100)
    training, seen = TrainingProcess(tmp_path, ["algo=nonsense"]), []
    with training.stoppable(lambda: None):
        show(training, "gtpo", Pace(4, after=2), console, seen.append)
    assert seen == [0, 1, 2, 3, 4]
    printed = console.file.getvalue()
    assert [text for text in shown if text not in printed] == []
    assert "100%" not in printed


@pytest.fixture
def trainings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> quickstart.Trainings:
    """Of two arms; their programs sleep, and print what they were called with."""
    handler = "signal.signal(signal.SIGINT, signal.default_int_handler)"  # a shell in the background ignores Ctrl-C
    script = f"import signal, sys, time; {handler}; print(*sys.argv[1:], flush=True); time.sleep(60)"
    program = [sys.executable, "-c", script]
    monkeypatch.setattr(psutil, "virtual_memory", lambda: argparse.Namespace(available=2**40))
    monkeypatch.setattr(quickstart, "TrainingProcess", functools.partial(TrainingProcess, program=program))
    return quickstart.Trainings(tmp_path, {"dapo": ["algo=dapo"], "gtpo": ["algo=gtpo", "seed=3"]}, memory=2**31)


def test_the_next_arm_starts_early_and_waits_for_its_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trainings: quickstart.Trainings
):
    first = trainings.start("dapo")
    with monkeypatch.context() as small:
        small.setattr(psutil, "virtual_memory", lambda: argparse.Namespace(available=2**30))
        trainings.start_early("gtpo", after="dapo")
        assert trainings._early == {}  # there is no room for two
    trainings.start_early("gtpo", after="dapo")
    early = trainings._early["gtpo"]
    trainings.start_early("gtpo", after="dapo")
    assert trainings.start("gtpo") is early
    assert trainings._early == {}
    while not early.log.read_text().strip() or not first.log.read_text().strip():
        time.sleep(0.05)
    waits = f"++ray_kwargs.ray_init.address=local trainer.after_run_dir={tmp_path / 'dapo'}"
    assert early.log.read_text().strip() == f"algo=gtpo seed=3 {waits}"
    assert first.log.read_text().strip() == "algo=dapo"
    for training in (first, early):
        training.kill()


def test_an_arm_whose_turn_does_not_come_is_ended(trainings: quickstart.Trainings):
    trainings.start_early("gtpo", after="dapo")
    early = trainings._early["gtpo"]
    while not early.log.read_text().strip():  # it handles signals from here on
        time.sleep(0.05)
    trainings.stop()
    early._process.wait(10)
    trainings.close()
    assert early.returncode != 0


def test_on_a_cluster_of_the_users_no_arm_starts_early(trainings: quickstart.Trainings):
    trainings._overrides["dapo"].append("ray_kwargs.ray_init.address=auto")
    trainings.start_early("dapo", after="gtpo")
    assert trainings._early == {}


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
