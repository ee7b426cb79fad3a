"""A verl user's command on verl's main and on ours, both by `verl_on_cpu.py` with the same shim: one key changes."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import megatron_harness
import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.exhaustive]

SUPPORT = Path(__file__).parents[1] / "support"
RUNNER = SUPPORT / "verl_on_cpu.py"
VERLS, OURS = "verl.trainer.main_ppo", "gtpo_verl.main_ppo"
ROLLOUT, ACTOR = "actor_rollout_ref.rollout", "actor_rollout_ref.actor"
TIMES = ("timing", "perf/", "throughput")  # metrics that no two runs share


@pytest.fixture(scope="module")
def run(task: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Train two steps; the metrics of each, without times. environment: added to that of every process."""

    def run(module: str, estimator: str, *more: str, **environment: str) -> list[dict[str, float]]:
        directory = tmp_path_factory.mktemp("run")
        overrides = (
            *(f"algorithm.adv_estimator={estimator}", f"actor_rollout_ref.model.path={task.model_path}"),
            *(f"data.train_files={task.train_file}", f"data.val_files={task.val_file}", "data.train_batch_size=8"),
            *("data.max_prompt_length=8", "data.max_response_length=32", "data.shuffle=false"),
            *(f"{ACTOR}.ppo_mini_batch_size=8", f"{ACTOR}.ppo_micro_batch_size_per_gpu=32", f"{ACTOR}.optim.lr=3e-4"),
            *(f"{ROLLOUT}.name=vllm", f"{ROLLOUT}.n=4", f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu=32"),
            *(f"{ROLLOUT}.max_model_len=64", f"{ROLLOUT}.max_num_batched_tokens=4096"),
            "reward.custom_reward_function.path=pkg://gtpo_verl.tasks.sums.reward",
            "reward.custom_reward_function.name=compute_score",
            *("trainer.logger=[console,file]", "trainer.total_training_steps=2", "trainer.val_before_train=false"),
            *("trainer.test_freq=-1", "trainer.save_freq=-1", "trainer.resume_mode=disable"),
        )
        done = subprocess.run(
            [sys.executable, str(RUNNER), module, *overrides, *more],
            cwd=directory,
            env=os.environ | {"VERL_FILE_LOGGER_ROOT": str(directory / "logs")} | environment,
            capture_output=True,
            text=True,
            timeout=900,
        )
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
        (file,) = (directory / "logs").rglob("*.jsonl")
        steps = [json.loads(line)["data"] for line in file.read_text().splitlines()]
        return [
            {name: value for name, value in step.items() if not any(part in name for part in TIMES)} for step in steps
        ]

    return run


def test_grpo_is_verls_own_and_gtpo_is_one_key_away(run: Any) -> None:
    """Responses are seeded, as those of two runs of stock verl differ; what is left is the order of sums in vLLM."""
    seeded = f"{ROLLOUT}.agent.agent_loop_config_path={SUPPORT / 'seeded_loop.yaml'}"
    stock, ours, gtpo = (
        run(module, estimator, seeded, PYTHONPATH=str(SUPPORT))
        for module, estimator in ((VERLS, "grpo"), (OURS, "grpo"), (OURS, "gtpo"))
    )
    assert ours == [pytest.approx(step, rel=1e-5, abs=2e-6) for step in stock]
    assert not any(name.startswith("credit/") for name in ours[0])
    assert len(gtpo) == 2
    for step in gtpo:
        assert step.keys() > stock[0].keys()
        assert step["credit/groups"] == 8
        assert step["credit/entropy_all"] == pytest.approx(step["actor/entropy"], rel=1e-5)


ENTROPIES = "algorithm.entropy.source"


def check_entropies(steps: list[dict[str, float]]) -> None:
    """Two steps with credit, in which the engine's entropies were the actor's but for rounding."""
    assert len(steps) == 2
    assert 0 < steps[0]["rollout_entropy/abs_diff_max"] < 1e-4  # of an asynchronous second step the weights are older
    for step in steps:
        assert step["credit/groups"] == 8
        assert step["credit/entropy_all"] > 0.01
        assert step["actor/grad_norm"] > 0


def test_entropies_of_the_rollout(run: Any) -> None:
    """From verl's own servers and agent loops, beside the actor's pass."""
    check_entropies(run(OURS, "gtpo", f"{ENTROPIES}=both"))


def test_colocate_async(run: Any) -> None:
    more = ("trainer.v1.trainer_mode=colocate_async", f"{ENTROPIES}=rollout", "algorithm.entropy.check_every=1")
    check_entropies(run(OURS, "grpo_s", *more))


def test_separate_async(run: Any) -> None:
    """Servers apart from the trainer, the weights sent over gloo, two updates a step.

    Without a hybrid engine verl 0.9.1 logs a line with an argument that logging does not know, at the level INFO.
    """
    more = (
        *("trainer.v1.trainer_mode=separate_async", "trainer.v1.separate_async.parameter_sync_step=2"),
        *("actor_rollout_ref.hybrid_engine=false", f"{ROLLOUT}.nnodes=1", f"{ROLLOUT}.n_gpus_per_node=1"),
        *(f"{ACTOR}.ppo_mini_batch_size=4", f"{ACTOR}.ppo_micro_batch_size_per_gpu=16"),
        *(f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu=16", "ray_kwargs.ray_init.num_gpus=2"),
        f"{ROLLOUT}.checkpoint_engine.backend=gloo",
        f"++{ROLLOUT}.checkpoint_engine.custom_backend_module=gloo_engine",
    )
    steps = run(OURS, "gtpo", *more, PYTHONPATH=str(RUNNER.parent), VERL_LOGGING_LEVEL="WARN")
    assert len(steps) == 2
    assert all(step["credit/entropy_all"] > 0.01 for step in steps)
    assert all(step["credit/groups"] > 0 for step in steps)


def test_megatron(run: Any) -> None:
    """Two tensor-parallel ranks."""
    layout = megatron_harness.LAYOUTS["tp2"]
    more = (
        *("model_engine=megatron", "trainer.n_gpus_per_node=2", "ray_kwargs.ray_init.num_gpus=2"),
        *(f"++{ACTOR}.megatron.{key}={value}" for key, value in layout.settings().items()),
        f"{ENTROPIES}=both",
    )
    check_entropies(run(OURS, "gtpo", *more, **megatron_harness.environment()))
