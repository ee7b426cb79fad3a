"""``gtpo-verl train``: Ctrl-C saves a checkpoint, and entropies of the rollout can stand for the actor's."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gtpo_verl.quickstart.task import Task

pytestmark = pytest.mark.e2e

Train = Callable[..., Path]
Metrics = Callable[[Path], dict[int, dict[str, Any]]]


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[bytes], seconds: float = 400) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, "the training ended early"
        assert time.monotonic() < deadline, "it took too long"
        time.sleep(0.5)


def test_ctrl_c_saves_a_checkpoint(task: Task, metrics: Metrics, tmp_path: Path) -> None:
    """And the next call goes on from a checkpoint: tests/e2e/test_dynamic_sampling.py. What it trained on without shaping is known."""
    run_dir = tmp_path / "run"
    command = [
        *(sys.executable, "-m", "gtpo_verl.train", "algo=gtpo", "setting=quickstart", "hardware=cpu"),
        f"actor_rollout_ref.model.path={task.model_path}",
        f"data.train_files={task.train_file}",
        f"data.val_files={task.val_file}",
        f"trainer.run_dir={run_dir}",
        *("trainer.val_before_train=False", "trainer.test_freq=-1", "trainer.total_training_steps=200"),
        *("trainer.credit_dump_freq=1", "algorithm.gtpo.alpha2=0", "algorithm.gtpo.length_penalty=none"),
    ]
    log = (tmp_path / "log").open("wb")
    process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, cwd=tmp_path, start_new_session=True)
    try:
        wait_for(lambda: (run_dir / "metrics.jsonl").exists(), process)
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=200) == 0
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    last = max(metrics(run_dir))
    assert last < 200
    assert (run_dir / "checkpoints" / f"global_step_{last}").is_dir()
    assert (run_dir / "model").exists()
    for step in range(1, last + 1):
        assert_token_weighted_grpo(torch.load(run_dir / "credit" / f"{step}.pt"))


def assert_token_weighted_grpo(batch: dict[str, Any]) -> None:
    """α2 = 0: every token of a response has the same advantage, its verdict normalised over the group's tokens."""
    mask, verdict = batch["response_mask"], batch["correct"].double()
    names = np.array([key.rsplit("_", 2)[0] for key in batch["keys"]], dtype=object)
    compared = 0
    for name in set(names):
        rows = torch.from_numpy(names == name) & mask.any(-1)
        if not rows.any():
            continue
        tokens = verdict[rows].repeat_interleave(mask[rows].sum(-1))
        expected = (verdict[rows] - tokens.mean()) / (tokens.std() + 1e-6)
        wrong_tokens = (1 - verdict[rows]).repeat_interleave(mask[rows].sum(-1))
        negative = -((1 - verdict[rows]) - wrong_tokens.mean()) / (wrong_tokens.std() + 1e-6)
        expected = torch.where(verdict[rows] > 0, expected, negative)
        got = batch["advantages"][rows].double()
        torch.testing.assert_close(got, expected[:, None] * mask[rows], atol=1e-5, rtol=0)
        compared += 1
    assert compared >= 2


def test_entropies_of_the_rollout_replace_the_actors_pass(train: Train, metrics: Metrics, tmp_path: Path) -> None:
    """source=rollout: GTPO runs on the rollout's entropies; verl's old-log-prob pass is run twice for a comparison, then skipped."""
    run_dir = train(tmp_path / "run", "algo=gtpo", "algorithm.entropy.source=rollout", "trainer.total_training_steps=3")
    steps = metrics(run_dir)
    for data in steps.values():
        assert data["credit/entropy_all"] > 0.01
        assert data["credit/advantage_spread"] > 1e-3
    for compared in (1, 2):
        assert 0 < steps[compared]["rollout_entropy/abs_diff_max"] < 1e-4
        assert steps[compared]["rollout_entropy/stale_share"] == 0
        assert steps[compared]["rollout_entropy/check_s"] > 0
    assert "actor/entropy" not in steps[3]
    assert steps[3]["rollout_entropy/time_saved_s"] > 0
