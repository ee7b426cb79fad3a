"""A validation in which samples fail, run by verl's own ``_validate`` on a real TransferQueue; only the engines are
stood in for.

The data is AIME as its authors ship it: each problem in many rows, one sample per row.
"""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transfer_queue as tq
from omegaconf import OmegaConf
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer
from verl.utils.tensordict_utils import list_of_dict_to_tensordict

from gtpo_verl.config import compose_config
from gtpo_verl.integrations.step.health import Health
from gtpo_verl.integrations.step.records import Records
from gtpo_verl.integrations.trainer import trainer_class

pytestmark = pytest.mark.slow

PROBLEMS, ROWS = 5, 4  # of each problem


@pytest.fixture
def config() -> Any:
    return compose_config(
        ["hardware=cpu", "actor_rollout_ref.rollout.val_kwargs.n=1", "trainer.validation_data_dir=null"]
    )


class Agents:
    """Answers at once, as verl's agent loops write it; the prompts at the positions ``failing`` fail before they have a
    response.
    """

    def __init__(self, failing: set[int]) -> None:
        self.failing = failing
        self.position = 0

    def generate_sequences(self, prompts: Any) -> None:
        columns = ("uid", "raw_prompt", "reward_model", "data_source")
        for values in zip(*(list(prompts[column]) for column in columns), strict=True):
            row = dict(zip(columns, values, strict=True))
            failed = self.position in self.failing
            if not failed:
                self._write(row, correct=self.position % ROWS == 0)
            self.position += 1
            tag = {"is_prompt": True, "status": "failure" if failed else "finished", "global_steps": 0}
            tq.kv_batch_put(keys=[row["uid"]], partition_id="val", tags=[tag])

    @staticmethod
    def _write(row: dict[str, Any], *, correct: bool) -> None:
        response = {
            "prompts": torch.arange(2),
            "responses": torch.arange(3),
            "rm_scores": torch.tensor([0.0, 0.0, float(correct)]),
            "num_turns": 2,
            "extra_fields": {"reward_extra_info": {"acc": float(correct), "pred": "7"}},
        }
        tq.kv_batch_put(
            keys=[f"{row['uid']}_0_0"],
            partition_id="val",
            fields=list_of_dict_to_tensordict([row | response]),
            tags=[{"status": "success", "global_steps": 0, "response_len": 3}],
        )


def batch() -> dict[str, Any]:
    """One batch of verl's validation data loader, every problem in ``ROWS`` rows that follow each other."""
    numbers = [number for number in range(PROBLEMS) for _ in range(ROWS)]
    columns: dict[str, list[Any]] = {
        "raw_prompt": [[{"role": "user", "content": f"problem {number}"}] for number in numbers],
        "reward_model": [{"ground_truth": str(number)} for number in numbers],
        "data_source": ["aime_2024"] * len(numbers),
    }
    arrays = {}
    for name, values in columns.items():
        arrays[name] = np.empty(len(values), dtype=object)
        arrays[name][:] = values
    return arrays


def validate(config: Any, run_dir: Path, failing: set[int]) -> dict[str, float]:
    trainer: Any = object.__new__(trainer_class("sync"))
    config.trainer.run_dir = str(run_dir)
    trainer.config = config
    trainer.global_steps = 0
    trainer.health, trainer.records = Health(config, trainer), Records(config)
    trainer.val_dataloader = [batch()]
    trainer.tokenizer = SimpleNamespace(pad_token_id=0, decode=lambda ids, skip_special_tokens: "text")
    trainer.reward_loop_manager = SimpleNamespace(reward_loop_worker_handles=[])
    trainer.agent_loop_manager = Agents(failing)
    trainer.replay_buffer = ReplayBuffer(
        trainer_mode="sync",
        trainer_config=OmegaConf.create({}),
        max_off_policy_threshold=8,
        max_off_policy_strategy="drop",
        sampler_kwargs=OmegaConf.create({}),
        poll_interval=0.01,
    )
    trainer._in_training = False
    return trainer._validate()


def test_a_failed_sample_of_a_repeated_problem_is_wrong_and_belongs_to_its_problem(config: Any, tmp_path: Path) -> None:
    """Of each problem one row in four is right. One failure, of a right one: 4 of 20 right, the same five problems."""
    metrics = validate(config, tmp_path, failing={ROWS})
    assert metrics["val/aime_2024/problems"] == PROBLEMS
    assert metrics["val/aime_2024/failed_samples"] == 1
    assert metrics[f"val/aime_2024/mean@{ROWS}"] == pytest.approx((PROBLEMS - 1) / PROBLEMS / ROWS)
    assert f"val/aime_2024/pass@{ROWS}" in metrics


def test_a_problem_of_which_every_sample_failed_is_one_problem(config: Any, tmp_path: Path) -> None:
    metrics = validate(config, tmp_path, failing=set(range(ROWS)))
    assert metrics["val/aime_2024/problems"] == PROBLEMS
    assert metrics["val/aime_2024/failed_samples"] == ROWS
    assert metrics[f"val/aime_2024/mean@{ROWS}"] == pytest.approx((PROBLEMS - 1) / PROBLEMS / ROWS)
