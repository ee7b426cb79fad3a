"""The guide's rows in the trainer, on a real TransferQueue: verl's own old-log-prob and advantage steps and its loss,
with an actor that answers at once.
"""

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transfer_queue as tq
from metrics_doc import undocumented
from step_trainer import clear, read, run_trainer
from transfer_queue import KVBatchMeta
from verl.utils import tensordict_utils as tu
from verl.utils.tensordict_utils import list_of_dict_to_tensordict

from gtpo_verl.algorithms import Batch, algorithm, grpo_advantages, soft_overlong_penalty
from gtpo_verl.algorithms.losses import mixed_loss, sequence_loss, token_loss
from gtpo_verl.algorithms.mixed_policy import GuideConfig, guided_advantages, on_only_advantages
from gtpo_verl.errors import UserError
from gtpo_verl.integrations.guide import FIRST_SESSION, Reserve

pytestmark = pytest.mark.slow

PROMPT, STEP = 2, 3
GUIDE = FIRST_SESSION + 3
# a group whose own rows are all wrong, one that has both, and a padding row; a session of the guide is the last
CORRECT = {
    "a_0_0": False,
    "a_1_0": False,
    "a_2_0": False,
    f"a_{GUIDE}_0": True,
    "b_0_0": True,
    "b_1_0": False,
    "b_2_0": False,
    f"b_{GUIDE}_0": False,
    "pad_0_0": False,
}
KEYS = list(CORRECT)
OF_GUIDE = torch.tensor([str(GUIDE) in key for key in KEYS])
REAL = torch.tensor([not key.startswith("pad") for key in KEYS])
GROUP = torch.tensor([ord(key[0]) for key in KEYS])


class Columns:
    """Of the rows, ragged: what the actor computes, the guide's log-probabilities, and a policy some updates later."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.lengths = [1 if key.startswith("pad") else 2 + number % 4 for number, key in enumerate(KEYS)]

        def column() -> list[torch.Tensor]:
            return [-2 * torch.rand(length, generator=generator) for length in self.lengths]

        self.actor, self.phi, self.new = column(), column(), column()
        self.entropy = [-row for row in column()]


def make_trainer(run_dir: Path, columns: Columns, *overrides: str) -> Any:
    """The trainer of a run over verl's own steps, with an actor whose passes are columns."""
    trainer = run_trainer(run_dir, *overrides)
    trainer.global_steps = STEP
    trainer.actor_rollout_wg = SimpleNamespace(compute_log_prob=lambda batch: _pass(batch, columns))
    return trainer


def _pass(batch: KVBatchMeta, columns: Columns) -> KVBatchMeta:
    """What a worker writes: a value for each token of prompt and response, one place early."""

    def whole(row: torch.Tensor) -> torch.Tensor:
        return torch.cat([torch.zeros(PROMPT - 1), row, torch.zeros(1)])

    rows = [
        {"log_probs": whole(actor), "entropy": whole(entropy)}
        for actor, entropy in zip(columns.actor, columns.entropy, strict=True)
    ]
    tq.kv_batch_put(keys=batch.keys, partition_id="train", fields=list_of_dict_to_tensordict(rows))
    return batch


def put(columns: Columns) -> KVBatchMeta:
    """Write what the agent loops write; the rollout agrees with the actor on own rows."""
    rows: list[dict[str, Any]] = []
    for number, (key, length) in enumerate(zip(KEYS, columns.lengths, strict=True)):
        of_guide, correct = bool(OF_GUIDE[number]), CORRECT[key]
        rows.append(
            {
                "uid": key.split("_")[0],
                "prompts": torch.ones(PROMPT, dtype=torch.int64),
                "responses": torch.ones(length, dtype=torch.int64),
                "response_mask": torch.full((length,), int(REAL[number])),
                "rollout_log_probs": columns.phi[number] if of_guide else columns.actor[number].clone(),
                "rollout_entropies": torch.zeros(length) if of_guide else columns.entropy[number].clone(),
                "rollout_versions": torch.full((length,), -1 if of_guide else STEP - 1, dtype=torch.int32),
                "rm_scores": torch.tensor([0.0] * (length - 1) + [1.0 if correct else -1.0]),
                "extra_fields": {"reward_extra_info": {"acc": float(correct), "score": 1.0 if correct else -1.0}},
            }
        )
    tags = [
        {"global_steps": STEP, "seq_len": 4, "response_len": length, "is_padding": key.startswith("pad")}
        for key, length in zip(KEYS, columns.lengths, strict=True)
    ]
    tq.kv_batch_put(keys=KEYS, partition_id="train", fields=list_of_dict_to_tensordict(rows), tags=tags)
    return KVBatchMeta(partition_id="train", keys=list(KEYS), tags=tags)


@pytest.fixture
def columns() -> Iterator[Columns]:
    yield Columns()
    clear()


def padded(rows: list[torch.Tensor]) -> torch.Tensor:
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)


RATIOS = {"phi": "phi", "one": "zeros", "old": "actor"}


def loss_of_worker(trainer: Any, batch: KVBatchMeta, columns: Columns, tokens_in_all: int) -> torch.Tensor:
    """The loss that a worker gets from the marked rows of all 8 responses; the policy's new log-probs are the
    columns'.
    """
    trainer.guide.mark(batch)
    assert batch.fields is not None, "verl's workers read the columns that the advantage step knew"
    data = tq.kv_batch_get(keys=batch.keys, partition_id="train", select_fields=batch.fields)
    whole = [torch.cat([torch.zeros(PROMPT - 1), row, torch.zeros(1)]) for row in columns.new]
    output = {"log_probs": torch.nested.as_nested_tensor(whole, layout=torch.jagged)}
    sizes = {"dp_size": 1, "batch_num_tokens": tokens_in_all, "global_batch_size": 8, "loss_scale_factor": None}
    tu.assign_non_tensor(data, **sizes)
    loss: torch.Tensor = trainer.guide.loss()(model_output=output, data=data)[0]
    return loss


@pytest.mark.parametrize("ratio", RATIOS)
def test_a_step_from_log_probs_to_the_loss(tmp_path: Path, columns: Columns, ratio: str) -> None:
    clip = "none" if ratio == "one" else "dapo"
    trainer = make_trainer(
        tmp_path, columns, "algo=dapo_mixed", f"algorithm.guide.ratio={ratio}", f"algorithm.guide.clip={clip}"
    )
    batch, metrics = put(columns), {}
    batch = trainer._compute_old_log_prob(batch, metrics)
    denominators = {"phi": columns.phi, "one": [torch.zeros_like(row) for row in columns.phi], "old": columns.actor}
    expected = [
        theirs if of_guide else own
        for theirs, own, of_guide in zip(denominators[ratio], columns.actor, OF_GUIDE, strict=True)
    ]
    old, rollout, mask = read(batch, "old_log_probs", "rollout_log_probs")
    assert torch.equal(old, padded(expected)[:, : old.shape[1]])
    assert torch.equal(rollout, old), "verl's rollout correction finds the same policy"
    assert metrics["training/rollout_probs_diff_max"] < 1e-6, "of own rows alone"
    assert metrics["rollout_entropy/abs_diff_max"] == 0
    assert metrics["rollout_entropy/stale_share"] == 0

    batch = trainer._compute_advantage(batch, metrics)
    advantages, _ = read(batch, "advantages")
    rewards = torch.tensor([1.0 if right else -1.0 for right in CORRECT.values()])
    union = grpo_advantages(rewards, mask, GROUP).advantages
    torch.testing.assert_close(advantages, union, atol=1e-6, rtol=1e-5)
    assert advantages[3, 0] > 1.4, "the guide's row in a group whose own rows are all wrong"
    policy, theirs = padded(columns.actor), padded(denominators[ratio])
    tokens = mask & OF_GUIDE[:, None]
    ratios = (policy - theirs)[:, : mask.shape[1]][tokens].double().exp()
    assert metrics["guide/own_accuracy"] == pytest.approx(1 / 6)
    assert metrics["guide/guide_accuracy"] == 0.5
    assert metrics["guide/rows_share"] == 0.25
    assert metrics["guide/rescued_groups"] == 1
    assert metrics["guide/ratio_mean"] == pytest.approx(ratios.mean().item(), abs=1e-6)
    assert metrics["guide/ess"] == pytest.approx(
        (ratios.sum() ** 2 / ratios.square().sum() / len(ratios)).item(), abs=1e-6
    )
    if ratio == "old":
        assert (metrics["guide/ratio_mean"], metrics["guide/ess"], metrics["guide/clipfrac"]) == (1, 1, 0)
    assert metrics["training/accuracy"] == pytest.approx(2 / 8), "of all rows"
    assert undocumented(name for name in metrics if name.startswith("guide/")) == set()

    tokens_in_all = int(mask.sum())
    loss = loss_of_worker(trainer, batch, columns, tokens_in_all)
    losses, _ = mixed_loss(
        padded(columns.new)[:, : mask.shape[1]], old, union, mask, OF_GUIDE, 0.2, 0.28, 10.0, clip=clip
    )
    assert loss.item() == pytest.approx(losses.sum().item() / tokens_in_all, abs=1e-6)


@pytest.mark.parametrize("algo", ["gtpo", "grpo_s", "polarity_entropy"])
def test_other_methods_compare_own_rows_alone(tmp_path: Path, columns: Columns, algo: str) -> None:
    """Their advantages through verl's step; the loss that the workers get is theirs on own rows."""
    trainer = make_trainer(tmp_path, columns, f"algo={algo}", "algorithm.guide.mode=mix")
    metrics: dict[str, Any] = {}
    batch = trainer._compute_advantage(trainer._compute_old_log_prob(put(columns), metrics), metrics)
    advantages, old, mask = read(batch, "advantages", "old_log_probs")
    entropy = padded(columns.entropy)[:, : mask.shape[1]]
    correct = torch.tensor(list(CORRECT.values()))
    rewards = torch.where(correct, 1.0, -1.0)
    method = algorithm(algo)
    of_method, _ = method.configure(trainer.config.algorithm[algo])
    of_guides = Batch(mask, GROUP, correct, torch.where(OF_GUIDE[:, None], 99.0, entropy), rewards)
    if algo != "polarity_entropy":  # settings of the quickstart: a soft overlong penalty on correct responses
        penalty = soft_overlong_penalty(mask.sum(1), 24, 4)
        of_guides = replace(of_guides, length_penalty=penalty)
    expected = guided_advantages(method, of_guides, OF_GUIDE, trainer.guide.config, of_method).advantages
    torch.testing.assert_close(advantages, expected.float(), atol=1e-5, rtol=1e-5)
    assert advantages[3, 0] > 0, "the guide's row in a group whose own rows are all wrong"
    assert advantages[0, 0] < 0, "and so they are punished"
    assert 0 <= metrics["guide/clipfrac"] <= 1
    assert metrics["credit/responses"] == 6, "own rows"
    own = torch.cat(
        [row for row, of_guide, real in zip(columns.entropy, OF_GUIDE, REAL, strict=True) if real and not of_guide]
    )
    assert metrics["credit/entropy_all"] == pytest.approx(own.mean().item(), rel=1e-5)

    tokens_in_all = int(mask.sum())
    loss = loss_of_worker(trainer, batch, columns, tokens_in_all)
    new = padded(columns.new)[:, : mask.shape[1]]
    if algo == "grpo_s":
        expected_loss = sequence_loss(new, old, advantages[:, 0], mask)[0].sum() / 8
    else:
        expected_loss = token_loss(new, old, advantages, mask, 0.2, 0.28, 10.0)[0].sum() / tokens_in_all
    assert loss.item() == pytest.approx(expected_loss.item(), abs=1e-6)
    assert trainer.config.actor_rollout_ref.actor.policy_loss.loss_mode == method.loss, "as it was"


@pytest.mark.parametrize("by_std", [True, False])
def test_advantages_over_own_rows(tmp_path: Path, columns: Columns, by_std: bool) -> None:
    trainer = make_trainer(
        tmp_path,
        columns,
        *("algo=dapo_mixed", "algorithm.guide.adv_scope=on_only", f"algorithm.norm_adv_by_std_in_grpo={by_std}"),
    )
    batch = trainer._compute_advantage(trainer._compute_old_log_prob(put(columns), {}), {})
    advantages, returns, mask = read(batch, "advantages", "returns")
    rewards = torch.tensor([1.0 if right else -1.0 for right in CORRECT.values()])
    expected = on_only_advantages(rewards[REAL], GROUP[REAL], OF_GUIDE[REAL], by_std)
    torch.testing.assert_close(advantages[REAL], expected[:, None] * mask[REAL], atol=1e-6, rtol=1e-5)
    assert torch.equal(advantages[REAL], returns[REAL])
    assert advantages[:3].abs().max() == 0, "own rows that are all wrong"
    assert advantages[3, 0] == 2.0, "R - mean"


def test_without_a_guide_the_columns_are_verls(tmp_path: Path, columns: Columns) -> None:
    """`algo=dapo_mixed` with `mode=off` writes what `algo=dapo` writes, bit for bit, and logs no metric of a guide."""
    found = []
    for overrides in (("algo=dapo",), ("algo=dapo_mixed", "algorithm.guide.mode=off")):
        trainer, metrics = make_trainer(tmp_path, columns, *overrides), {}
        batch = trainer._compute_advantage(trainer._compute_old_log_prob(put(columns), metrics), metrics)
        names = ["old_log_probs", "rollout_log_probs", "advantages"]
        data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=names)
        written = {name: dict(zip(batch.keys, data[name].unbind(), strict=True)) for name in names}
        found.append((written, {name: value for name, value in metrics.items() if not name.endswith("_s")}))
    (dapo, dapos_metrics), (off, its_metrics) = found
    for name, rows in dapo.items():
        assert all(torch.equal(rows[key], off[name][key]) for key in KEYS), name
    assert its_metrics == dapos_metrics
    assert not [name for name in its_metrics if name.startswith("guide/")]


def test_the_workers_get_the_loss_where_there_is_a_guide(
    tmp_path: Path, columns: Columns, monkeypatch: pytest.MonkeyPatch
) -> None:
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer

    monkeypatch.setattr(PPOTrainer, "_setup", lambda self: None)
    for mode, expected in (("off", 0), ("both", 1)):
        given: list[Any] = []
        trainer = make_trainer(tmp_path, columns, "algo=dapo_mixed", f"algorithm.guide.mode={mode}")
        trainer.actor_rollout_wg.set_loss_fn = given.append
        trainer._setup()
        assert len(given) == expected


@pytest.mark.parametrize(("acc", "rows"), [(1.0, 0), (0.0, 1), (None, 1)])
def test_the_verdicts_of_a_group_decide_and_none_is_wrong(acc: float | None, rows: int) -> None:
    """A verifier that failed on a response has returned None for it."""
    reserve = Reserve(GuideConfig(mode="zero"), size=2, threshold=0.5)
    output = SimpleNamespace(extra_fields={"reward_extra_info": {"acc": acc}})
    with reserve.awaited(0):
        reserve.judge(0, [output])
    assert (asyncio.run(reserve.turn(1)) is not None) == bool(rows)


def test_a_response_without_a_verdict_is_named() -> None:
    reserve = Reserve(GuideConfig(mode="zero"), size=2, threshold=0.5)
    with pytest.raises(UserError, match="no verdict on a response of a group with a guide"):
        reserve.is_correct(SimpleNamespace(extra_fields={"reward_extra_info": {}}))
