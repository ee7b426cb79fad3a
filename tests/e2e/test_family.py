"""A training with another method at every step, all that are registered, on real verl, Ray and vLLM."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from metrics_doc import undocumented

from gtpo_verl.algorithms import Batch, algorithm, algorithms
from gtpo_verl.config import compose_config
from gtpo_verl.integrations.estimators import group_ids
from gtpo_verl.integrations.transfer_queue import uid_of

pytestmark = [pytest.mark.e2e, pytest.mark.exhaustive]

NAMES = tuple(algorithms())
Start = Callable[..., Any]
Metrics = Callable[[Path], dict[int, dict[str, Any]]]

COMMON = (
    "algorithm.filter_groups.enable=false",
    "reward.reward_kwargs.overlong_buffer_cfg.enable=false",  # so that the rewards in a dump are those of the verifier
    "algorithm.gtpo.length_penalty=none",
    "algorithm.grpo_s.length_penalty=none",
)


@pytest.fixture(scope="module")
def run_dir(start: Start, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two updates a step, so that ratios are not all 1, and small ones: 31 methods one after the other must not leave
    a policy that is always wrong, whose groups teach nothing.
    """
    directory = tmp_path_factory.mktemp("family")
    (directory / "notes").mkdir()
    environment = {
        "PYTHONPATH": os.pathsep.join(
            filter(None, [str(Path(__file__).with_name("recorder")), os.environ.get("PYTHONPATH")])
        ),
        "GTPO_VERL_RECORD": str(directory / "notes"),
        "GTPO_VERL_TEST_ALGORITHMS": json.dumps([[f"algo={name}", *COMMON] for name in NAMES]),
    }
    training = start(
        directory / "run",
        *(f"algo={NAMES[0]}", *COMMON, f"trainer.total_training_steps={len(NAMES)}", "trainer.credit_dump_freq=1"),
        *("data.train_batch_size=8", "actor_rollout_ref.rollout.n=4", "actor_rollout_ref.actor.ppo_mini_batch_size=4"),
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=16",
        "actor_rollout_ref.actor.optim.lr=3e-5",
        environment=environment,
    )
    return training.wait_for_end(seconds=1200)


@pytest.mark.parametrize("name", NAMES)
def test_a_step_was_trained_with_the_method(run_dir: Path, metrics: Metrics, name: str) -> None:
    step = NAMES.index(name) + 1
    data = metrics(run_dir)[step]
    assert 0 < data["actor/grad_norm"] < 1e3
    assert undocumented(key for key in data if key.startswith("credit/")) == set()
    batch = torch.load(run_dir / "credit" / f"{step}.pt")
    assert batch["advantages"].any(), "a step in which no group has contrast compares zeros"
    given = Batch(
        batch["response_mask"],
        group_ids([uid_of(key) for key in batch["keys"]]),
        batch["correct"],
        batch["entropy"],
        batch["rewards"].sum(1),
        batch["old_log_probs"],
    )
    if name == "random20":
        kept = (batch["advantages"] != 0).sum() / (algorithm("dapo").advantages(given).advantages != 0).sum()
        assert 0.05 < kept < 0.4
        return
    if name == "gtpo_shuffled":
        gtpo = algorithm("gtpo").advantages(given, algorithm("gtpo").config(entropy_floor=1e-3)).advantages.float()
        torch.testing.assert_close(batch["advantages"].flatten().sort().values, gtpo.flatten().sort().values)
        return
    settings, _ = algorithm(name).configure(compose_config([f"algo={name}", *COMMON]).algorithm.get(name) or {})
    expected = algorithm(name).advantages(given, settings).advantages
    torch.testing.assert_close(batch["advantages"], expected.float(), atol=2e-5, rtol=2e-5)
