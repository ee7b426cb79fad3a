"""The trainer of a run on a real TransferQueue, through verl's own steps; only workers and engines stand in."""

import json
import math
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import torch
import transfer_queue as tq
from actor_death import await_death
from checkpoint_writer import write_fsdp
from step_trainer import Row, clear, put, read, run_trainer, to_advantages
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1.trainer_base import PPOTrainer
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.utils.tensordict_utils import list_of_dict_to_tensordict

from gtpo_verl.algorithms import Batch
from gtpo_verl.errors import StepGivenUpError, UserError
from gtpo_verl.integrations import health
from gtpo_verl.integrations.sampling import BudgetSpentError
from gtpo_verl.integrations.step.checkpoints import restore_groups
from gtpo_verl.integrations.step.columns import Step
from gtpo_verl.integrations.step.not_finite import NotFiniteError
from gtpo_verl.runs.checkpoints import Layout, checkpoints, find_start
from gtpo_verl.runs.directory import record_metrics

pytestmark = pytest.mark.slow


# -------------------------------------------------------------------- advantages


ROWS = {"a_0_0": Row(2, True), "a_1_0": Row(3), "lone_2_0": Row(3, True), "wrong_0_0": Row(1), "pad_0_0": Row(1)}


def test_log_probs_are_fetched_for_the_methods_that_read_them_and_seeds_differ(tmp_path: Path) -> None:
    def given(*overrides: str, number: int = 1) -> Batch:
        trainer = run_trainer(tmp_path, *overrides)
        for row in ROWS.values():
            row.log_probs = torch.full((row.length,), -0.25)
        trainer._compute_old_log_prob(put(trainer, ROWS), {})
        batch: Batch = trainer.credit.context(trainer.update, number, guide=False).batch
        return batch

    without, found = given("algo=dapo"), given("algo=ar")
    assert without.old_log_probs is None
    assert found.old_log_probs is not None
    assert found.old_log_probs.tolist() == [[-0.25] * length + [0.0] * (3 - length) for length in (2, 3, 3, 1, 0)], (
        "verl's padding has no part"
    )
    next_step, other_run = given("algo=ar", number=2), given("algo=ar", "seed=7", number=2)
    assert len({found.seed, next_step.seed, other_run.seed}) == 3
    assert found.seed == without.seed


@pytest.mark.parametrize(
    "estimator", ["grpo", "grpo_vectorized", "rloo", "opo", "gpg", "reinforce_plus_plus_baseline", "rloo_vectorized"]
)
def test_a_lone_response_has_no_advantage(tmp_path: Path, estimator: str) -> None:
    """verl's GRPO gives it its reward, +1 or -1; GTPO and GRPO-S give it 0, and so do we."""
    trainer = run_trainer(tmp_path, "algo=dapo", f"algorithm.adv_estimator={estimator}")
    batch, metrics = to_advantages(trainer, put(trainer, ROWS))
    advantages, returns, mask = read(batch, "advantages", "returns")
    first = advantages[:, 0].tolist()
    assert first[0] > 0 > first[1]
    assert first[2:4] == [0.0, 0.0]
    assert torch.equal(advantages, returns)
    assert mask.sum(-1).tolist() == [2, 3, 3, 1, 0]
    assert metrics["training/lone_responses"] == 2
    assert metrics["training/accuracy"] == 0.5


def test_estimators_without_a_group_mean_keep_lone_responses(tmp_path: Path) -> None:
    trainer = run_trainer(tmp_path, "algo=dapo", "algorithm.adv_estimator=reinforce_plus_plus")
    batch, metrics = to_advantages(trainer, put(trainer, ROWS))
    assert read(batch, "advantages")[0][2, 0] != 0
    assert metrics["training/lone_responses"] == 2


def test_steps_that_validate_keep_two_responses_with_their_advantages(tmp_path: Path) -> None:
    trainer = run_trainer(tmp_path, "algo=dapo", "trainer.test_freq=4")
    trainer.total_training_steps = 6
    rows = {"a_0_0": Row(2, True), "b_0_0": Row(3), "b_1_0": Row(1, True)}
    for trainer.global_steps in range(1, 7):
        batch = put(trainer, rows)
        ids = [
            {"prompts": torch.tensor([7, 7]), "responses": torch.full((row.length,), 10 + number)}
            for number, row in enumerate(rows.values())
        ]
        tq.kv_batch_put(keys=batch.keys, partition_id="train", fields=list_of_dict_to_tensordict(ids))
        to_advantages(trainer, batch)
    lines = [json.loads(line) for line in (tmp_path / "credit_samples.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [4, 6]
    right, wrong = lines[0]["samples"]
    assert (right["prompt"], right["tokens"], right["correct"]) == ("7 7", ["12"], True)
    assert (wrong["prompt"], wrong["tokens"], wrong["correct"]) == ("7 7", ["11"] * 3, False)
    assert right["advantages"][0] == pytest.approx(-wrong["advantages"][0])
    assert wrong["entropies"] == [0.5] * 3


def test_several_outputs_of_one_rollout_are_one_response(tmp_path: Path) -> None:
    keys = ("a_0_0", "a_0_1", "b_0_0", "b_1_0", "pad_0_0")
    batch = put(run_trainer(tmp_path), {key: Row(2) for key in keys})
    assert Step(batch, threshold=1.0).lone.tolist() == [True, True, False, False]


# -------------------------------------------------------------------- values that are not finite


COLUMNS = {"rm_scores": "the reward function returned it", "old_log_probs": "logits", "entropy": "logits"}


def spoiled(column: str, value: float) -> dict[str, Row]:
    """The rows, one of them with a value that is not finite."""
    field = {"rm_scores": "reward", "old_log_probs": "log_probs", "entropy": "entropy"}[column]
    bad: Any = value if column == "rm_scores" else torch.tensor([0.5, value, 0.5])
    return ROWS | {"a_1_0": replace(ROWS["a_1_0"], **{field: bad})}


@pytest.mark.parametrize("column", COLUMNS)
def test_a_batch_that_is_not_finite_ends_the_run_and_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, column: str
) -> None:
    trainer = run_trainer(tmp_path, "algo=dapo")
    saved: list[int] = []
    monkeypatch.setattr(type(trainer), "_save_step_before", lambda self: saved.append(self.global_steps))
    batch = put(trainer, spoiled(column, math.nan))
    with pytest.raises(
        NotFiniteError, match=rf"step 1: {column} of 1 of 4 .*\(a_1_0\); likely cause: .*{COLUMNS[column]}"
    ):
        to_advantages(trainer, batch)
    kept = torch.load(tmp_path / "not_finite" / "1.pt")
    assert kept["keys"] == batch.keys
    assert kept[column].isnan().sum(1).tolist() == [0, 1, 0, 0, 0]
    assert set(kept) >= {"rm_scores", "old_log_probs", "entropy", "responses", "response_mask"}
    assert saved == [1], "what was trained before is saved"
    with pytest.raises(NotFiniteError, match=r"The batch is kept in .*/1-2\.pt"):
        to_advantages(trainer, put(trainer, spoiled(column, math.inf)))
    assert torch.load(tmp_path / "not_finite" / "1.pt")[column].isnan().any()


def test_values_outside_the_mask_may_be_anything(tmp_path: Path) -> None:
    trainer = run_trainer(tmp_path, "algo=dapo")
    rows = {"a_0_0": Row(3, True, mask=[1, 0, 1], entropy=torch.tensor([0.5, math.nan, 0.5])), "a_1_0": Row(2)}
    to_advantages(trainer, put(trainer, rows))
    assert not trainer._skips_update


def test_a_reward_at_the_token_of_a_tool_is_looked_at(tmp_path: Path) -> None:
    """verl writes it at the last token, whoever wrote that."""
    trainer = run_trainer(tmp_path, "algo=dapo")
    rows = {"a_0_0": Row(3, True, mask=[1, 1, 0], reward=math.nan), "a_1_0": Row(2)}
    with pytest.raises(NotFiniteError, match=r"rm_scores of 1 of 2 .*\(a_0_0\).*the reward function returned it"):
        to_advantages(trainer, put(trainer, rows))


def test_gradients_that_overflow_are_no_fault_where_fp16_scales_the_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def update(self: Any, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        metrics |= {"actor/grad_norm": math.inf, "actor/pg_loss": loss}
        return batch

    monkeypatch.setattr(PPOTrainer, "_update_actor", update)
    precision = "actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype=fp16"
    trainer = run_trainer(tmp_path, "algo=dapo", precision)
    batch, metrics = to_advantages(trainer, put(trainer, ROWS))
    loss = 0.5
    trainer._update_actor(batch, metrics)
    loss = math.nan
    with pytest.raises(NotFiniteError, match=r"actor/pg_loss of the update"):
        trainer._update_actor(batch, metrics)


def test_a_batch_that_is_not_finite_may_be_skipped_so_often(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither actor nor critic is updated: the critic would learn returns of 0."""
    updates: list[str] = []
    for role in ("actor", "critic"):
        monkeypatch.setattr(
            PPOTrainer, f"_update_{role}", lambda self, batch, metrics, role=role: updates.append(role) or batch
        )
    trainer = run_trainer(tmp_path, "algo=dapo", "guards.not_finite=skip", "guards.max_skipped_steps=1")
    monkeypatch.setattr(type(trainer), "_save_step_before", lambda self: None)

    def update(rows: dict[str, Row]) -> KVBatchMeta:
        batch, metrics = to_advantages(trainer, put(trainer, rows))
        trainer._update_critic(batch, metrics)
        return trainer._update_actor(batch, metrics)

    batch = update(spoiled("entropy", math.inf))
    assert (updates, trainer.not_finite.skipped) == ([], 1)
    assert not read(batch, "advantages")[0].any(), "verl logs them"
    with pytest.raises(NotFiniteError, match=r"guards\.max_skipped_steps=1"):
        update(spoiled("entropy", math.inf))
    update(ROWS)
    assert updates == ["critic", "actor"]


@pytest.mark.parametrize(
    ("strategy", "action", "ends"),
    [
        ("fsdp2", "stop", "FSDP left out each mini-batch with such a gradient"),
        ("fsdp2", "skip", None),
        ("megatron", "skip", "Megatron has applied it to the weights"),
    ],
)
def test_a_gradient_that_is_not_finite_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, strategy: str, action: str, ends: str | None
) -> None:
    """FSDP's engine leaves such an update out, which may be all that is wanted; Megatron's has damaged the weights."""

    def update(self: Any, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        metrics["actor/grad_norm"] = math.nan
        return batch

    monkeypatch.setattr(PPOTrainer, "_update_actor", update)
    trainer = run_trainer(tmp_path, "algo=dapo", f"guards.not_finite={action}", "guards.max_skipped_steps=1")
    trainer.not_finite._applied = strategy == "megatron"
    batch, metrics = to_advantages(trainer, put(trainer, ROWS))
    if ends is None:
        trainer._update_actor(batch, metrics)
        assert trainer.not_finite.skipped == 1
        return
    with pytest.raises(NotFiniteError, match=rf"actor/grad_norm of the update is NaN or infinite.*{ends}"):
        trainer._update_actor(batch, metrics)
    assert set(torch.load(tmp_path / "not_finite" / "1.pt")) >= {"advantages", "old_log_probs", "keys"}


# -------------------------------------------------------------------- overlong filtering


@pytest.mark.parametrize("fails", [False, True])
def test_truncated_responses_are_masked_for_the_update_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    seen = []

    def update(self: Any, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        seen.append(read(batch)[0].sum(-1).tolist())
        if fails:
            raise RuntimeError("out of memory")
        return batch

    monkeypatch.setattr(PPOTrainer, "_update_actor", update)
    limit = 4
    trainer = run_trainer(
        tmp_path, "algo=dapo", "algorithm.overlong_filtering=true", f"data.max_response_length={limit}"
    )
    rows = {"a_0_0": Row(2, True), "a_1_0": Row(limit), "a_2_0": Row(limit), "pad_0_0": Row(1)}
    batch, metrics = to_advantages(trainer, put(trainer, rows))
    if fails:
        with pytest.raises(RuntimeError, match="out of memory"):
            trainer._update_actor(batch, metrics)
    else:
        trainer._update_actor(batch, metrics)
    assert seen == [[2, 0, 0, 0]]
    assert read(batch)[0].sum(-1).tolist() == [2, limit, limit, 0]
    assert metrics["training/overlong_filtered_share"] == pytest.approx(2 / 3)


# -------------------------------------------------------------------- several updates of a step


def test_counts_of_several_updates_add_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """verl averages what the updates of a step report (`separate_async.parameter_sync_step`)."""
    trainer = run_trainer(tmp_path, "algo=dapo", "data.train_batch_size=6")
    trainer.parameter_sync_step = 3
    trainer.train_dataloader = Position(prompts=0)

    def once(self: Any, metrics: dict, timing_raw: dict, sample_batch_size: int) -> KVBatchMeta:
        number = self.local_trigger_step
        rows = {f"u{number}_{session}_0": Row(2, session == 0) for session in range(2)} | {f"lone{number}_0_0": Row(2)}
        batch, found = to_advantages(self, put(self, rows))
        metrics.update(found | {"rollout_entropy/check_s": 10.0})
        return batch

    monkeypatch.setattr(PPOTrainer, "_step_once", once)
    monkeypatch.setattr(PPOTrainer, "prepare_step", lambda self: {})
    monkeypatch.setattr(type(trainer), "_sampling", lambda self: None)
    for _ in range(2):  # the second step starts at 0 again
        metrics: dict[str, float] = {}
        trainer.step(metrics, {})
        clear()
    assert metrics["training/lone_responses"] == 3
    assert metrics["credit/groups"] == 6
    assert metrics["credit/responses"] == 9
    assert metrics["rollout_entropy/check_s"] == 30.0
    assert metrics["training/accuracy"] == pytest.approx(1 / 3)
    assert metrics["training/skipped_updates"] == 0


# -------------------------------------------------------------------- a spent budget


class Position:
    """A data loader that has handed out so many prompts."""

    def __init__(self, prompts: int) -> None:
        self.prompts = prompts

    def state_dict(self) -> dict[str, int]:
        return {"prompts": self.prompts}


@pytest.fixture
def spent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A trainer whose step 6 ends with a spent budget and one group found."""
    trainer = run_trainer(tmp_path, "algo=dapo", f"trainer.default_local_dir={tmp_path}")
    trainer.global_steps = 6
    trainer.train_dataloader = Position(prompts=700)

    def save(self: Any) -> None:
        folder = Path(self.config.trainer.default_local_dir) / f"global_step_{self.global_steps}"
        (folder / "actor").mkdir(parents=True)
        torch.save(self.train_dataloader.state_dict(), folder / "data.pt")

    def step(self: Any, metrics: dict, timing_raw: dict) -> Any:
        put(self, {"found_0_0": Row(2, True), "found_1_0": Row(2)})
        tq.kv_batch_put(
            keys=["found"],
            partition_id="train",
            tags=[{"is_prompt": True, "status": "finished", "global_steps": self.global_steps}],
        )
        raise BudgetSpentError("spent")

    monkeypatch.setattr(PPOTrainer, "_save_checkpoint", save)
    monkeypatch.setattr(PPOTrainer, "step", step)
    return trainer


@pytest.mark.parametrize("saved", [True, False], ids=["right_after_a_checkpoint", "later"])
def test_a_spent_budget_keeps_the_groups_that_were_found(spent: Any, tmp_path: Path, saved: bool) -> None:
    if saved:
        spent.global_steps, spent.train_dataloader.prompts = 5, 640
        spent._save_checkpoint()
        spent.global_steps, spent.train_dataloader.prompts = 6, 700
    with pytest.raises(BudgetSpentError):
        spent.step({}, {})
    folder = tmp_path / "global_step_5"
    tq.kv_clear(keys=["found", "found_0_0", "found_1_0"], partition_id="train")
    assert restore_groups(folder, with_entropies=True)[0] == 1
    assert set(tq.kv_list("train")["train"]) == {"found", "found_0_0", "found_1_0"}
    position = torch.load(folder / "data.pt")
    assert position == {"prompts": 700}, "the prompts of the groups found would be generated again"


@pytest.mark.parametrize("saved", [True, False], ids=["right_after_a_checkpoint", "later"])
def test_a_step_that_is_given_up_is_generated_again(
    spent: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, saved: bool
) -> None:
    def tags(status: str, step: int) -> list[dict[str, Any]]:
        return [{"is_prompt": True, "status": status, "global_steps": step}]

    def step(self: Any, metrics: dict, timing_raw: dict) -> Any:
        self.train_dataloader.prompts = 700
        put(self, {"came_0_0": Row(2, True)})
        tq.kv_batch_put(keys=["came"], partition_id="train", tags=tags("finished", 6))
        tq.kv_batch_put(keys=["never"], partition_id="train", tags=tags("running", 6))
        raise StepGivenUpError("no response has arrived")

    monkeypatch.setattr(PPOTrainer, "step", step)
    put(spent, {"waits_0_0": Row(2, True)})
    tq.kv_batch_put(keys=["waits"], partition_id="train", tags=tags("finished", 4))
    spent.train_dataloader.prompts = 640
    if saved:
        spent.global_steps = 5
        spent._save_checkpoint()
        spent.global_steps = 6
    with pytest.raises(StepGivenUpError):
        spent.step({}, {})
    tq.kv_clear(keys=list(tq.kv_list("train")["train"]), partition_id="train")
    folder = tmp_path / "global_step_5"
    assert restore_groups(folder, with_entropies=True)[0] == 1
    assert set(tq.kv_list("train")["train"]) == {"waits", "waits_0_0"}, "one that never ends would be waited for"
    assert torch.load(folder / "data.pt") == {"prompts": 640}


def test_a_folder_of_another_run_is_no_checkpoint(spent: Any, tmp_path: Path) -> None:
    (tmp_path / "global_step_5").mkdir()
    with pytest.raises(BudgetSpentError):
        spent.step({}, {})
    assert (tmp_path / "global_step_5" / "actor").is_dir()


def test_without_a_trained_step_nothing_is_saved(spent: Any, tmp_path: Path) -> None:
    spent.global_steps = 1
    with pytest.raises(BudgetSpentError):
        spent.step({}, {})
    assert not list(tmp_path.glob("global_step_*"))


# -------------------------------------------------------------------- checkpoints


@pytest.fixture
def saving(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A trainer whose verl part saves a complete checkpoint, or is killed before the tracker."""
    trainer = run_trainer(tmp_path, "trainer.max_actor_ckpt_to_keep=1", "algorithm.filter_groups.enable=false")

    def save(self: Any) -> None:
        assert self.config.trainer.max_actor_ckpt_to_keep is None, "verl would remove the old one too early"
        write_fsdp(Path(self.config.trainer.default_local_dir), self.global_steps, tracked=self.global_steps != 3)
        if self.global_steps == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(PPOTrainer, "_save_checkpoint", save)
    return trainer


def test_the_old_checkpoint_goes_when_the_new_one_is_the_last(saving: Any, tmp_path: Path) -> None:
    """Also those of earlier attempts, which verl does not know."""
    for saving.global_steps in (1, 2):
        saving._save_checkpoint()
    assert list(checkpoints(tmp_path / "checkpoints")) == [2]
    assert saving.config.trainer.max_actor_ckpt_to_keep == 1
    saving.global_steps = 3
    with pytest.raises(KeyboardInterrupt):
        saving._save_checkpoint()
    assert find_start(tmp_path / "checkpoints", Layout("fsdp", 1)).folder == tmp_path / "checkpoints" / "global_step_2"
    resumed = run_trainer(tmp_path, "trainer.max_actor_ckpt_to_keep=1", "algorithm.filter_groups.enable=false")
    resumed.global_steps = 4
    resumed._save_checkpoint()
    assert list(checkpoints(tmp_path / "checkpoints")) == [4]


@pytest.mark.parametrize(("mode", "left"), [("sync", 5), ("colocate_async", 4)])
def test_rows_whose_prompts_were_trained_on_do_not_stay_in_the_queue_of_a_resumed_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, left: int
) -> None:
    """verl saves TransferQueue in the step before it clears the step's rows, but after it has cleared their prompts."""
    monkeypatch.setattr(PPOTrainer, "_load_checkpoint", lambda self: None)
    trainer = run_trainer(tmp_path, "algorithm.filter_groups.enable=false", mode=mode)
    trainer.global_steps = 0
    put(trainer, {"a_0_0": Row(2), "b_0_0": Row(2), "b_1_0": Row(2)})
    prompts = [{"is_prompt": True, "status": status, "global_steps": 1} for status in ("running", "pending")]
    tq.kv_batch_put(keys=["b", "c"], partition_id="train", tags=prompts)
    trainer._load_checkpoint()
    rows = tq.kv_list("train")["train"]
    clear()
    assert len(rows) == left
    assert ("a_0_0" in rows) == (mode == "sync")


def test_a_step_that_was_saved_and_not_logged_is_logged_when_it_resumes(
    saving: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(self: Any) -> None:
        self.global_steps = 2

    monkeypatch.setattr(PPOTrainer, "_load_checkpoint", load)
    record_metrics(tmp_path, 1, {"actor/grad_norm": 0.1})
    saving.global_steps = 2
    batch = put(saving, {"b_0_0": Row(2), "pad_0_0": Row(1)})
    saving.records.trained({"actor/grad_norm": 0.5, "table": {1: 2}}, batch)
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
    saving: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, saved: bool
) -> None:
    done: list[str] = []
    monkeypatch.setattr(PPOTrainerSync, "on_step_end", lambda self: done.append("weights sent"))
    saving._save_checkpoint = lambda: done.append("saved")
    saving.global_steps, saving.total_training_steps = 2, 9
    saving.on_step_end()
    assert (done, saving.total_training_steps) == (["weights sent"], 9)
    (tmp_path / "STOP").touch()
    saving.checkpoints.saved = 2 if saved else 1
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
    monkeypatch.setattr(health, "ANSWER_TIMEOUT", 2.0)
    trainer = run_trainer(tmp_path)
    trainer._rollout_server_managers = list
    trainer.actor_rollout_wg = SimpleNamespace(_workers=[busy])
    trainer.health.check()
    trainer.health._limit = 1e-6
    trainer.health.begin(1, "updating the actor")
    with pytest.raises(UserError, match=r"^step 1: updating the actor for .* the limit of guards\.phase_timeout"):
        trainer.health.check()
    trainer.reward_loop_manager = SimpleNamespace(reward_loop_workers=[idle, dead])
    ray.kill(dead)
    await_death(dead)
    with pytest.raises(
        UserError, match=r"^reward worker 1: its Ray actor has ended\. .* resumes from the last checkpoint"
    ):
        trainer.health.check()
    ray.kill(busy)
