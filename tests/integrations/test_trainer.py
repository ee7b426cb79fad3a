"""The trainer's own steps on a real TransferQueue; verl's methods around them stand in, the end-to-end tests run the
real ones.
"""

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import ray
import torch
import transfer_queue as tq
from checkpoint_writer import write_fsdp
from omegaconf import OmegaConf
from transfer_queue import KVBatchMeta
from verl.trainer.ppo import core_algos
from verl.trainer.ppo.v1.trainer_base import PPOTrainer
from verl.utils.tensordict_utils import list_of_dict_to_tensordict

from gtpo_verl.errors import UserError
from gtpo_verl.integrations import liveness
from gtpo_verl.integrations import trainer as ours
from gtpo_verl.integrations.carry_over import restore_groups
from gtpo_verl.integrations.entropy_source import SOURCES
from gtpo_verl.integrations.guide import GuideRows
from gtpo_verl.integrations.not_finite import NotFinite, NotFiniteError
from gtpo_verl.integrations.sampling import BudgetedReplayBuffer, BudgetSpentError
from gtpo_verl.integrations.transfer_queue import fetch, lone_responses, put_rows, reward_infos
from gtpo_verl.integrations.waiting import PhaseLimit
from gtpo_verl.runs.checkpoints import Layout, checkpoints, find_start
from gtpo_verl.runs.directory import MetricsRecorder

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("queue")]

LIMIT = 4


class Trainer(ours.CreditAssignmentMixin):
    def __init__(self, run_dir: Path, **algorithm: Any) -> None:
        defaults = {"adv_estimator": "grpo", "correct_threshold": 1.0, "overlong_filtering": False}
        self.entropy_source = SOURCES["actor"]
        self.run_dir = run_dir
        self.trainer_mode = "sync"
        self.global_steps = 1
        self._checkpointed = None
        self._not_logged = None
        self._skips_update = False
        self.not_finite = NotFinite(run_dir, "stop", 1)
        self.phase_limit = PhaseLimit(None)
        self.config = OmegaConf.create(
            {
                "algorithm": defaults | algorithm,
                "actor_rollout_ref": {
                    "actor": {"policy_loss": {"loss_mode": "vanilla"}, "loss_agg_mode": "token-mean"},
                    "rollout": {"calculate_log_probs": False},
                },
                "data": {"max_response_length": LIMIT},
                "reward": {"reward_kwargs": {"max_resp_len": LIMIT, "overlong_buffer_cfg": {"enable": False}}},
                "trainer": {"credit_dump_freq": 0, "test_freq": -1, "default_local_dir": str(run_dir)},
            }
        )
        self.guide = GuideRows(self.config)
        self.started: Any = SimpleNamespace(rewards=None, agent_loops=None, wait_for_queue=lambda: None)

    def on_sample_end(self) -> None:
        pass


def put(lengths: dict[str, int], correct: set[str]) -> KVBatchMeta:
    """Write responses of these lengths, with verdicts, rewards and entropies, as a batch."""
    rows = [
        {
            "response_mask": torch.ones(length, dtype=torch.int64),
            "entropy": torch.full((length,), 0.5),
            "old_log_probs": torch.full((length,), -1.0),
            "responses": torch.ones(length, dtype=torch.int64),
            "rm_scores": torch.tensor([0.0] * (length - 1) + [1.0 if key in correct else -1.0]),
            "extra_fields": {"reward_extra_info": {"acc": float(key in correct)}},
        }
        for key, length in lengths.items()
    ]
    tags = [{"global_steps": 1, "is_padding": key.startswith("pad")} for key in lengths]
    tq.kv_batch_put(keys=list(lengths), partition_id="train", fields=list_of_dict_to_tensordict(rows), tags=tags)
    return KVBatchMeta(partition_id="train", keys=list(lengths), tags=tags)


@pytest.fixture(autouse=True)
def empty_queue() -> Iterator[None]:
    yield
    left = tq.kv_list("train").get("train", {})
    if left:
        tq.kv_clear(keys=list(left), partition_id="train")


# -------------------------------------------------------------------- advantages


@pytest.fixture
def verls_grpo(monkeypatch: pytest.MonkeyPatch) -> None:
    """verl's advantage step, with its real GRPO estimator."""

    def compute(self: Any, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        rewards, mask = fetch(batch, "rm_scores")
        uids = np.array([key.rsplit("_", 2)[0] for key in batch.keys], dtype=object)
        advantages, _ = core_algos.compute_grpo_outcome_advantage(rewards, mask.long(), uids)
        rows = [{"advantages": row[on], "returns": row[on]} for row, on in zip(advantages, mask, strict=True)]
        tq.kv_batch_put(keys=batch.keys, partition_id="train", fields=list_of_dict_to_tensordict(rows))
        return batch

    monkeypatch.setattr(PPOTrainer, "_compute_advantage", compute)


LENGTHS = {"a_0_0": 2, "a_1_0": 3, "lone_2_0": 3, "wrong_0_0": 1, "pad_0_0": 1}


def test_log_probs_are_fetched_for_the_methods_that_read_them_and_seeds_differ(tmp_path: Path) -> None:
    batch = put(LENGTHS, {"a_0_0"})
    rows = [{"old_log_probs": torch.full((length,), -0.25)} for length in LENGTHS.values()]
    tq.kv_batch_put(keys=batch.keys, partition_id="train", fields=list_of_dict_to_tensordict(rows))
    infos = reward_infos("train", batch.keys)
    without = Trainer(tmp_path)._credit_context(batch, infos)
    assert without.old_log_probs is None
    trainer = Trainer(tmp_path, adv_estimator="ar")
    found = trainer._credit_context(batch, infos)
    assert found.old_log_probs is not None
    assert found.old_log_probs.tolist() == [[-0.25] * length + [0.0] * (3 - length) for length in LENGTHS.values()]
    trainer.global_steps += 1
    next_step = trainer._credit_context(batch, infos).seed
    trainer.config.seed = 7
    assert len({without.seed, next_step, trainer._credit_context(batch, infos).seed}) == 3
    assert found.seed == without.seed


@pytest.mark.usefixtures("verls_grpo")
def test_a_lone_response_has_no_advantage(tmp_path: Path) -> None:
    """verl's GRPO gives it its reward, +1 or -1; GTPO and GRPO-S give it 0, and so do we."""
    batch = put(LENGTHS, {"a_0_0", "lone_2_0"})
    metrics: dict[str, float] = {}
    Trainer(tmp_path)._compute_advantage(batch, metrics)
    advantages, returns, mask = fetch(batch, "advantages", "returns")
    first = advantages[:, 0].tolist()
    assert first[0] == pytest.approx(-first[1])
    assert first[0] > 0.7
    assert first[2:4] == [0.0, 0.0]
    assert torch.equal(advantages, returns)
    assert mask.sum(-1).tolist() == [2, 3, 3, 1, 1]
    assert metrics["training/lone_responses"] == 2


@pytest.mark.usefixtures("verls_grpo")
def test_estimators_without_a_group_mean_keep_lone_responses(tmp_path: Path) -> None:
    batch = put(LENGTHS, {"a_0_0", "lone_2_0"})
    Trainer(tmp_path, adv_estimator="reinforce_plus_plus")._compute_advantage(batch, {})
    advantages, _ = fetch(batch, "advantages")
    assert advantages[2, 0] == pytest.approx(1.0, abs=1e-5)


@pytest.mark.usefixtures("verls_grpo")
def test_steps_that_validate_keep_two_responses_with_their_advantages(tmp_path: Path) -> None:
    batch = put({"a_0_0": 2, "b_0_0": 3, "b_1_0": 1}, {"a_0_0", "b_1_0"})
    ids = [
        {"prompts": torch.tensor([number]), "responses": torch.full((length,), 10 + number)}
        for number, length in enumerate((2, 3, 1))
    ]
    tq.kv_batch_put(keys=batch.keys, partition_id="train", fields=list_of_dict_to_tensordict(ids))
    trainer: Any = Trainer(tmp_path)
    trainer.config.trainer.test_freq = 4
    trainer.total_training_steps = 6
    trainer.tokenizer = SimpleNamespace(decode=lambda tokens: " ".join(map(str, tokens)))
    for trainer.global_steps in range(1, 7):
        trainer._compute_advantage(batch, {})
    lines = [json.loads(line) for line in (tmp_path / "credit_samples.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [4, 6]
    right, wrong = lines[0]["samples"]
    assert (right["prompt"], right["tokens"], right["correct"]) == ("2", ["12"], True)
    assert (wrong["prompt"], wrong["tokens"], wrong["correct"]) == ("1", ["11"] * 3, False)
    assert right["advantages"][0] == pytest.approx(-wrong["advantages"][0])
    assert wrong["entropies"] == [0.5] * 3


def test_several_outputs_of_one_rollout_are_one_response() -> None:
    keys = {"a_0_0": 2, "a_0_1": 2, "b_0_0": 2, "b_1_0": 2, "pad_0_0": 1}
    assert lone_responses(put(keys, set())) == ["a_0_0", "a_0_1"]


def test_a_missing_column_is_named() -> None:
    batch = put({"a_0_0": 2}, set())
    with pytest.raises(UserError, match=r"the rollout returned no entropies.*entropy\.source=actor"):
        fetch(batch, "rollout_entropies")
    assert reward_infos("train", batch.keys) == [{"acc": 0.0}]


# -------------------------------------------------------------------- values that are not finite


COLUMNS = {"rm_scores": "the reward function returned it", "old_log_probs": "logits", "entropy": "logits"}


@pytest.mark.parametrize("column", COLUMNS)
@pytest.mark.usefixtures("verls_grpo")
def test_a_batch_that_is_not_finite_ends_the_run_and_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, column: str
) -> None:
    batch = put(LENGTHS, {"a_0_0"})
    put_rows("train", column, {"a_1_0": torch.tensor([0.5, float("nan"), 0.5])})
    saved: list[int] = []
    monkeypatch.setattr(Trainer, "_save_before_the_end", lambda self: saved.append(self.global_steps))
    with pytest.raises(
        NotFiniteError, match=rf"step 1: {column} of 1 of 5 .*\(a_1_0\); likely cause: .*{COLUMNS[column]}"
    ):
        Trainer(tmp_path)._compute_advantage(batch, {})
    kept = torch.load(tmp_path / "not_finite" / "1.pt")
    assert kept["keys"] == batch.keys
    assert kept[column][1].isnan().tolist() == [False, True, False]
    assert set(kept) >= {"rm_scores", "old_log_probs", "entropy", "responses", "response_mask"}
    assert saved == [1], "what was trained before is saved"


@pytest.mark.usefixtures("verls_grpo")
def test_a_batch_that_is_not_finite_may_be_skipped_so_often(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    updates: list[int] = []
    monkeypatch.setattr(PPOTrainer, "_update_actor", lambda self, batch, metrics: updates.append(1) or batch)
    monkeypatch.setattr(Trainer, "_save_before_the_end", lambda self: None)
    trainer = Trainer(tmp_path)
    trainer.not_finite = NotFinite(tmp_path, "skip", 1)
    batch = put(LENGTHS, {"a_0_0"})
    put_rows("train", "entropy", {"a_1_0": torch.full((3,), float("inf"))})
    metrics: dict[str, float] = {}
    trainer._update_actor(trainer._compute_advantage(batch, metrics), metrics)
    assert (updates, metrics["training/skipped_updates"]) == ([], 1)
    assert not fetch(batch, "advantages")[0].any(), "verl logs them"
    with pytest.raises(NotFiniteError, match=r"guards\.max_skipped_steps=1"):
        trainer._compute_advantage(batch, {})
    put_rows("train", "entropy", {"a_1_0": torch.full((3,), 0.5)})
    trainer._update_actor(trainer._compute_advantage(batch, {}), {})
    assert updates == [1]


@pytest.mark.usefixtures("verls_grpo")
def test_a_gradient_that_is_not_finite_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def update(self: Any, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        metrics["actor/grad_norm"] = float("nan")
        return batch

    monkeypatch.setattr(PPOTrainer, "_update_actor", update)
    trainer = Trainer(tmp_path)
    batch = trainer._compute_advantage(put(LENGTHS, {"a_0_0"}), {})
    with pytest.raises(NotFiniteError, match=r"actor/grad_norm of the update is NaN or infinite"):
        trainer._update_actor(batch, {})
    assert set(torch.load(tmp_path / "not_finite" / "1.pt")) >= {"advantages", "old_log_probs", "keys"}


# -------------------------------------------------------------------- overlong filtering


@pytest.mark.parametrize("fails", [False, True])
def test_truncated_responses_are_masked_for_the_update_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    batch = put({"a_0_0": 2, "a_1_0": LIMIT, "a_2_0": LIMIT, "pad_0_0": 1}, set())
    seen = []

    def update(self: Any, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        seen.append(fetch(batch)[0].sum(-1).tolist())
        if fails:
            raise RuntimeError("out of memory")
        return batch

    monkeypatch.setattr(PPOTrainer, "_update_actor", update)
    metrics: dict[str, float] = {}
    trainer = Trainer(tmp_path, overlong_filtering=True)
    if fails:
        with pytest.raises(RuntimeError, match="out of memory"):
            trainer._update_actor(batch, metrics)
    else:
        trainer._update_actor(batch, metrics)
    assert seen == [[2, 0, 0, 1]]
    assert fetch(batch)[0].sum(-1).tolist() == [2, LIMIT, LIMIT, 1]
    assert metrics["training/overlong_filtered_share"] == pytest.approx(2 / 3)


# -------------------------------------------------------------------- a spent budget


class Position:
    """A data loader that has handed out so many prompts."""

    def __init__(self, prompts: int) -> None:
        self.prompts = prompts

    def state_dict(self) -> dict[str, int]:
        return {"prompts": self.prompts}


@pytest.fixture
def spent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Trainer:
    """A trainer whose step 6 ends with a spent budget and one group found."""
    trainer = Trainer(tmp_path)
    trainer.global_steps = 6
    trainer.train_dataloader = Position(prompts=700)
    trainer.replay_buffer = BudgetedReplayBuffer(
        trainer_mode="sync",
        trainer_config=OmegaConf.create({}),
        max_off_policy_threshold=None,
        max_off_policy_strategy="drop",
        sampler_kwargs=OmegaConf.create({}),
        refill_fn=lambda count: count,
        filter_groups_metric="acc",
        train_batch_size=4,
        max_num_gen_batches=2,
        on_budget="stop",
        carry_over_max_age=0,
        correct_threshold=1.0,
        mini_batch_size=4,
    )

    def save(self: Any) -> None:
        folder = Path(self.config.trainer.default_local_dir) / f"global_step_{self.global_steps}"
        (folder / "actor").mkdir(parents=True)
        torch.save(self.train_dataloader.state_dict(), folder / "data.pt")

    def step(self: Any, metrics: dict, timing_raw: dict) -> Any:
        put({"found_0_0": 2, "found_1_0": 2}, {"found_0_0"})
        tq.kv_batch_put(
            keys=["found"],
            partition_id="train",
            tags=[{"is_prompt": True, "status": "finished", "global_steps": self.global_steps}],
        )
        raise BudgetSpentError("spent")

    monkeypatch.setattr(PPOTrainer, "_save_checkpoint", save)
    monkeypatch.setattr(PPOTrainer, "step", step)
    trainer._pass_seconds = SimpleNamespace(clear=lambda: None)  # type: ignore[assignment]
    return trainer


@pytest.mark.parametrize("saved", [True, False], ids=["right_after_a_checkpoint", "later"])
def test_a_spent_budget_keeps_the_groups_that_were_found(spent: Trainer, tmp_path: Path, saved: bool) -> None:
    if saved:
        spent.global_steps, spent.train_dataloader.prompts = 5, 640
        spent._save_checkpoint()
        spent.global_steps, spent.train_dataloader.prompts = 6, 700
    with pytest.raises(BudgetSpentError):
        spent.step({}, {})
    folder = tmp_path / "global_step_5"
    tq.kv_clear(keys=["found", "found_0_0", "found_1_0"], partition_id="train")
    assert restore_groups(folder, "train", with_entropies=False)[0] == 1
    assert set(tq.kv_list("train")["train"]) == {"found", "found_0_0", "found_1_0"}
    position = torch.load(folder / "data.pt")
    assert position == {"prompts": 700}, "the prompts of the groups found would be generated again"


def test_a_folder_of_another_run_is_no_checkpoint(spent: Trainer, tmp_path: Path) -> None:
    (tmp_path / "global_step_5").mkdir()
    with pytest.raises(BudgetSpentError):
        spent.step({}, {})
    assert (tmp_path / "global_step_5" / "actor").is_dir()


def test_without_a_trained_step_nothing_is_saved(spent: Trainer, tmp_path: Path) -> None:
    spent.global_steps = 1
    with pytest.raises(BudgetSpentError):
        spent.step({}, {})
    assert list(tmp_path.iterdir()) == []


# -------------------------------------------------------------------- checkpoints


@pytest.fixture
def saving(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Trainer:
    """A trainer whose verl part saves a complete checkpoint, or is killed before the tracker."""
    trainer = Trainer(tmp_path)
    trainer.config.trainer.merge_with({"max_actor_ckpt_to_keep": 1, "default_local_dir": str(tmp_path / "checkpoints")})
    trainer.replay_buffer = None

    def save(self: Any) -> None:
        assert self.config.trainer.max_actor_ckpt_to_keep is None, "verl would remove the old one too early"
        write_fsdp(Path(self.config.trainer.default_local_dir), self.global_steps, tracked=self.global_steps != 3)
        if self.global_steps == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(PPOTrainer, "_save_checkpoint", save)
    return trainer


def test_the_old_checkpoint_goes_when_the_new_one_is_the_last(saving: Trainer, tmp_path: Path) -> None:
    """Also those of earlier attempts, which verl does not know."""
    for saving.global_steps in (1, 2):
        saving._save_checkpoint()
    assert list(checkpoints(tmp_path / "checkpoints")) == [2]
    assert saving.config.trainer.max_actor_ckpt_to_keep == 1
    saving.global_steps = 3
    with pytest.raises(KeyboardInterrupt):
        saving._save_checkpoint()
    assert find_start(tmp_path / "checkpoints", Layout("fsdp", 1)).folder == tmp_path / "checkpoints" / "global_step_2"
    resumed = Trainer(tmp_path)
    resumed.config, resumed.global_steps, resumed.replay_buffer = saving.config, 4, None
    resumed._save_checkpoint()
    assert list(checkpoints(tmp_path / "checkpoints")) == [4]


def test_a_step_that_was_saved_and_not_logged_is_logged_when_it_resumes(
    saving: Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(self: Any) -> None:
        self.global_steps = 2

    monkeypatch.setattr(PPOTrainer, "_load_checkpoint", load)
    saving.config.trainer.merge_with({"resume_mode": "auto", "del_local_ckpt_after_load": False})
    saving.recorder = MetricsRecorder(tmp_path)
    saving.recorder.write(1, {"actor/grad_norm": 0.1})
    saving.global_steps = 2
    saving._not_logged = {"actor/grad_norm": 0.5, "table": {1: 2}}, {"b": 2}
    saving._save_checkpoint()
    for _ in range(2):  # nothing is doubled
        saving._load_checkpoint()
    assert [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()] == [
        {"step": 1, "data": {"actor/grad_norm": 0.1}},
        {"step": 2, "data": {"actor/grad_norm": 0.5}},
    ]
    assert json.loads((tmp_path / "groups.jsonl").read_text()) == {"step": 2, "groups": {"b": 2}}


@pytest.mark.parametrize("saved", [True, False])
def test_a_stop_is_saved_once_and_before_the_engines_wake(
    saving: Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, saved: bool
) -> None:
    done: list[str] = []
    monkeypatch.setattr(PPOTrainer, "on_step_end", lambda self: done.append("weights sent"))
    monkeypatch.setattr(Trainer, "_save_checkpoint", lambda self: done.append("saved"))
    saving.global_steps, saving.total_training_steps = 2, 9
    saving.on_step_end()
    assert (done, saving.total_training_steps) == (["weights sent"], 9)
    (tmp_path / "STOP").touch()
    saving._checkpointed = 2 if saved else 1
    saving.on_step_end()
    assert done[1:] == (["weights sent"] if saved else ["saved", "weights sent"])
    assert saving.total_training_steps == 2


# -------------------------------------------------------------------- processes


def test_a_worker_that_was_killed_is_named_and_a_busy_one_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Worker:
        def work(self) -> None:
            time.sleep(600)

    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # Ray's workers cannot import the tests
    idle, busy, dead = (ray.remote(num_cpus=0)(Worker).remote() for _ in range(3))
    ray.get([actor.__ray_ready__.remote() for actor in (idle, busy, dead)])
    busy.work.remote()
    monkeypatch.setattr(liveness, "ANSWER_TIMEOUT", 2.0)
    monkeypatch.setattr(Trainer, "_rollout_server_managers", lambda self: [])
    trainer = Trainer(tmp_path)
    trainer.actor_rollout_wg = SimpleNamespace(_workers=[busy])
    trainer.check_processes()
    trainer.phase_limit = PhaseLimit(1e-6)
    trainer._enter("updating the actor")
    with pytest.raises(UserError, match=r"^step 1: updating the actor for .* the limit of guards\.phase_timeout"):
        trainer.check_processes()
    trainer.reward_loop_manager = SimpleNamespace(reward_loop_workers=[idle, dead])
    ray.kill(dead)
    with pytest.raises(
        UserError, match=r"^reward worker 1: its Ray actor has ended\. .* resumes from the last checkpoint"
    ):
        trainer.check_processes()
    ray.kill(busy)
