"""The quickstart as a user runs it: three arms, five steps each, killed and resumed on the way; `make test-exhaustive`.

`make test` has one arm whose steps change the algorithm (test_quickstart.py), and a resume in test_dynamic_sampling.py.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gtpo_verl.experiments.scheduler import unfinished
from gtpo_verl.runs.directory import METRICS_FILE
from gtpo_verl.runs.sweep import load
from gtpo_verl.tasks import Task

pytestmark = [pytest.mark.e2e, pytest.mark.exhaustive]

ARMS = ("dapo", "gtpo", "grpo_s")
STEPS = 5
Metrics = Callable[[Path], dict[int, dict[str, Any]]]


@pytest.fixture(scope="module")
def three_arms(task: Task, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A quickstart of five steps an arm with few validation samples: its run directory, and what it printed.

    It is killed in its first arm, as by the kernel, and the same command goes on.
    """
    output = tmp_path_factory.mktemp("outputs")
    (output / "task-sums").symlink_to(task.model_path.parent)
    command = [
        *("taskset", "--cpu-list", ",".join(map(str, sorted(os.sched_getaffinity(0))[:2]))),  # one arm after the other
        *(sys.executable, "-m", "gtpo_verl.cli", "quickstart", "--output", str(output), "--steps", str(STEPS)),
        "data.val_max_samples=32",
        # two updates a step, so that something is clipped in the second
        *("actor_rollout_ref.actor.ppo_mini_batch_size=12", "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=48"),
    ]
    with (output / "killed.log").open("w") as log:
        killed = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    deadline = time.monotonic() + 600
    while not list(output.glob(f"quickstart-*/dapo/{METRICS_FILE}")):
        assert killed.poll() is None, (output / "killed.log").read_text()
        assert time.monotonic() < deadline
        time.sleep(0.2)
    killed.kill()
    killed.wait()
    done = subprocess.run(command, capture_output=True, text=True, timeout=2000)
    logs = "\n".join(log.read_text()[-3000:] for log in output.glob("quickstart-*/*/train.log"))
    assert done.returncode == 0, done.stdout + done.stderr + logs
    return next(output.glob("quickstart-*")), done.stdout


def test_every_arm_trained_to_its_end(three_arms: tuple[Path, str], metrics: Metrics) -> None:
    directory, _ = three_arms
    sweep = load(directory)
    assert (list(sweep.runs), unfinished(sweep)) == (list(ARMS), [])
    for arm in ARMS:
        steps = metrics(directory / arm)
        assert sorted(steps) == [0, *range(1, STEPS + 1)]
        assert json.loads((directory / arm / "run.json").read_text())["status"] == "complete"
        assert any(key.startswith("val-core/") and "/acc/mean@" in key for key in steps[STEPS])


def test_the_report_grows_with_every_arm(three_arms: tuple[Path, str]) -> None:
    directory, printed = three_arms
    assert printed.count(f"report so far: {directory / 'report.html'}") == len(ARMS) - 1


def test_a_killed_quickstart_stops_its_arm_and_goes_on_with_it(three_arms: tuple[Path, str], metrics: Metrics) -> None:
    """No step is trained twice, and never two trainings in one directory."""
    directory, printed = three_arms
    assert f"Resuming: {directory}" in printed
    assert len(list(directory.parent.glob("quickstart-*"))) == 1
    log = (directory / "dapo" / "train.log").read_text()
    assert log.count("Stopping after this step, with a checkpoint") == 1
    lines = [json.loads(line) for line in (directory / "dapo" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "actor/pg_loss" in line["data"]] == [*range(1, STEPS + 1)]


def test_entropies_of_the_rollouts_are_those_of_the_actor(three_arms: tuple[Path, str], metrics: Metrics) -> None:
    directory, _ = three_arms
    for arm in ARMS:
        for step in range(1, STEPS + 1):
            data = metrics(directory / arm)[step]
            # above 0: two programs computed them; a comparison of one with itself would show exactly 0
            assert 0 < data["rollout_entropy/abs_diff_mean"] <= data["rollout_entropy/abs_diff_max"] < 1e-4
            assert data["credit/entropy_all"] > 0.01


def test_credit_differs_inside_a_response_for_gtpo_alone(three_arms: tuple[Path, str], metrics: Metrics) -> None:
    directory, _ = three_arms
    spread = {
        arm: [metrics(directory / arm)[step]["credit/advantage_spread"] for step in range(1, STEPS + 1)] for arm in ARMS
    }
    assert max(spread["dapo"]) == pytest.approx(0, abs=1e-6)
    assert max(spread["grpo_s"]) == pytest.approx(0, abs=1e-6)
    assert min(spread["gtpo"]) > 1e-3


def test_every_step_logs_what_a_reader_needs(three_arms: tuple[Path, str], metrics: Metrics) -> None:
    directory, _ = three_arms
    shaped = {"shaped_correct_mean", "shaped_correct_std", "shaped_wrong_mean", "shaped_wrong_std"}
    names = (
        *("sign_flip_correct", "sign_flip_wrong", "entropy_correct", "entropy_wrong"),
        *("tail_alive_correct", "tail_alive_wrong", "degenerate_share"),
    )
    for arm in ARMS:
        for step in range(1, STEPS + 1):
            data = metrics(directory / arm)[step]
            assert [name for name in names if f"credit/{name}" not in data] == []
            # verl's own estimator has no shaped rewards
            assert {name for name in shaped if f"credit/{name}" in data} == (set() if arm == "dapo" else shaped)
            if arm != "grpo_s":  # the ratio of a sequence stays too close to 1
                assert data["actor/pg_clipfrac"] > 0
            assert 0 < data["training/filter_groups/yield"] <= 1


def test_the_report_and_the_models_are_there(three_arms: tuple[Path, str]) -> None:
    from transformers import AutoModelForCausalLM

    directory, printed = three_arms
    assert str(directory / "report.html") in printed
    page = (directory / "report.html").read_text()
    assert all(name in page for name in ("DAPO", "GTPO", "GRPO-S"))
    assert list((directory / "figures").glob("*.png"))
    for arm in ARMS:
        assert AutoModelForCausalLM.from_pretrained(directory / arm / "model").num_parameters() > 600_000


def test_a_second_call_has_nothing_left_to_train(three_arms: tuple[Path, str]) -> None:
    """A finished quickstart is not touched again: the next one is a new run, beside it."""
    from gtpo_verl.commands.quickstart import _sweep

    directory, _ = three_arms
    fresh, resumed = _sweep(directory.parent, ARMS, load(directory).common, fresh=False)
    assert not resumed
    assert fresh.directory != directory
    fresh.directory.rmdir()


def test_no_training_is_left_running(three_arms: tuple[Path, str]) -> None:
    import psutil

    directory, _ = three_arms
    mine = [
        process
        for process in psutil.process_iter(["cmdline"])
        if str(directory) in " ".join(process.info["cmdline"] or [])
    ]
    assert mine == []
