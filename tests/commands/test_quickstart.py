"""What the quickstart hands to its trainings, and which run it resumes; the whole command is run in tests/e2e."""

import argparse
import json
from pathlib import Path

import pytest

from gtpo_verl.commands import quickstart
from gtpo_verl.config import compose_config
from gtpo_verl.errors import UserError
from gtpo_verl.tasks import Task, task


def parsed(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    quickstart.add_arguments(parser)
    return parser.parse_args(arguments)


@pytest.mark.parametrize(("arguments", "verdicts"), [((), "compute_score"), (("--random-verdicts",), "random_verdict")])
def test_overrides_compose_to_a_training_on_the_task(tmp_path: Path, arguments: tuple, verdicts: str):
    prepared = Task(tmp_path / "model", tmp_path / "train.parquet", tmp_path / "val.parquet", {})
    args = parsed("--steps", "3", *arguments, "trainer.save_freq=2")
    config = compose_config(quickstart._overrides("gtpo", tmp_path / "run", task("sums"), prepared, args))
    assert config.algorithm.adv_estimator == "gtpo"
    assert (config.trainer.total_training_steps, config.trainer.save_freq) == (3, 2)
    assert config.data.val_files == str(tmp_path / "val.parquet")
    function = config.reward.custom_reward_function
    assert (function.path, function.name) == ("pkg://gtpo_verl.tasks.sums.reward", verdicts)


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


def test_arms_must_be_presets():
    with pytest.raises(UserError, match="--arms nonsense: no such algorithm"):
        quickstart._arms("gtpo,nonsense")
    with pytest.raises(UserError, match="names no algorithm"):
        quickstart._arms(" , ")
