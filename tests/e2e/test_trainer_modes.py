"""verl's asynchronous trainers with the rollout's entropies, on real verl, Ray and vLLM; and an engine that dies under
one.
"""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gloo_engine
import psutil
import pytest
import torch

pytestmark = [pytest.mark.e2e, pytest.mark.exhaustive]

Training = Any  # tests/e2e/conftest.py
Start = Callable[..., Training]
Metrics = Callable[[Path], dict[int, dict[str, Any]]]

SUPPORT = Path(gloo_engine.__file__).parent

# Small steps: what is tested is who computes which entropy with which weights, not learning.
SMALL = (
    *("data.train_batch_size=8", "actor_rollout_ref.actor.ppo_mini_batch_size=8", "actor_rollout_ref.rollout.n=4"),
    *("actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=32", "trainer.credit_dump_freq=1"),
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=32",
    "algorithm.filter_groups.enable=false",
)
# Responses that run to their limit, four at a time: the queue lasts longer than a step, and weights change in the
# middle of some.
LONG = (
    *("actor_rollout_ref.rollout.ignore_eos=true", "data.max_response_length=100"),
    *("actor_rollout_ref.rollout.max_model_len=128", "actor_rollout_ref.rollout.max_num_seqs=4"),
    "reward.custom_reward_function.name=random_verdict",  # all of these responses are wrong: no update
)


@pytest.fixture(scope="module")
def separate_async(start: Start, tmp_path_factory: pytest.TempPathFactory) -> Training:
    """Servers of their own, apart from the trainer: two logical devices, one of them the rollout's; a step has two
    updates between
    which no weights are sent. Started, not awaited."""
    return start(
        tmp_path_factory.mktemp("separate") / "run",
        *("algo=dapo", "trainer.v1.trainer_mode=separate_async", "algorithm.entropy.source=rollout"),
        "algorithm.entropy.check_every=1",
        *("trainer.v1.separate_async.parameter_sync_step=2", "trainer.total_training_steps=3", *SMALL, *LONG),
        *("actor_rollout_ref.actor.ppo_mini_batch_size=4", "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=16"),
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=16",
        *("actor_rollout_ref.hybrid_engine=false", "actor_rollout_ref.rollout.nnodes=1"),
        *("actor_rollout_ref.rollout.n_gpus_per_node=1", "ray_kwargs.ray_init.num_gpus=2"),
        "actor_rollout_ref.rollout.checkpoint_engine.backend=gloo",
        "actor_rollout_ref.rollout.checkpoint_engine.custom_backend_module=gloo_engine",
        environment={"PYTHONPATH": os.pathsep.join(filter(None, [str(SUPPORT), os.environ.get("PYTHONPATH")]))},
    )


COMPARED = (1, 2, 4)  # of colocate_async's steps: the first two, and every third from the first on


@pytest.fixture(scope="module")
def colocate_async(start: Start, separate_async: Training, tmp_path_factory: pytest.TempPathFactory) -> Training:
    """A training that has come to its fourth step and would go on for ever; the other one is started beside it."""
    training = start(
        tmp_path_factory.mktemp("colocate") / "run",
        *("algo=grpo_s", "trainer.v1.trainer_mode=colocate_async", "algorithm.entropy.source=rollout"),
        *("algorithm.entropy.check_every=3", "trainer.total_training_steps=100000", *SMALL, *LONG),
    )
    training.wait_for_step(4)
    return training


def test_colocate_async_agrees_with_the_actor_on_every_token_of_its_weights(
    colocate_async: Training, metrics: Metrics
) -> None:
    compared = 0
    for step in COMPARED:
        data = metrics(colocate_async.run_dir)[step]
        if data["rollout_entropy/stale_share"] == 1:  # nothing in this step was sampled from its weights
            continue
        assert data["rollout_entropy/abs_diff_max"] < 1e-4, f"step {step}"
        assert data["rollout_entropy/correlation"] > 0.9999
        compared += 1
    assert compared > 0


def test_colocate_async_stamps_each_token_with_the_weights_that_sampled_it(
    colocate_async: Training, metrics: Metrics
) -> None:
    spans = 0
    for step in range(1, 5):
        batch = torch.load(colocate_async.run_dir / "credit" / f"{step}.pt")
        for versions, mask in zip(batch["rollout_versions"], batch["response_mask"], strict=True):
            stamps = versions[mask].tolist()
            assert stamps == sorted(stamps)
            assert all(0 <= stamp < step for stamp in stamps)
            spans += len(set(stamps)) > 1
        stale = (batch["rollout_versions"] < step - 1)[batch["response_mask"]].float().mean().item()
        if step in COMPARED:
            assert metrics(colocate_async.run_dir)[step]["rollout_entropy/stale_share"] == pytest.approx(stale)
        assert torch.equal(batch["entropy"], batch["rollout_entropies"])
    assert spans > 0, "no response was interrupted by an update"


def test_old_log_probs_stay_the_rollouts_in_a_step_that_is_compared(colocate_async: Training, metrics: Metrics) -> None:
    data = metrics(colocate_async.run_dir)[2]
    assert data["rollout_entropy/check_s"] > 0
    batch = torch.load(colocate_async.run_dir / "credit" / "2.pt")
    mask = batch["response_mask"]
    assert torch.equal(batch["old_log_probs"][mask], batch["rollout_log_probs"][mask])
    # the actor's would be others: some of these tokens were sampled by older weights
    assert data["rollout_entropy/stale_abs_diff_mean"] > 1e-4


def test_a_step_that_is_not_compared_does_without_the_actors_pass(colocate_async: Training, metrics: Metrics) -> None:
    steps = metrics(colocate_async.run_dir)
    assert "rollout_entropy/check_s" not in steps[3]
    assert "actor/entropy" not in steps[3]
    assert steps[3]["rollout_entropy/time_saved_s"] > 0
    assert all(steps[step]["rollout_entropy/check_s"] > 0 for step in COMPARED)
    assert all(steps[step]["credit/entropy_all"] > 0.01 for step in range(1, 5))


def test_a_killed_engine_ends_the_training_with_its_name(colocate_async: Training) -> None:
    """Runs last: the training does not survive it."""
    started = colocate_async.process.children(recursive=True)
    (engine,) = colocate_async.engines()
    engine.kill()
    killed = time.monotonic()
    assert colocate_async.process.wait(timeout=60) not in (0, None)
    assert time.monotonic() - killed < 60
    (error,) = [line for line in colocate_async.output().splitlines() if line.startswith("error: ")]
    assert "vLLM died" in error
    assert str(colocate_async.run_dir) in error
    assert json.loads((colocate_async.run_dir / "run.json").read_text())["status"] == "failed"
    _, left = psutil.wait_procs(started, timeout=20)
    assert left == []


def test_separate_async_samples_with_the_weights_that_it_was_sent(separate_async: Training, metrics: Metrics) -> None:
    run_dir = separate_async.wait_for_end()
    compared = []
    versions: dict[int, set[int]] = {}
    for step, data in metrics(run_dir).items():
        batches = [torch.load(run_dir / "credit" / f"{step}-{update}.pt") for update in (0, 1)]
        stamps = torch.cat([batch["rollout_versions"][batch["response_mask"]] for batch in batches])
        versions[step] = set(stamps.tolist())
        assert versions[step] <= set(range(step))
        assert (data["rollout_entropy/stale_share"] > 0) == (versions[step] != {step - 1})
        if step - 1 in versions[step]:  # else the servers were a whole step ahead of the actor
            assert data["rollout_entropy/abs_diff_max"] < 1e-4, f"step {step}"
            compared.append(step)
    assert max(compared) > 1  # weights of a later step arrived over gloo, and were those of their stamp
