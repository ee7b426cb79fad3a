"""A replay buffer waits for rollouts as long as something comes, and no longer than its limit for the next."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from tensordict import TensorDict
from torch.nn.utils.rnn import pad_sequence
from verl.experimental.reward_loop.reward_loop import RewardLoopWorker
from verl.experimental.reward_loop.reward_manager.dapo import DAPORewardManager
from verl.protocol import DataProto
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer

from gtpo_verl.errors import StepGivenUpError, UserError
from gtpo_verl.integrations.reward_loop import BoundedRewardLoopWorker, Scorable, last_output
from gtpo_verl.integrations.step import health
from gtpo_verl.integrations.step.health import STOP_PATIENCE, BoundedWait, Health


class Rollouts:
    """verl's buffer with a clock that advances 10 seconds a poll, and what has ended so far."""

    def __init__(self, run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.buffer: Any = ReplayBuffer(
            trainer_mode="sync",
            trainer_config=OmegaConf.create({}),
            max_off_policy_threshold=None,
            max_off_policy_strategy="drop",
            sampler_kwargs=OmegaConf.create({}),
        )
        self.now = 0.0
        monkeypatch.setattr(health, "time", SimpleNamespace(monotonic=lambda: self.now))
        self.buffer._wait_for_next_poll = self.poll
        self.buffer.running_keys["train"] = {"000003-000001", "000003-000002"}
        config = {"trainer": {"run_dir": str(run_dir)}, "guards": {"phase_timeout": 100}}
        nothing = SimpleNamespace(_rollout_server_managers=list, guide_servers=None)
        self.phase = Health(OmegaConf.create(config | {"algorithm": {"guide": {"model": None}}}), nothing)

    def bound(self, limit: float | None) -> "Rollouts":
        self.wait = BoundedWait(self.buffer, self.phase, limit)
        return self

    def poll(self, partition_id: str, last: float) -> float:
        self.now += 10
        return last

    def wait_for(self, seconds: float) -> None:
        until = self.now + seconds
        while self.now < until:
            self.wait("train", 0.0)


@pytest.fixture
def rollouts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Rollouts:
    return Rollouts(tmp_path, monkeypatch)


def test_nothing_for_the_limit_ends_the_run_with_what_is_waited_for(rollouts: Rollouts) -> None:
    rollouts.bound(100)
    with pytest.raises(UserError, match=r"waiting for 2 groups of the training \(000003-000001, 000003-000002\)"):
        rollouts.wait_for(200)
    assert rollouts.now == 110


@pytest.mark.parametrize("kind", ["finished", "failed", "response"])
def test_whatever_ends_starts_the_time_again(rollouts: Rollouts, kind: str) -> None:
    rollouts.bound(100)
    for number in range(5):
        rollouts.wait_for(90)
        if kind == "response":
            rollouts.buffer.partitions["train"][f"000003-000001_{number}_0"] = {}
        else:
            keys = rollouts.buffer.finished_keys if kind == "finished" else rollouts.buffer.failure_keys
            keys["train"].add(str(number))
    assert rollouts.now == 450


def test_time_between_two_waits_does_not_count(rollouts: Rollouts) -> None:
    rollouts.bound(100)
    for _ in range(3):
        rollouts.wait_for(90)
        rollouts.now += 1000  # an update, with the same numbers before and after it


def test_a_phase_without_polls_ends_the_run_and_one_that_polls_does_not(rollouts: Rollouts) -> None:
    rollouts.bound(None)
    rollouts.phase.begin(3, "generating")
    rollouts.wait_for(1000)
    rollouts.phase.check()
    rollouts.phase.begin(3, "updating the actor")
    rollouts.now += 100
    rollouts.phase.check()
    rollouts.now += 1
    with pytest.raises(UserError, match=r"^step 3: updating the actor for 101 s, the limit of guards\.phase_timeout"):
        rollouts.phase.check()


def test_without_a_limit_it_waits(rollouts: Rollouts) -> None:
    rollouts.bound(None).wait_for(100_000)


def test_a_request_to_stop_gives_up_a_step_that_does_not_end(rollouts: Rollouts, tmp_path: Path) -> None:
    (tmp_path / "STOP").touch()
    rollouts.bound(None)
    with pytest.raises(StepGivenUpError, match="the run was asked to stop"):
        rollouts.wait_for(1000)
    assert STOP_PATIENCE < rollouts.now <= STOP_PATIENCE + 20


def test_what_is_waited_for_is_said_before_the_end(rollouts: Rollouts, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(health.logger, "warning", lambda text, *values: said.append(text % values))
    with pytest.raises(UserError):
        rollouts.bound(1600).wait_for(2000)
    assert [message.rsplit(" for ", 1)[1] for message in said] == ["110 s.", "410 s.", "810 s."]


def test_verls_buffer_asks_before_it_sleeps(rollouts: Rollouts) -> None:
    rollouts.bound(0.0)
    assert rollouts.buffer._wait_for_next_poll is rollouts.wait


def test_a_reward_function_that_never_returns_fails_its_response_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    async def verify(self: Any, data: Any) -> dict[str, Any]:
        tokens = data.batch["responses"][0].tolist()
        await asyncio.sleep(60 if tokens == [3] else 0)
        return {"reward_score": 1.0}

    monkeypatch.setattr(RewardLoopWorker, "compute_score", verify)
    worker = BoundedRewardLoopWorker.__new__(BoundedRewardLoopWorker)
    worker._limit = 0.2
    responses = [Scorable(np.array([1]), np.array([token]), {}) for token in (2, 3, 4)]
    first, hung, last = asyncio.run(worker.compute_scores(responses))
    assert first == last == {"reward_score": 1.0}
    assert isinstance(hung, TimeoutError)
    assert "guards.reward_timeout=0.2" in str(hung)


@pytest.mark.parametrize("lengths", [[(4, 6)], [(4, 6), (8, 3)], [(10, 10), (2, 8)], [(3, 4), (12, 4)]])
def test_of_several_outputs_the_last_response_is_judged_as_it_is(lengths: list[tuple[int, int]]) -> None:
    """By verl's manager, from rows that are padded as its agent loops pad them."""
    judged = []
    prompts, responses = ([torch.arange(n) + 1 for n in column] for column in zip(*lengths, strict=True))
    masks = [torch.ones(prompt + response, dtype=torch.int64) for prompt, response in lengths]
    columns = {"prompts": prompts, "responses": responses, "attention_mask": masks}
    padded = {name: pad_sequence(rows, batch_first=True) for name, rows in columns.items()}
    rows = {"data_source": "x", "reward_model": {"ground_truth": "g"}}
    outputs = DataProto(
        batch=TensorDict(padded, batch_size=len(lengths)),
        non_tensor_batch={
            **{name: np.array([value] * len(lengths)) for name, value in rows.items()},
            "prompt_len": np.array([prompt for prompt, _ in lengths]),
            "response_len": np.array([response for _, response in lengths]),
        },
    )
    words = SimpleNamespace(decode=lambda ids, skip_special_tokens: " ".join(map(str, ids.tolist())))
    buffer = {"overlong_buffer_cfg": {"enable": False}, "max_resp_len": 64}

    async def judge() -> None:
        config = OmegaConf.create({"reward": {"reward_kwargs": buffer}})
        manager = DAPORewardManager(config, words, lambda solution_str, **_: judged.append(solution_str) or 1.0)
        await manager.run_single(last_output(outputs))

    asyncio.run(judge())
    assert judged == [" ".join(map(str, range(1, lengths[-1][1] + 1)))]
