"""The estimators as verl calls them: through its registry, with its own data structures."""

import asyncio

import numpy as np
import pytest
import torch
from omegaconf import DictConfig, OmegaConf
from tensordict import TensorDict
from verl import DataProto
from verl.trainer.ppo import core_algos
from verl.trainer.ppo.ray_trainer import compute_advantage

from gtpo_verl.algorithms import soft_overlong_penalty
from gtpo_verl.config import compose_config
from gtpo_verl.errors import UserError
from gtpo_verl.integrations.context import CreditContext, credit_context
from gtpo_verl.integrations.estimators import group_ids
from gtpo_verl.integrations.trainer import length_settings

OFF: dict[str, float] = {}  # no overlong buffer


@pytest.fixture
def batch() -> tuple[DataProto, torch.Tensor, torch.Tensor]:
    """24 ragged responses in 4 groups with mixed verdicts: verl's data, verdicts (B,), entropies (B, T)."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(3, 12, (24,), generator=generator)
    mask = torch.arange(12) < lengths[:, None]
    correct = torch.arange(24) % 3 == 0
    rewards = torch.zeros(24, 12)
    rewards[torch.arange(24), lengths - 1] = correct.float()
    entropy = torch.rand(24, 12, generator=generator) + 0.05
    uid = np.array([f"prompt-{9 - row // 6}" for row in range(24)], dtype=object)
    tensors = TensorDict({"token_level_rewards": rewards, "response_mask": mask}, batch_size=24)
    return DataProto(batch=tensors, non_tensor_batch={"uid": uid}), correct, entropy


def advantages(name: str, data: DataProto, config: DictConfig, context: CreditContext) -> torch.Tensor:
    with credit_context(context):
        return compute_advantage(data, adv_estimator=name, config=config).batch["advantages"].clone()


def grpo(data: DataProto) -> torch.Tensor:
    out, _ = core_algos.compute_grpo_outcome_advantage(
        data.batch["token_level_rewards"], data.batch["response_mask"], data.non_tensor_batch["uid"]
    )
    return out


Batch = tuple[DataProto, torch.Tensor, torch.Tensor]


def test_grpo_s_without_entropy_is_verls_grpo(batch: Batch) -> None:
    data, correct, entropy = batch
    config = compose_config(["algo=grpo_s", "algorithm.grpo_s.beta2=0"]).algorithm
    ours = advantages("grpo_s", data, config, CreditContext(correct, entropy, OFF))
    torch.testing.assert_close(ours, grpo(data), atol=2e-6, rtol=0)


def test_entropy_moves_the_advantages(batch: Batch) -> None:
    """The comparison above is no accident: with the entropy term on, both differ from verl's grpo."""
    data, correct, entropy = batch
    config = compose_config().algorithm
    for name in ("gtpo", "grpo_s"):
        ours = advantages(name, data, config, CreditContext(correct, entropy, OFF))
        assert (ours - grpo(data)).abs().max() > 1e-3
        other = advantages(name, data, config, CreditContext(correct, entropy.flip(0), OFF))
        assert (ours - other).abs().max() > 1e-3


def test_the_soft_punishment_takes_its_lengths_from_the_run(batch: Batch) -> None:
    data, correct, entropy = batch
    config = compose_config(["algorithm.gtpo.length_penalty=soft"]).algorithm
    plain = advantages("gtpo", data, config, CreditContext(correct, entropy, OFF))
    punished = advantages("gtpo", data, config, CreditContext(correct, entropy, {"max_length": 12, "cache_length": 6}))
    long = data.batch["response_mask"].sum(-1) > 6
    changed = (punished - plain).abs().amax(-1) > 1e-6
    assert (correct & long).any()
    assert changed[correct & long].all()
    never_reached = {"max_length": 100, "cache_length": 10}
    same = advantages("gtpo", data, config, CreditContext(correct, entropy, never_reached))
    torch.testing.assert_close(same, plain, atol=1e-6, rtol=0)


def test_the_penalty_factor_is_that_of_dapos_reward_manager(batch: Batch) -> None:
    """Advantages without normalisation show the penalty itself: half of it with half the factor."""
    data, correct, entropy = batch
    for name in ("gtpo", "grpo_s"):
        chosen = [f"algorithm.{name}.length_penalty=soft", f"algorithm.{name}.normalization=none"]
        config = compose_config(chosen).algorithm
        lengths = {"max_length": 12, "cache_length": 6}
        plain = compose_config([chosen[1], f"algorithm.{name}.length_penalty=none"]).algorithm
        without = advantages(name, data, plain, CreditContext(correct, entropy, OFF))
        penalties = {
            factor: advantages(
                name, data, config, CreditContext(correct, entropy, lengths | {"penalty_factor": factor})
            )
            - without
            for factor in (1.0, 0.5)
        }
        assert penalties[1.0].min() < -0.5
        torch.testing.assert_close(penalties[0.5], penalties[1.0] / 2, atol=1e-6, rtol=0)


def test_the_group_relative_penalty_needs_no_buffer(batch: Batch) -> None:
    data, _, entropy = batch
    correct = torch.arange(24) % 6 > 0  # easy groups: their long correct responses are penalised
    config = compose_config(["algorithm.gtpo.length_penalty=grop"]).algorithm
    plain = compose_config(["algorithm.gtpo.length_penalty=none"]).algorithm
    run = compose_config(["reward.reward_kwargs.overlong_buffer_cfg.enable=false"])
    without = advantages("gtpo", data, plain, CreditContext(correct, entropy, length_settings(run)))
    with_it = advantages("gtpo", data, config, CreditContext(correct, entropy, length_settings(run)))
    assert (with_it - without).abs().max() > 1e-3


def test_the_lengths_and_the_factor_come_from_the_reward_manager() -> None:
    buffer = "reward.reward_kwargs.overlong_buffer_cfg"
    chosen = ["data.max_response_length=512", f"{buffer}.len=128", f"{buffer}.penalty_factor=0.5"]
    settings = length_settings(compose_config([f"{buffer}.enable=true", *chosen]))
    assert settings == {"max_length": 512, "cache_length": 128, "penalty_factor": 0.5}
    assert length_settings(compose_config([f"{buffer}.enable=false", *chosen])) == {}


def test_metrics_reach_the_context(batch: Batch) -> None:
    data, correct, entropy = batch
    context = CreditContext(correct, entropy, OFF)
    advantages("gtpo", data, compose_config().algorithm, context)
    assert context.metrics["shaped_correct_mean"] == pytest.approx(1.1, abs=1e-6)
    assert context.metrics["shaped_wrong_mean"] == pytest.approx(-1.1, abs=1e-6)


def test_rows_that_verl_adds_to_fill_a_batch_change_nothing(batch: Batch) -> None:
    data, correct, entropy = batch
    config = compose_config().algorithm
    plain = advantages("gtpo", data, config, CreditContext(correct, entropy, OFF))
    filled = DataProto(
        batch=TensorDict(
            {key: torch.cat([value, torch.zeros_like(value[:2])]) for key, value in data.batch.items()}, batch_size=26
        ),
        non_tensor_batch={"uid": np.append(data.non_tensor_batch["uid"], ["pad1", "pad1"])},
    )
    context = CreditContext(
        torch.cat([correct, correct[:2]]), torch.cat([entropy, torch.full((2, 12), torch.nan)]), OFF
    )
    with_rows = advantages("gtpo", filled, config, context)
    torch.testing.assert_close(with_rows[:24], plain, atol=0, rtol=0)
    assert (with_rows[24:] == 0).all()


def test_under_verls_own_trainer_the_reason_is_given(batch: Batch) -> None:
    data, _, _ = batch
    with pytest.raises(UserError, match="gtpo-verl train"):
        compute_advantage(data, adv_estimator="gtpo", config=compose_config().algorithm)


def test_group_names_become_numbers() -> None:
    ids = group_ids(np.array(["b", "a", "b", "c"], dtype=object))
    assert ids.dtype == torch.int64
    assert ids.tolist() == [1, 0, 1, 2]


def dapo_penalty(length: int, settings: dict[str, float], max_resp_len: int) -> float:
    """What verl's DAPO reward manager adds to the reward of a response with so many tokens."""
    from verl.experimental.reward_loop.reward_manager.dapo import DAPORewardManager

    class Tokenizer:
        def decode(self, ids: torch.Tensor, skip_special_tokens: bool) -> str:
            return "text"

    overlong = OmegaConf.create({"enable": True, "log": False, **settings})
    config = OmegaConf.create({"reward": {"reward_kwargs": {"max_resp_len": max_resp_len}}})
    config.reward.reward_kwargs.overlong_buffer_cfg = overlong
    tensors = TensorDict(
        {
            "responses": torch.zeros(1, length, dtype=torch.long),
            "attention_mask": torch.ones(1, length, dtype=torch.long),
        },
        batch_size=1,
    )
    texts = {"data_source": "sums", "reward_model": {"ground_truth": "2"}, "extra_info": {}}
    data = DataProto(
        batch=tensors, non_tensor_batch={key: np.array([value], dtype=object) for key, value in texts.items()}
    )

    async def score() -> float:
        manager = DAPORewardManager(config, Tokenizer(), lambda **_: {"score": 0.0})
        manager.loop = asyncio.get_running_loop()
        return float((await manager.run_single(data))["reward_score"])

    return asyncio.run(score())


def test_dapos_penalty_is_ours_up_to_the_limit_and_not_beyond_it() -> None:
    """Why preflight wants max_resp_len to be the limit: verl's penalty goes on falling beyond it, ours is whole there."""
    settings = {"len": 4, "penalty_factor": 0.5}
    lengths = torch.arange(1, 17)
    ours = 0.5 * soft_overlong_penalty(lengths, max_length=16, cache_length=4)
    theirs = [dapo_penalty(int(length), settings, max_resp_len=16) for length in lengths]
    assert theirs == pytest.approx(ours.tolist(), abs=1e-6)
    assert dapo_penalty(32, settings, max_resp_len=16) == pytest.approx(-2.5)
    assert 0.5 * soft_overlong_penalty(torch.tensor([32]), 16, 4).item() == -0.5
