"""Dynamic sampling in a real training: groups carried over, Ctrl-C and a restart, a budget that is spent, and overlong
filtering.

Two runs: the first leaves groups over and is stopped by Ctrl-C; the second resumes from its checkpoint on a task
without contrast.
"""

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from gtpo_verl.integrations.step.checkpoints import SAMPLING_FILE
from gtpo_verl.tasks import Task

pytestmark = [pytest.mark.e2e, pytest.mark.exhaustive]

Start = Callable[..., Any]  # tests/e2e/conftest.py
BATCH, RESPONSES = 8, 8
# Verdicts that do not depend on the model. `contrast` divides every group but that of the first prompt it sees: its
# place is refilled, and a refill for one missing group is of two at least, so a group is left over for certain. `none`
# divides no group.
REWARD = """
from collections import Counter

SEEN = Counter()

def _verdict(right):
    return {"score": 1.0 if right else -1.0, "acc": float(right)}

def contrast(data_source, solution_str, ground_truth, extra_info=None, **_):
    prompt = extra_info["question"]
    SEEN[prompt] += 1
    return _verdict(SEEN[prompt] % 2 == 0 and prompt != next(iter(SEEN)))

def none(data_source, solution_str, ground_truth, extra_info=None, **_):
    return _verdict(int(ground_truth) % 2 == 0)
"""


class Runs:
    """One run directory, trained twice."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.first: str  # what it printed
        self.saved: dict[str, Any]  # what dynamic sampling put into its checkpoint
        self.second: str

    def groups(self) -> dict[int, dict[str, int]]:
        """{step: {uid: step in which it was generated}} of every step trained."""
        lines = [json.loads(line) for line in (self.directory / "groups.jsonl").read_text().splitlines()]
        assert len({line["step"] for line in lines}) == len(lines), "a step was trained twice"
        return {line["step"]: line["groups"] for line in lines}


@pytest.fixture(scope="module")
def runs(start: Start, task: Task, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    directory = tmp_path_factory.mktemp("dynamic_sampling")
    reward = directory / "reward.py"
    reward.write_text(REWARD)
    runs = Runs(directory / "run")

    def train(*overrides: str) -> Any:
        return start(
            runs.directory,
            *("algo=dapo", "setting=quickstart", "hardware=cpu", f"actor_rollout_ref.model.path={task.model_path}"),
            *(f"data.train_files={task.train_file}", f"data.val_files={task.val_file}"),
            *(f"data.train_batch_size={BATCH}", f"actor_rollout_ref.actor.ppo_mini_batch_size={BATCH}"),
            *(f"actor_rollout_ref.rollout.n={RESPONSES}", f"reward.custom_reward_function.path={reward}"),
            f"actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu={BATCH * RESPONSES}",
            f"actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu={BATCH * RESPONSES}",
            "data.max_response_length=6",  # a worked answer is longer: every response is cut off
            *("trainer.val_before_train=False", "trainer.test_freq=-1", "trainer.save_freq=-1"),
            *("algorithm.filter_groups.carry_over.max_age=2", "algorithm.filter_groups.max_inflight_gen_batches=3"),
            *overrides,
            bare=True,
        )

    first = train("reward.custom_reward_function.name=contrast", "trainer.total_training_steps=200")
    first.wait_for_log("(WorkerDict pid=")
    first.process.send_signal(signal.SIGINT)  # long before the end of step 1, the step in progress
    first.wait_for_end()
    runs.first = first.output()
    # now: verl removes the weights, and with them goes this file, when a later checkpoint is whole
    runs.saved = torch.load(runs.directory / "checkpoints" / "global_step_1" / SAMPLING_FILE, weights_only=False)
    second = train(
        "reward.custom_reward_function.name=none",
        *("algorithm.filter_groups.max_num_gen_batches=2", "trainer.total_training_steps=200"),
        *("algorithm.overlong_filtering=true", "trainer.allow_changes=[algorithm,reward]"),
    )
    second.wait_for_end(code=2)
    runs.second = second.output().removeprefix(runs.first)  # one log
    return runs


def test_ctrl_c_ends_the_run_after_its_step_with_a_checkpoint_that_the_next_call_resumes_from(runs: Runs) -> None:
    assert runs.first.count("Stopping after this step, with a checkpoint") == 1
    assert f"Trained model: {runs.directory / 'model'}" in runs.first
    assert sorted(runs.groups())[:2] == [1, 2]
    assert "Stopping after this step" not in runs.second


def test_groups_left_over_are_in_the_checkpoint(
    runs: Runs, metrics: Callable[[Path], dict[int, dict[str, Any]]]
) -> None:
    step = metrics(runs.directory)[1]
    assert len(runs.saved["prompts"]) == step["training/filter_groups/carried_over_groups"] > 0
    assert len(runs.saved["rows"]) == RESPONSES * len(runs.saved["prompts"])
    assert step["training/filter_groups/discarded_surplus_groups"] == 0
    assert 0 < step["training/filter_groups/yield"] < 1


def test_after_a_restart_they_are_trained_on_once(
    runs: Runs, metrics: Callable[[Path], dict[int, dict[str, Any]]]
) -> None:
    waiting = {uid: tag["global_steps"] for uid, tag in runs.saved["prompts"].items()}
    groups = runs.groups()
    assert len(groups[1]) == BATCH
    after = {uid: made for step, made_in in groups.items() if step > 1 for uid, made in made_in.items()}
    assert after == waiting
    trained = [uid for made_in in groups.values() for uid in made_in]
    assert len(set(trained)) == len(trained), "a group was trained on twice"
    step = metrics(runs.directory)[2]
    assert step["training/filter_groups/carried_share"] == 1.0
    assert step["training/filter_groups/carried_age_max"] == step["training/off_policy/trajectory_staleness/max"] >= 1
    assert "rollout_entropy/abs_diff_max" not in step, "entropies of an older policy were compared with the actor's"


def test_without_contrast_the_run_ends_by_its_budget_and_says_why(runs: Runs) -> None:
    message = [line for line in runs.second.splitlines() if line.startswith("error: ")]
    assert len(message) == 1, runs.second[-3000:]
    assert "dynamic sampling spent its budget of 2 generation batches; 16 groups generated: 0 mixed" in message[0]
    assert ", 0 failed. Choose prompts that the model solves sometimes" in message[0]
    last = max(runs.groups())
    assert (runs.directory / "checkpoints" / f"global_step_{last}" / SAMPLING_FILE).is_file(), "steps were lost"
    assert json.loads((runs.directory / "run.json").read_text())["status"] == "failed"


def test_responses_cut_off_at_the_limit_are_in_the_loss_unless_filtered(
    runs: Runs, metrics: Callable[[Path], dict[int, dict[str, Any]]]
) -> None:
    step = metrics(runs.directory)[2]
    assert step["training/overlong_filtered_share"] == step["response_length/truncated_share"] == 1.0
    assert step["actor/grad_norm"] == step["actor/pg_loss"] == 0.0
    assert step["critic/advantages/max"] > 0
    assert metrics(runs.directory)[1]["response_length/truncated_share"] == 1.0
    assert metrics(runs.directory)[1]["actor/grad_norm"] > 0
