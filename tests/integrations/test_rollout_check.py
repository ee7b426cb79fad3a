"""source=rollout: when the actor's pass is run after all, and that training goes on with the rollout's log-probs either
way.

The trainer around it is a stand-in that writes down what it was asked for; the end-to-end tests run the real one.
"""

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from verl.trainer.ppo.v1.trainer_base import PPOTrainer

from gtpo_verl.errors import UserError
from gtpo_verl.integrations import trainer as ours
from gtpo_verl.integrations.entropy_source import SOURCES
from gtpo_verl.integrations.guide import GuideRows
from gtpo_verl.integrations.metrics import ActorPass

COLUMNS = {
    "entropy": torch.tensor([[0.5, 1.5], [2.5, 0.0]]),
    "rollout_entropies": torch.tensor([[0.5, 1.25], [2.0, 0.0]]),
    "rollout_versions": torch.tensor([[4, 4], [3, -1]]),
}
MASK = torch.tensor([[True, True], [True, False]])


class StandIn(ours.CreditAssignmentMixin):
    def __init__(self, source: str, step: int, check_every: int) -> None:
        self.entropy_source = SOURCES[source]
        self.actor_pass = ActorPass(check_every)
        self.global_steps = step
        self._pass_seconds = Counter()
        self.config = OmegaConf.create({"algorithm": {"rollout_correction": {"bypass_mode": source == "rollout"}}})
        self.guide = GuideRows(self.config)

    def on_sample_end(self) -> None:
        pass

    def _enter(self, phase: str) -> None:
        pass


def fetch(batch: Any, *columns: str) -> tuple[torch.Tensor, ...]:
    return *(COLUMNS[column] for column in columns), MASK


@pytest.fixture
def old_log_probs(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run our ``_compute_old_log_prob``; returns verl's passes, by whether they bypassed the actor, and the metrics."""
    passes: list[bool] = []

    def stock(self: Any, batch: Any, metrics: dict) -> Any:
        passes.append(self.config.algorithm.rollout_correction.bypass_mode)
        return batch

    monkeypatch.setattr(PPOTrainer, "_compute_old_log_prob", stock)
    monkeypatch.setattr(ours, "fetch", fetch)

    def run(trainer: StandIn) -> tuple[list[bool], dict[str, float]]:
        passes.clear()
        metrics: dict[str, float] = {}
        batch = SimpleNamespace(keys=["a_0_0", "a_1_0"], tags=[{"seq_len": 10}, {"seq_len": 30}])
        trainer._pass_seconds.clear()
        assert trainer._compute_old_log_prob(batch, metrics) is batch  # type: ignore[arg-type]
        return list(passes), metrics | trainer._pass_seconds

    return run


def test_a_step_that_compares_ends_with_the_rollouts_log_probs(old_log_probs: Any) -> None:
    trainer = StandIn("rollout", step=5, check_every=20)
    passes, metrics = old_log_probs(trainer)
    assert passes == [False, True]  # the actor's, then the rollout's over them
    assert metrics["rollout_entropy/abs_diff_max"] == 0.25
    assert metrics["rollout_entropy/abs_diff_mean"] == 0.125  # tokens of version 4, the weights that step 5 starts with
    assert metrics["rollout_entropy/stale_share"] == pytest.approx(1 / 3)
    assert metrics["rollout_entropy/stale_abs_diff_mean"] == 0.5
    assert metrics["rollout_entropy/check_s"] >= 0
    assert metrics["rollout_entropy/time_saved_s"] == 0


def test_an_actors_pass_that_fails_leaves_the_run_in_bypass_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(self: Any, batch: Any, metrics: dict) -> Any:
        assert not self.config.algorithm.rollout_correction.bypass_mode
        raise RuntimeError("out of memory")

    monkeypatch.setattr(PPOTrainer, "_compute_old_log_prob", fails)
    trainer = StandIn("rollout", step=5, check_every=20)
    with pytest.raises(RuntimeError, match="out of memory"):
        trainer._compute_old_log_prob(SimpleNamespace(tags=[]), {})  # type: ignore[arg-type]
    assert trainer.config.algorithm.rollout_correction.bypass_mode


def test_later_steps_skip_the_actor_and_say_what_that_saved(old_log_probs: Any) -> None:
    trainer = StandIn("rollout", step=5, check_every=20)
    for trainer.global_steps in (5, 6):
        old_log_probs(trainer)
    trainer.global_steps = 7
    passes, metrics = old_log_probs(trainer)
    assert passes == [True]
    assert list(metrics) == ["rollout_entropy/time_saved_s"]
    trainer.global_steps = 21
    assert old_log_probs(trainer)[0] == [False, True]


def test_without_checks_the_actor_is_never_asked(old_log_probs: Any) -> None:
    passes, metrics = old_log_probs(StandIn("rollout", step=1, check_every=0))
    assert (passes, metrics) == ([True], {})


@pytest.mark.parametrize(("source", "compared"), [("actor", False), ("both", True)])
def test_the_other_sources_run_the_actors_pass_once(old_log_probs: Any, source: str, compared: bool) -> None:
    passes, metrics = old_log_probs(StandIn(source, step=5, check_every=20))
    assert passes == [False]
    assert ("rollout_entropy/abs_diff_max" in metrics) is compared
    assert ("rollout_entropy/check_s" in metrics) is compared  # what `rollout` would save
    assert metrics.get("rollout_entropy/time_saved_s", 0.0) == 0.0


def test_seconds_of_several_updates_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """verl averages what the updates of a step report (`separate_async.parameter_sync_step`)."""

    class Updates(StandIn):
        parameter_sync_step = 3

        def prepare_step(self) -> dict:
            return {}

        def _step_once(self, metrics: dict, timing_raw: dict, sample_batch_size: int) -> Any:
            self._pass_seconds.update(self.actor_pass.ran(10.0, tokens=100))
            metrics["training/accuracy"] = 0.5
            return SimpleNamespace(
                partition_id="train", keys=[f"a{self.local_trigger_step}_0_0"], tags=[{"global_steps": 1}]
            )

    trainer = Updates("rollout", step=1, check_every=1)
    trainer.config.data = {"train_batch_size": 6}
    metrics: dict[str, float] = {}
    for _ in range(2):  # the second step starts at 0 again
        trainer.step(metrics, {})
    assert metrics["rollout_entropy/check_s"] == 30.0
    assert metrics["training/accuracy"] == 0.5


def test_a_dead_engine_is_named_with_the_way_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    trainer = StandIn("actor", step=5, check_every=20)
    trainer.run_dir = tmp_path
    trainer.llm_server_manager = SimpleNamespace(server_handles=["a", "b"])
    monkeypatch.setattr(ours, "dead_servers", lambda servers: ["server 1: gone"] if servers == ["a", "b"] else [])
    with pytest.raises(UserError) as caught:
        trainer.check_servers()
    assert "vLLM died (server 1: gone)" in str(caught.value)
    assert f"trainer.run_dir={tmp_path}" in str(caught.value)
    assert "See the engine's traceback in the run's log" in str(caught.value)
    assert "\n" not in str(caught.value)
    monkeypatch.setattr(ours, "dead_servers", lambda servers: [])
    trainer.check_servers()


@pytest.mark.parametrize("moment", ["on_sample_end", "_validate"])
def test_what_other_engines_left_is_not_trained_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Any, moment: str) -> None:
    """With several engines verl goes on with fewer responses when one has died."""
    trainer = StandIn("actor", step=5, check_every=20)
    trainer.run_dir, trainer._in_training = tmp_path, True
    trainer.config.seed = 0
    trainer.replay_buffer = SimpleNamespace(sample=None)
    trainer.agent_loop_manager = SimpleNamespace(generate_sequences=None)
    trainer.llm_server_manager = SimpleNamespace(server_handles=["a", "b"])
    dead: list[str] = []
    monkeypatch.setattr(ours, "dead_servers", lambda servers: dead if servers else [])
    monkeypatch.setattr(PPOTrainer, moment, lambda self: {"val": 1.0})
    end = getattr(ours.CreditAssignmentMixin, moment)
    end(trainer)
    dead.append("server 1: gone")
    with pytest.raises(UserError, match=r"^vLLM died \(server 1: gone\)"):
        end(trainer)


def test_a_dead_server_of_the_guide_is_told_from_the_policys(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    trainer = StandIn("actor", step=5, check_every=20)
    trainer.run_dir = tmp_path
    trainer.llm_server_manager = SimpleNamespace(server_handles=["a"])
    trainer._guide_servers = SimpleNamespace(server_handles=["g"])
    monkeypatch.setattr(ours, "dead_servers", lambda servers: ["server 0: gone"] if servers == ["g"] else [])
    with pytest.raises(UserError) as caught:
        trainer.check_servers()
    assert str(caught.value).startswith("the guide's vLLM died (server 0: gone; algorithm.guide.model=")
    assert f"trainer.run_dir={tmp_path}" in str(caught.value)
    assert "\n" not in str(caught.value)
