"""A plan says what the trainer does: the quickstart against its plan, and scaled-down copies of the paper settings
trained one step.

The copies are part of `make test-exhaustive`.
Prompts, mini-batches and lengths are those of the paper divided by one number each, so the responses a prompt and the
updates a step are the paper's own. What really happened is read from what a training leaves behind: the optimizer's own
count of its steps, the rows of the batch, the tokens and the groups that were generated.
"""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from gtpo_verl.tasks import Task

pytestmark = pytest.mark.e2e

Training = Any  # tests/e2e/conftest.py
Start = Callable[..., Training]
Metrics = Callable[[Path], dict[int, dict[str, Any]]]

# name: (algorithm, its prompts and mini-batch divided by this, micro-batches by tokens or by responses)
COPIES = {"paper_gtpo_32b": ("gtpo", 32, False), "paper_dapo_32b": ("dapo", 32, True)}


def scaled_down(setting: str, task: Task) -> list[str]:
    """Overrides for a copy that two CPU cores train in a minute: one rank, the embedded task and its model."""
    from gtpo_verl.config import compose_config

    algo, by, tokens = COPIES[setting]
    paper = compose_config([f"setting={setting}"])
    actor = paper.actor_rollout_ref.actor
    overlong = paper.reward.reward_kwargs.overlong_buffer_cfg.len
    buffer = "null" if overlong is None else 32 * overlong // paper.data.max_response_length
    return [
        *(f"algo={algo}", f"setting={setting}", "~layout", "hardware=cpu"),
        f"actor_rollout_ref.model.path={task.model_path}",
        f"data.train_files={task.train_file}",
        f"data.val_files={task.val_file}",
        f"data.train_batch_size={paper.data.train_batch_size // by}",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={actor.ppo_mini_batch_size // by}",
        *("data.max_prompt_length=8", "data.max_response_length=32"),
        f"reward.reward_kwargs.overlong_buffer_cfg.len={buffer}",
        "reward.custom_reward_function.path=pkg://gtpo_verl.tasks.sums.reward",
        "reward.custom_reward_function.name=compute_score",
        f"actor_rollout_ref.actor.use_dynamic_bsz={tokens}",
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=160",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=16",
        *("actor_rollout_ref.rollout.max_model_len=64", "actor_rollout_ref.rollout.max_num_seqs=1024"),
        "actor_rollout_ref.rollout.gpu_memory_utilization=0.5",
        *("trainer.nnodes=1", "trainer.n_gpus_per_node=1", "trainer.total_training_steps=1", "trainer.save_freq=1"),
        *("trainer.val_before_train=false", "trainer.test_freq=-1", "trainer.credit_dump_freq=1"),
    ]


def planned(overrides: list[str], run_dir: Path) -> dict[str, Any]:
    """The plan of the same overrides, with the lengths and the yield that the run measured, as a program gets it."""
    command = [sys.executable, "-m", "gtpo_verl.cli", "plan", *overrides, "--measured", str(run_dir), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=run_dir)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout)


def test_a_step_of_the_quickstart_is_what_the_plan_says(quickstart: Any, task: Task, metrics: Metrics) -> None:
    logged = metrics(quickstart.arm)[1]
    overrides = [
        *("algo=gtpo", "setting=quickstart", "hardware=cpu", "trainer.n_gpus_per_node=2"),
        f"actor_rollout_ref.model.path={task.model_path}",
        *(f"data.train_files={task.train_file}", f"data.val_files={task.val_file}"),
    ]
    step, last = planned(overrides, quickstart.arm)["step"], quickstart.last_step
    batch = torch.load(quickstart.arm / "credit" / "1.pt")
    assert step["prompts"] == len({key.rsplit("_", 2)[0] for key in batch["keys"]}) == 24
    assert step["responses"] == int(batch["response_mask"].any(-1).sum()) == 24 * 8
    optimizer = torch.load(
        next(quickstart.arm.glob(f"checkpoints/global_step_{last}/actor/optim_*.pt")),
        map_location="cpu",
        weights_only=False,
    )
    assert {int(state["step"]) for state in optimizer["state"].values()} == {last * step["updates"]}
    assert logged["training/filter_groups/kept_groups"] == step["prompts"]


@pytest.fixture(scope="module")
def trainings(start: Start, task: Task, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Training]:
    """Both, started together."""
    base = tmp_path_factory.mktemp("plan")
    return {setting: start(base / setting, *scaled_down(setting, task), bare=True) for setting in COPIES}


@pytest.mark.exhaustive
@pytest.mark.parametrize("setting", COPIES)
def test_a_step_is_what_the_plan_says(
    setting: str, task: Task, metrics: Metrics, trainings: dict[str, Training]
) -> None:
    run_dir = trainings[setting].wait_for_end()
    overrides = scaled_down(setting, task)
    plan = planned(overrides, run_dir)
    step, logged = plan["step"], metrics(run_dir)[1]
    optimizer = torch.load(
        next(run_dir.glob("checkpoints/global_step_1/actor/optim_*.pt")), map_location="cpu", weights_only=False
    )
    updates = {int(state["step"]) for state in optimizer["state"].values()}
    assert updates == {step["updates"]}
    assert step["updates"] == {"paper_gtpo_32b": 4, "paper_dapo_32b": 16}[setting]

    batch = torch.load(run_dir / "credit" / "1.pt")
    rows = batch["response_mask"].any(-1)  # a row that verl adds to fill the batch has no token of its own
    assert logged["training/filter_groups/kept_groups"] == step["prompts"], (
        "dynamic sampling found too few groups to compare"
    )
    assert int(rows.sum()) == len(rows) == step["responses"]
    assert len({key.rsplit("_", 2)[0] for key in batch["keys"]}) == step["prompts"]
    assert logged["perf/total_num_tokens"] == step["tokens"]
    for phase, name in (("old_log_prob", "old_log_prob"), ("update", "update_actor")):
        assert plan["time_s"][phase] == pytest.approx(logged[f"timing_s/{name}"], rel=1e-3)
    assert logged["training/filter_groups/generated_groups"] >= step["generated_prompts"] >= step["prompts"]
    assert [finding for finding in plan["findings"] if finding["level"] == "error"] == []
