"""A verl user's command on verl's main and on ours, both by `verl_on_cpu.py` with the same shim: one key changes."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.exhaustive]

RUNNER = Path(__file__).parents[1] / "support" / "verl_on_cpu.py"
VERLS, OURS = "verl.trainer.main_ppo", "gtpo_verl.main_ppo"
ROLLOUT, ACTOR = "actor_rollout_ref.rollout", "actor_rollout_ref.actor"
TIMES = ("timing", "perf/", "throughput")  # metrics that no two runs share


@pytest.fixture(scope="module")
def run(task: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Train two steps; the metrics of each, without times."""

    def run(module: str, estimator: str, *more: str) -> list[dict[str, float]]:
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
            env=os.environ | {"VERL_FILE_LOGGER_ROOT": str(directory / "logs")},
            capture_output=True,
            text=True,
            timeout=900,
        )
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
        (file,) = (directory / "logs").rglob("*.jsonl")
        steps = [json.loads(line)["data"] for line in file.read_text().splitlines()]
        return [{name: value for name, value in step.items() if not name.startswith(TIMES)} for step in steps]

    return run


def test_grpo_is_verls_own_and_gtpo_is_one_key_away(run: Any) -> None:
    stock, ours, gtpo = run(VERLS, "grpo"), run(OURS, "grpo"), run(OURS, "gtpo")
    assert [step.keys() for step in ours] == [step.keys() for step in stock]
    assert not any(name.startswith("credit/") for name in ours[0])
    assert len(gtpo) == 2
    for step in gtpo:
        assert step.keys() > stock[0].keys()
        assert step["credit/groups"] == 8
        assert step["credit/entropy_all"] == pytest.approx(step["actor/entropy"], rel=1e-5)
