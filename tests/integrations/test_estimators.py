"""The estimators as verl calls them: through its registry, with its own data structures."""

import asyncio
import subprocess
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import DictConfig, OmegaConf
from tensordict import TensorDict
from verl import DataProto
from verl.trainer.ppo import core_algos
from verl.trainer.ppo.ray_trainer import compute_advantage

from gtpo_verl import algorithms
from gtpo_verl.algorithms import algorithm, soft_overlong_penalty
from gtpo_verl.config import compose_config
from gtpo_verl.errors import UserError
from gtpo_verl.integrations.context import CreditContext, Overlong, credit_context, overlong
from gtpo_verl.integrations.estimators import estimator, group_ids
from gtpo_verl.runs.correctness import score, verdict


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


def given(data: DataProto, correct: torch.Tensor, entropy: torch.Tensor, **others: Any) -> algorithms.Batch:
    groups = group_ids(data.non_tensor_batch["uid"])
    return algorithms.Batch(data.batch["response_mask"], groups, correct, entropy=entropy, **others)


def test_grpo_s_without_entropy_is_verls_grpo(batch: Batch) -> None:
    data, correct, entropy = batch
    config = compose_config(["algo=grpo_s", "algorithm.grpo_s.beta2=0"]).algorithm
    ours = advantages("grpo_s", data, config, CreditContext(given(data, correct, entropy)))
    torch.testing.assert_close(ours, grpo(data), atol=2e-6, rtol=0)


def test_entropy_moves_the_advantages(batch: Batch) -> None:
    """The comparison above is no accident: with the entropy term on, both differ from verl's grpo."""
    data, correct, entropy = batch
    config = compose_config().algorithm
    for name in ("gtpo", "grpo_s"):
        ours = advantages(name, data, config, CreditContext(given(data, correct, entropy)))
        assert (ours - grpo(data)).abs().max() > 1e-3
        other = advantages(name, data, config, CreditContext(given(data, correct, entropy.flip(0))))
        assert (ours - other).abs().max() > 1e-3


def test_the_soft_punishment_takes_its_lengths_from_the_run(batch: Batch) -> None:
    data, correct, entropy = batch
    config = compose_config(["algorithm.gtpo.length_penalty=soft"]).algorithm
    plain = advantages("gtpo", data, config, CreditContext(given(data, correct, entropy)))
    punished = advantages("gtpo", data, config, CreditContext(given(data, correct, entropy), Overlong(12, 6)))
    long = data.batch["response_mask"].sum(-1) > 6
    changed = (punished - plain).abs().amax(-1) > 1e-6
    assert (correct & long).any()
    assert changed[correct & long].all()
    same = advantages("gtpo", data, config, CreditContext(given(data, correct, entropy), Overlong(100, 10)))
    torch.testing.assert_close(same, plain, atol=1e-6, rtol=0)


@pytest.mark.parametrize("name", ["gtpo", "grpo_s"])
def test_the_penalty_factor_of_the_run_reaches_every_arm(batch: Batch, name: str) -> None:
    """The same as a penalty of that size handed to the algorithm, which is not the one of factor 1."""
    data, correct, entropy = batch
    config = compose_config([f"algorithm.{name}.length_penalty=soft"]).algorithm
    mask = data.batch["response_mask"]
    halved = advantages(name, data, config, CreditContext(given(data, correct, entropy), Overlong(12, 6, factor=0.5)))
    penalty = 0.5 * soft_overlong_penalty(mask.sum(-1), 12, 6)
    expected = algorithm(name).advantages(given(data, correct, entropy, length_penalty=penalty)).advantages
    torch.testing.assert_close(halved, expected)
    whole = advantages(name, data, config, CreditContext(given(data, correct, entropy), Overlong(12, 6)))
    assert (whole - halved).abs().max() > 1e-3


@pytest.mark.parametrize("name", ["gtpo", "grpo_s"])
def test_without_an_overlong_buffer_no_penalty_of_other_lengths_takes_its_place(batch: Batch, name: str) -> None:
    data, correct, entropy = batch
    soft = compose_config([f"algorithm.{name}.length_penalty=soft"]).algorithm
    none = compose_config([f"algorithm.{name}.length_penalty=none"]).algorithm
    context = CreditContext(given(data, correct, entropy))
    assert torch.equal(advantages(name, data, soft, context), advantages(name, data, none, context))


def test_a_group_relative_penalty_needs_no_overlong_buffer(batch: Batch) -> None:
    data, correct, entropy = batch
    config = compose_config(["algorithm.gtpo.length_penalty=grop", "algorithm.gtpo.gamma=0.51"]).algorithm
    easy = torch.ones_like(correct)
    easy[::6] = False
    plain = compose_config(["algorithm.gtpo.length_penalty=none"]).algorithm
    context = CreditContext(given(data, easy, entropy))
    assert (advantages("gtpo", data, config, context) - advantages("gtpo", data, plain, context)).abs().max() > 1e-4


def test_an_earlier_output_of_a_session_is_not_compared_in_a_group_relative_penalty(batch: Batch) -> None:
    data, correct, entropy = batch
    config = compose_config(["algorithm.gtpo.length_penalty=grop", "algorithm.gtpo.gamma=0.51"]).algorithm
    easy = torch.ones_like(correct)
    easy[::6] = False
    context = CreditContext(given(data, easy, entropy), lengths=torch.arange(24))
    plain = advantages("gtpo", data, config, context)
    again = torch.cat([torch.arange(24), torch.arange(24)])  # each response after a longer output of its session
    twice = data.select_idxs(again)
    lengths = torch.cat([torch.arange(24) + 100, torch.arange(24)])
    several = CreditContext(
        given(twice, easy[again], entropy[again]), lengths=lengths, last_output=torch.arange(24, 48).repeat(2)
    )
    assert torch.equal(advantages("gtpo", twice, config, several)[24:], plain)


@pytest.mark.parametrize("name", ["gtpo", "grpo_s", "fork20"])
def test_a_long_response_of_the_guide_is_not_punished(batch: Batch, name: str) -> None:
    data, correct, entropy = batch
    config = compose_config([f"algo={name}"]).algorithm
    guide = torch.arange(24) % 6 == 3  # one correct row of each group
    of_guide = given(data, correct, entropy, guide=guide, rewards=torch.where(correct, 1.0, -1.0))
    overlong = Overlong(12, 6)
    lengths = torch.full((24,), 3)
    plain = advantages(name, data, config, CreditContext(of_guide, overlong, lengths))
    long_guide = advantages(name, data, config, CreditContext(of_guide, overlong, lengths.masked_fill(guide, 12)))
    long_own = advantages(name, data, config, CreditContext(of_guide, overlong, lengths.masked_fill(~guide, 12)))
    assert torch.equal(long_guide, plain)
    assert (long_own - plain).abs().max() > 1e-3


def test_a_response_of_the_guide_is_no_measure_of_the_policys_lengths(batch: Batch) -> None:
    data, correct, entropy = batch
    config = compose_config(["algorithm.gtpo.length_penalty=grop", "algorithm.gtpo.gamma=0.51"]).algorithm
    easy = torch.ones_like(correct)
    easy[::6] = False
    guide = torch.arange(24) % 6 == 5
    of_guide = given(data, easy, entropy, guide=guide, rewards=torch.where(easy, 1.0, -1.0))
    lengths = torch.arange(24) % 6 * 3 + 3
    found = [
        advantages("gtpo", data, config, CreditContext(of_guide, lengths=lengths.masked_fill(guide, length)))
        for length in (1, 1000)
    ]
    assert torch.equal(*found)
    longer = CreditContext(of_guide, lengths=lengths + torch.arange(24) % 6 * 9)
    assert (advantages("gtpo", data, config, longer) - found[0]).abs().max() > 1e-3


def test_another_method_gets_scores_and_penalty_apart(batch: Batch) -> None:
    """An outcome method as another package would bring it: DAPO's advantage from its own function."""
    data, correct, entropy = batch
    ours = estimator(replace(algorithm("dapo"), name="mine", verl_estimator=None))
    mask = data.batch["response_mask"]
    rewards = torch.where(correct, 1.0, -1.0)
    with credit_context(CreditContext(given(data, correct, entropy, rewards=rewards), Overlong(12, 6))):
        out, _ = ours(torch.full_like(entropy, 7.0), mask, compose_config().algorithm, data.non_tensor_batch["uid"])
    scores = torch.zeros_like(entropy)
    scores[:, 0] = rewards + soft_overlong_penalty(mask.sum(-1), 12, 6)
    expected, _ = core_algos.compute_grpo_outcome_advantage(scores, mask, data.non_tensor_batch["uid"])
    torch.testing.assert_close(out, expected, atol=2e-6, rtol=0)


def test_metrics_reach_the_context(batch: Batch) -> None:
    data, correct, entropy = batch
    context = CreditContext(given(data, correct, entropy))
    advantages("gtpo", data, compose_config().algorithm, context)
    assert context.metrics["shaped_correct_mean"] == pytest.approx(1.1, abs=1e-6)
    assert context.metrics["shaped_wrong_mean"] == pytest.approx(-1.1, abs=1e-6)


def test_rows_that_verl_adds_to_fill_a_batch_change_nothing(batch: Batch) -> None:
    data, correct, entropy = batch
    config = compose_config().algorithm
    plain = advantages("gtpo", data, config, CreditContext(given(data, correct, entropy)))
    filled = DataProto(
        batch=TensorDict(
            {key: torch.cat([value, torch.zeros_like(value[:2])]) for key, value in data.batch.items()}, batch_size=26
        ),
        non_tensor_batch={"uid": np.append(data.non_tensor_batch["uid"], ["pad1", "pad1"])},
    )
    entropies = torch.cat([entropy, torch.full((2, 12), torch.nan)])
    context = CreditContext(given(filled, torch.cat([correct, correct[:2]]), entropies))
    with_rows = advantages("gtpo", filled, config, context)
    torch.testing.assert_close(with_rows[:24], plain, atol=0, rtol=0)
    assert (with_rows[24:] == 0).all()


def test_under_verls_own_trainer_the_reason_is_given(batch: Batch) -> None:
    data, _, _ = batch
    with pytest.raises(UserError, match=r"gtpo_verl\.main_ppo"):
        compute_advantage(data, adv_estimator="gtpo", config=compose_config().algorithm)


def test_group_names_become_numbers() -> None:
    ids = group_ids(np.array(["b", "a", "b", "c"], dtype=object))
    assert ids.dtype == torch.int64
    assert ids.tolist() == [1, 0, 1, 2]


def test_the_lengths_and_the_factor_come_from_the_reward_manager() -> None:
    buffer = "reward.reward_kwargs.overlong_buffer_cfg"
    chosen = ["data.max_response_length=512", f"{buffer}.len=128", f"{buffer}.penalty_factor=0.5"]
    assert overlong(compose_config([f"{buffer}.enable=true", *chosen])) == Overlong(512, 128, 0.5)
    assert overlong(compose_config([f"{buffer}.enable=false", *chosen])) is None


def judged(length: int, settings: dict[str, float], max_resp_len: int, **reward: Any) -> dict[str, Any]:
    """What verl's DAPO reward manager makes of a response with so many tokens; reward: the data source, the right
    answer and, unless it is verl's own for this source, the reward function.
    """
    from verl.experimental.reward_loop.reward_manager.dapo import DAPORewardManager
    from verl.utils.reward_score import default_compute_score

    class Tokenizer:
        def decode(self, ids: torch.Tensor, skip_special_tokens: bool) -> str:
            return "#### 2"

    buffer = OmegaConf.create({"enable": True, "log": False, **settings})
    config = OmegaConf.create({"reward": {"reward_kwargs": {"max_resp_len": max_resp_len}}})
    config.reward.reward_kwargs.overlong_buffer_cfg = buffer
    tensors = TensorDict(
        {
            "responses": torch.zeros(1, length, dtype=torch.long),
            "attention_mask": torch.ones(1, length, dtype=torch.long),
        },
        batch_size=1,
    )
    source = reward.get("data_source", "sums")
    texts = {"data_source": source, "reward_model": {"ground_truth": reward.get("truth", "2")}, "extra_info": {}}
    data = DataProto(
        batch=tensors, non_tensor_batch={key: np.array([value], dtype=object) for key, value in texts.items()}
    )

    async def run() -> dict[str, Any]:
        manager = DAPORewardManager(config, Tokenizer(), reward.get("function", default_compute_score))
        manager.loop = asyncio.get_running_loop()
        return await manager.run_single(data)

    return asyncio.run(run())


def dapo_penalty(length: int, settings: dict[str, float], max_resp_len: int) -> float:
    """What verl's DAPO reward manager adds to the reward of a response with so many tokens."""
    return float(judged(length, settings, max_resp_len, function=lambda **_: {"score": 0.0})["reward_score"])


@pytest.mark.parametrize(("truth", "right"), [("2", 1.0), ("3", 0.0)])
def test_a_number_that_a_reward_function_returns_is_score_and_verdict(truth: str, right: float) -> None:
    """verl's own function for GSM8K returns one, which its reward managers keep as `acc`; the penalty is not in it."""
    long = judged(14, {"len": 4, "penalty_factor": 0.5}, 16, data_source="openai/gsm8k", truth=truth)
    info = long["reward_extra_info"]
    assert long["reward_score"] == right - 0.25
    assert score(info) == verdict(info, "of this response") == right


def test_dapos_penalty_is_ours_up_to_the_limit_and_not_beyond_it() -> None:
    """Why max_resp_len must be the limit: verl's penalty goes on falling beyond it, ours is whole
    there.
    """
    settings = {"len": 4, "penalty_factor": 0.5}
    lengths = torch.arange(1, 17)
    ours = 0.5 * soft_overlong_penalty(lengths, max_length=16, cache_length=4)
    theirs = [dapo_penalty(int(length), settings, max_resp_len=16) for length in lengths]
    assert theirs == pytest.approx(ours.tolist(), abs=1e-6)
    assert dapo_penalty(32, settings, max_resp_len=16) == pytest.approx(-2.5)
    assert 0.5 * soft_overlong_penalty(torch.tensor([32]), 16, 4).item() == -0.5


@pytest.mark.slow
def test_a_process_may_import_them_before_verl() -> None:
    """`import verl` runs the plugin, which would find this module half imported."""
    code = (
        "import gtpo_verl.integrations.estimators\n"
        "from gtpo_verl.integrations.plugin import check_registered\n"
        "print(*check_registered(), sep=';')"
    )
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "could not be loaded" not in done.stderr
    assert "estimator gtpo" in done.stdout.strip().splitlines()[-1].split(";")
