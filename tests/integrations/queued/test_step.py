"""One update on a real TransferQueue, through verl's own steps: what is fetched, and what counts in a group."""

import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import transfer_queue as tq
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf
from step_trainer import Row, clear, put, read, run_trainer, to_advantages
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync

from gtpo_verl.algorithms import grpo_advantages, soft_overlong_penalty
from gtpo_verl.errors import UserError
from gtpo_verl.integrations.credit_trainer import CreditTrainer
from gtpo_verl.integrations.step.columns import Step
from gtpo_verl.integrations.step.credit import verdicts_warning

pytestmark = pytest.mark.slow


def first_tokens(batch: Any) -> list[float]:
    advantages, mask = read(batch, "advantages")
    return [row[on][0].item() if on.any() else 0.0 for row, on in zip(advantages, mask, strict=True)]


# -------------------------------------------------------------------- columns


def test_columns_are_ragged_and_padding_has_no_part_in_them(tmp_path: Path) -> None:
    trainer = run_trainer(tmp_path, "algo=dapo")
    rows = {"a_0_0": Row(2, True), "pad_0_0": Row(1), "a_1_0": Row(3, mask=[1, 0, 1])}
    step = Step(put(trainer, rows), threshold=1.0)
    assert (step.keys, step.lengths) == (["a_0_0", "a_1_0"], [2, 3])
    assert step.mask.tolist() == [True, True, True, False, True]
    assert step.correct.tolist() == [True, False]
    assert step.scores is not None
    assert step.scores.tolist() == [1.0, -1.0]
    assert step.of_tokens(step.correct).tolist() == [True, True, False, False, False]
    assert step.padded(step.mask).tolist() == [[True, True, False], [False] * 3, [True, False, True]]
    assert step.of_batch(step.correct).tolist() == [True, False, False]
    step.put("rm_scores", {1: torch.tensor([0.0, 0.0, 0.5])})
    assert step.fetch("rm_scores")[0].tolist() == [0.0, 1.0, 0.0, 0.0, 0.5]
    step.put("rm_scores", {0: torch.tensor([7.0, 8.0])})
    assert step.fetch("rm_scores")[0].tolist() == [7.0, 8.0, 0.0, 0.0, 0.5], "what is written is known"
    assert read(step.batch, "rm_scores")[0][0].tolist() == [7.0, 8.0, 0.0]


def test_a_number_from_the_reward_function_is_the_score_too(tmp_path: Path) -> None:
    trainer = run_trainer(tmp_path, "algo=dapo")
    step = Step(put(trainer, {"a_0_0": Row(2), "a_1_0": Row(1)}), threshold=1.0)
    step.infos = [{"acc": 0.75}, {"acc": 0.0}]  # verl's of such a function
    assert step.scores is not None
    assert step.scores.tolist() == [0.75, 0.0]


def test_a_missing_column_is_named(tmp_path: Path) -> None:
    trainer = run_trainer(tmp_path, "algo=dapo")
    step = Step(put(trainer, {"a_0_0": Row(3)}), threshold=1.0)
    with pytest.raises(UserError, match=r"the actor's entropies are missing.*bypass_mode=false"):
        step.fetch("entropy")
    with pytest.raises(UserError, match="TransferQueue has no column nothing"):
        step.fetch("nothing")
    with pytest.raises(UserError, match="prompts has not a value for each token"):
        step.fetch("prompts")


class Reads:
    """Counts how often each column is read, of which keys, by our code and by verl's."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ours: Counter[str] = Counter()
        self.verls: Counter[str] = Counter()
        stock = tq.kv_batch_get

        def counted(keys: Any, partition_id: str, select_fields: Any = None) -> Any:
            caller = sys._getframe(1).f_globals["__name__"]
            (self.ours if caller.startswith("gtpo_verl") else self.verls).update(select_fields)
            return stock(keys=keys, partition_id=partition_id, select_fields=select_fields)

        monkeypatch.setattr(tq, "kv_batch_get", counted)


@pytest.mark.parametrize("algo", ["dapo", "gtpo", "ar"])
@pytest.mark.parametrize("rejection", [False, True])
def test_each_version_of_a_column_is_fetched_once_an_update(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, algo: str, rejection: bool
) -> None:
    """Of the step of `separate_async`, two updates; verl writes old log-probs and entropies once, advantages once, and
    with rejection sampling the mask a second time.
    """
    overrides = [f"algo={algo}", "trainer.credit_dump_freq=1", "algorithm.overlong_filtering=true"]
    if rejection:
        overrides += ["algorithm.rollout_correction.rollout_rs=seq_mean_k1"]
        overrides += ["algorithm.rollout_correction.rollout_rs_threshold=0.5_2.0"]
    trainer = run_trainer(tmp_path, *overrides)
    reads = Reads(monkeypatch)
    for update in range(2):
        rows = {f"{update}{group}_{session}_0": Row(2 + session, session < 1) for group in "ab" for session in range(3)}
        batch, metrics = to_advantages(trainer, put(trainer, rows))
        with trainer.credit.without_truncated(trainer.update, metrics):
            pass
        of_verl = ("response_mask", "rm_scores", "old_log_probs", "entropy", "advantages")
        of_rollout = ("rollout_log_probs", "rollout_entropies", "rollout_versions", "extra_fields")
        expected = dict.fromkeys((*of_verl, *of_rollout, "responses", "prompts"), 1)
        if rejection:
            expected["response_mask"] = 2
        assert reads.ours == expected
        assert reads.verls["response_mask"] == 2, "the count is of real reads"
        reads.ours.clear()
        reads.verls.clear()
        trainer.records.log(1, metrics, batch)
        assert not reads.ours, "lengths and groups are in the tags"


# -------------------------------------------------------------------- what counts in a group


PENALTY = ("reward.reward_kwargs.overlong_buffer_cfg.enable=true", "reward.reward_kwargs.overlong_buffer_cfg.len=4")


@pytest.mark.parametrize("algo", ["ar", "eapo", "gtpo"])
def test_lengths_are_those_of_verls_reward_manager(tmp_path: Path, algo: str) -> None:
    """It counts a tool's tokens too. Of 32 tokens 4 are the buffer: 30 are punished by a half, and of 30 tokens here
    20 are the policy's.
    """
    overrides = [f"algo={algo}", "data.max_response_length=32", *PENALTY]
    if algo == "gtpo":
        overrides.append("algorithm.gtpo.length_penalty=soft")
    trainer = run_trainer(tmp_path, *overrides)
    tools = [1] * 10 + [0] * 10 + [1] * 10
    with_tools = {"a_0_0": Row(30, True, mask=tools, reward=0.5), "a_1_0": Row(4, True), "a_2_0": Row(4, False)}
    batch, _ = to_advantages(trainer, put(trainer, with_tools))
    found = first_tokens(batch)
    assert found[0] < found[1] - 0.1, "two correct responses, one of them long"
    if algo == "gtpo":
        return
    scores = torch.tensor([1.0, 1.0, -1.0]) + soft_overlong_penalty(torch.tensor([30, 4, 4]), 32, 4)
    assert scores.tolist() == [0.5, 1.0, -1.0]
    expected = grpo_advantages(scores, torch.ones(3, 1, dtype=torch.bool), torch.zeros(3, dtype=torch.int64)).advantages
    if algo == "eapo":  # entropies are all equal
        return
    assert torch.sign(torch.tensor(found)).tolist() == torch.sign(expected[:, 0]).tolist()


def session_rows(length: int = 8) -> dict[str, Row]:
    """A correct session of three outputs against three wrong ones of one."""
    outputs = {f"a_0_{output}": Row(length, True) for output in range(3)}
    return outputs | {f"a_{session}_0": Row(length) for session in (1, 2, 3)}


@pytest.mark.parametrize("algo", ["dapo", "polarity_entropy", "fork20", "ce_gppo", "w_reinforce", "gtpo", "grpo_s"])
def test_of_a_session_with_several_outputs_the_last_counts(tmp_path: Path, algo: str) -> None:
    """One correct response in four: 1.5 and -0.5 for DAPO; GTPO divides by the deviation over tokens."""
    trainer = run_trainer(tmp_path, f"algo={algo}")
    several, metrics = to_advantages(trainer, put(trainer, session_rows()))
    found = first_tokens(several)
    advantages, _ = read(several, "advantages")
    clear()
    single = {key: row for key, row in session_rows().items() if key not in ("a_0_0", "a_0_1")}
    batch, of_single = to_advantages(trainer, put(trainer, single))
    expected = first_tokens(batch)
    whole = read(batch, "advantages")[0]
    torch.testing.assert_close(advantages[2:], whole)
    torch.testing.assert_close(advantages[0].mean(), whole[0].mean())
    torch.testing.assert_close(advantages[1], advantages[0])
    if algo in ("dapo", "ce_gppo"):
        assert found == pytest.approx([1.5] * 3 + [-0.5] * 3, abs=1e-5)
    if algo == "gtpo":
        assert found == pytest.approx([1.70] * 3 + [-0.57] * 3, abs=5e-3)
    assert len(expected) == 4
    for name in ("credit/responses", "training/accuracy", "training/lone_responses"):
        assert metrics[name] == of_single[name], name


@pytest.mark.parametrize("algo", ["dapo", "gtpo", "grpo_s", "ar", "rl_zvp"])
def test_a_rejected_response_counts_in_its_group(tmp_path: Path, algo: str) -> None:
    """Its tokens alone leave the loss: with the only wrong response rejected, the correct ones keep their advantage."""
    correction = "algorithm.rollout_correction.rollout_rs"
    rows = {f"a_{session}_0": Row(3, session > 0) for session in range(4)}
    found = {}
    for rejects in (False, True):
        rejection = [f"{correction}=seq_mean_k1", f"{correction}_threshold=0.5_2.0"] if rejects else []
        trainer = run_trainer(tmp_path, f"algo={algo}", *rejection)
        rows["a_0_0"].rollout_log_probs = torch.full((3,), -3.0)
        batch, _ = to_advantages(trainer, put(trainer, rows))
        found[rejects], mask = read(batch, "advantages")
        assert mask.any(1).tolist() == [not rejects, True, True, True]
        clear()
    torch.testing.assert_close(found[True][1:], found[False][1:])
    assert not found[True][0].any()
    if algo == "dapo":
        assert found[True][1, 0] == pytest.approx(0.5, abs=1e-5)


# -------------------------------------------------------------------- credit alone


def verls_trainer(*overrides: str) -> Any:
    """Credit assignment on verl's own trainer with verl's own configuration."""
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", [*overrides, "actor_rollout_ref.rollout.calculate_log_probs=true"])
    OmegaConf.resolve(config)
    trainer: Any = type("Trainer", (CreditTrainer, PPOTrainerSync), {})(config=config)
    trainer.global_steps = 1
    return trainer


@pytest.mark.parametrize("algo", ["gtpo", "grpo_s", "ar"])
def test_credit_needs_nothing_but_verls_trainer_and_configuration(tmp_path: Path, algo: str) -> None:
    generator = torch.Generator().manual_seed(0)
    rows = {
        f"{group}_{session}_0": Row(
            3 + session,
            session < 2,
            entropy=torch.rand(3 + session, generator=generator) + 0.1,
            log_probs=-torch.rand(3 + session, generator=generator),
        )
        for group in "ab"
        for session in range(4)
    } | {"pad_0_0": Row(1)}
    trainer = verls_trainer(f"algorithm.adv_estimator={algo}")
    batch, metrics = to_advantages(trainer, put(trainer, rows))
    found, mask = read(batch, "advantages")
    clear()
    of_run = run_trainer(tmp_path, f"algo={algo}", "reward.reward_kwargs.overlong_buffer_cfg.enable=false")
    batch, metrics_of_run = to_advantages(of_run, put(of_run, rows))
    torch.testing.assert_close(found, read(batch, "advantages")[0], atol=1e-6, rtol=0)
    assert found[mask].abs().min() > 0
    for name in ("credit/responses", "credit/entropy_all", "training/accuracy", "training/lone_responses"):
        assert metrics[name] == pytest.approx(metrics_of_run[name]), name
    assert metrics["credit/responses"] == 8


def test_truncated_responses_are_masked_in_the_update_of_verls_trainer_too(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[int]] = []
    monkeypatch.setattr(
        PPOTrainerSync,
        "_update_actor",
        lambda self, batch, metrics: seen.append(read(batch)[0].sum(-1).tolist()) or batch,
    )
    trainer = verls_trainer(
        "algorithm.adv_estimator=gtpo", "+algorithm.overlong_filtering=true", "data.max_response_length=3"
    )
    rows = {"a_0_0": Row(2, True, entropy=torch.ones(2)), "a_1_0": Row(3, entropy=torch.ones(3))}
    batch, metrics = to_advantages(trainer, put(trainer, rows))
    trainer._update_actor(batch, metrics)
    assert seen == [[2, 0]]
    assert metrics["training/overlong_filtered_share"] == 0.5


@pytest.mark.parametrize("name", ["score", "acc"])  # of a reward function that returns one number, verl makes `acc`
def test_scores_that_differ_where_verdicts_do_not_are_named(name: str) -> None:
    """Right answers worth 0.9 under a threshold of 1: nothing is learnt, and the score looks healthy."""
    infos = [{name: 0.9}, {name: 0.0}, {name: 0.9}]
    wrong = torch.tensor([False] * 3)
    warning = verdicts_warning(wrong, infos, 1.0)
    assert warning is not None
    assert "is wrong by algorithm.correct_threshold=1, while scores go from 0 to 0.9" in warning
    assert verdicts_warning(torch.tensor([True, False, True]), infos, 0.9) is None
    assert verdicts_warning(wrong, [{name: 0.0}] * 3, 1.0) is None
