"""``gtpo-verl train``: Ctrl-C saves a checkpoint, and entropies of the rollout can stand for the actor's."""

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytestmark = pytest.mark.e2e

Training = Any  # tests/e2e/conftest.py
Start = Callable[..., Training]
Metrics = Callable[[Path], dict[int, dict[str, Any]]]


@pytest.fixture(scope="module")
def from_rollout(start: Start, tmp_path_factory: pytest.TempPathFactory) -> Training:
    """Started, not awaited: it runs beside the other one."""
    return start(
        tmp_path_factory.mktemp("from_rollout") / "run",
        *("algo=gtpo", "algorithm.entropy.source=rollout", "trainer.total_training_steps=3"),
    )


def test_ctrl_c_saves_a_checkpoint(start: Start, from_rollout: Training, metrics: Metrics, tmp_path: Path) -> None:
    """And the next call goes on from a checkpoint: tests/e2e/test_dynamic_sampling.py. What it trained on without shaping is known."""
    training = start(
        tmp_path / "run",
        *("algo=gtpo", "trainer.total_training_steps=200", "trainer.save_freq=100", "trainer.credit_dump_freq=1"),
        *("algorithm.gtpo.alpha2=0", "algorithm.gtpo.length_penalty=none"),
    )
    training.wait_for_step(1)
    training.process.send_signal(signal.SIGINT)
    run_dir = training.wait_for_end()
    last = max(metrics(run_dir))
    assert last < 100
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


def test_entropies_of_the_rollout_replace_the_actors_pass(from_rollout: Training, metrics: Metrics) -> None:
    """source=rollout: GTPO runs on the rollout's entropies; verl's old-log-prob pass is run twice for a comparison, then skipped."""
    steps = metrics(from_rollout.wait_for_end())
    for data in steps.values():
        assert data["credit/entropy_all"] > 0.01
        assert data["credit/advantage_spread"] > 1e-3
    for compared in (1, 2):
        assert 0 < steps[compared]["rollout_entropy/abs_diff_max"] < 1e-4
        assert steps[compared]["rollout_entropy/stale_share"] == 0
        assert steps[compared]["rollout_entropy/check_s"] > 0
    assert "actor/entropy" not in steps[3]
    assert steps[3]["rollout_entropy/time_saved_s"] > 0
