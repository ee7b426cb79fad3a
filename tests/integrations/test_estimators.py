"""The estimators as verl calls them: through its registry, with its own data structures."""

import numpy as np
import pytest
import torch
from omegaconf import DictConfig
from tensordict import TensorDict
from verl import DataProto
from verl.trainer.ppo import core_algos
from verl.trainer.ppo.ray_trainer import compute_advantage

from gtpo_verl.config import compose_config
from gtpo_verl.errors import UserError
from gtpo_verl.integrations.context import CreditContext, credit_context
from gtpo_verl.integrations.estimators import group_ids

OFF = {"length_penalty": "none"}


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
