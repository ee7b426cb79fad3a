"""A method in three files, those of CONTRIBUTING.md's example: composed, planned, trained for a step and reported."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from run_writer import RunWriter
from three_files import NAME

pytestmark = pytest.mark.e2e

STEP = 6  # of the quickstart, tests/e2e/conftest.py
Metrics = Callable[[Path], dict[int, dict[str, Any]]]


@pytest.fixture
def command(extended: Path) -> Callable[..., str]:
    """Run ``gtpo-verl`` with the method; returns what it prints."""

    def run(*words: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "gtpo_verl.cli", *words],
            env=os.environ | {"PYTHONPATH": str(extended)},
            cwd=extended,  # `-m` looks in the current directory first
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


def test_it_was_trained_for_a_step(quickstart: Any, metrics: Metrics) -> None:
    """On the reward of each response, overlong penalty included, less the mean of the others."""
    batch = torch.load(quickstart.arm / "credit" / f"{STEP}.pt")
    uids = [key.rsplit("_", 2)[0] for key in batch["keys"]]
    rewards = batch["rewards"].sum(-1)
    real = batch["response_mask"].any(-1)
    expected = torch.zeros_like(rewards)
    for row, uid in enumerate(uids):
        others = [i for i, other in enumerate(uids) if other == uid and i != row and real[i]]
        if real[row] and others:
            expected[row] = rewards[row] - rewards[others].mean()
    assert expected.abs().max() > 0.5
    torch.testing.assert_close(batch["advantages"], expected[:, None] * batch["response_mask"], atol=1e-6, rtol=0)
    data = metrics(quickstart.arm)[STEP]
    assert data["credit/advantage_spread"] == pytest.approx(0, abs=1e-6)
    assert 0 < data["actor/grad_norm"] < 100


def test_its_settings_are_keys_of_a_run(command: Callable[..., str]) -> None:
    composed = yaml.safe_load(command("train", f"algo={NAME}", f"algorithm.{NAME}.scale=2", "--cfg"))
    assert composed["algorithm"]["adv_estimator"] == NAME
    assert composed["algorithm"][NAME] == {"scale": 2}


@pytest.mark.exhaustive
def test_it_is_planned(command: Callable[..., str]) -> None:
    plan = json.loads(command("plan", f"algo={NAME}", "setting=small_gpu", "--json"))
    assert plan["algorithm"] == NAME
    assert NAME in [arm["arm"] for arm in plan["arms"]]


@pytest.mark.exhaustive
def test_it_is_reported_under_its_label(command: Callable[..., str], runs: RunWriter) -> None:
    run = runs.run("mine", arms=("dapo", "gtpo"))
    config = run / "gtpo" / "config.yaml"
    written = yaml.safe_load(config.read_text())
    written["algorithm"]["adv_estimator"] = NAME
    config.write_text(yaml.safe_dump(written))
    assert "Leave-one-out" in command("report", str(run), "--output", str(run / "report"))
    assert "Leave-one-out" in (run / "report" / "report.html").read_text()
