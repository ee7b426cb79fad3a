"""source=rollout: when the actor's pass is run after all, and that training goes on with the rollout's log-probs either
way; and what a dead engine is called.
"""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from step_trainer import Row, put, read, run_trainer
from verl.trainer.ppo.v1.trainer_base import PPOTrainer
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync

from gtpo_verl.errors import UserError
from gtpo_verl.integrations.step import health
from gtpo_verl.integrations.trainer import RunTrainer
from gtpo_verl.integrations.validation import ValidatingTrainer

pytestmark = pytest.mark.slow

OF_ROLLOUT = torch.tensor([-2.0, -2.0])
ROWS = {
    "a_0_0": Row(
        2,
        True,
        entropy=torch.tensor([0.5, 1.5]),
        rollout_entropies=torch.tensor([0.5, 1.25]),
        rollout_log_probs=OF_ROLLOUT,
        version=4,
    ),
    "a_1_0": Row(
        1,
        entropy=torch.tensor([2.5]),
        rollout_entropies=torch.tensor([2.0]),
        rollout_log_probs=OF_ROLLOUT[:1],
        version=3,
    ),
}


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """verl's passes, by whether they bypassed the actor."""
    seen: list[bool] = []
    stock = PPOTrainer._compute_old_log_prob

    def noted(self: Any, batch: Any, metrics: dict) -> Any:
        seen.append(self.config.algorithm.rollout_correction.bypass_mode)
        return stock(self, batch, metrics)

    monkeypatch.setattr(PPOTrainer, "_compute_old_log_prob", noted)
    return seen


def trainer_of(tmp_path: Path, source: str, check_every: int = 20) -> Any:
    return run_trainer(tmp_path, f"algorithm.entropy.source={source}", f"algorithm.entropy.check_every={check_every}")


def old_log_probs(trainer: Any, step: int) -> dict[str, float]:
    """Run a step's pass; returns the metrics of entropies."""
    trainer.global_steps = step
    metrics: dict[str, float] = {}
    trainer._compute_old_log_prob(put(trainer, ROWS), metrics)
    return {name: value for name, value in metrics.items() if name.startswith("rollout_entropy/")}


def test_a_step_that_compares_ends_with_the_rollouts_log_probs(passes: list[bool], tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, "rollout")
    metrics = old_log_probs(trainer, 5)
    assert passes == [False, True]  # the actor's, then the rollout's over them
    assert metrics["rollout_entropy/abs_diff_max"] == 0.25
    assert metrics["rollout_entropy/abs_diff_mean"] == 0.125  # tokens of version 4, the weights that step 5 starts with
    assert metrics["rollout_entropy/stale_share"] == pytest.approx(1 / 3)
    assert metrics["rollout_entropy/stale_abs_diff_mean"] == 0.5
    assert metrics["rollout_entropy/check_s"] >= 0
    assert metrics["rollout_entropy/time_saved_s"] == 0
    assert read(trainer.update.batch, "old_log_probs")[0].tolist() == [[-2.0, -2.0], [-2.0, 0.0]]


def test_an_actors_pass_that_fails_leaves_the_run_in_bypass_mode(tmp_path: Path) -> None:
    def fails(batch: Any) -> Any:
        assert not trainer.config.algorithm.rollout_correction.bypass_mode
        raise RuntimeError("out of memory")

    trainer = trainer_of(tmp_path, "rollout")
    batch = put(trainer, ROWS)
    trainer.actor_rollout_wg = SimpleNamespace(compute_log_prob=fails)
    with pytest.raises(RuntimeError, match="out of memory"):
        trainer._compute_old_log_prob(batch, {})
    assert trainer.config.algorithm.rollout_correction.bypass_mode


def test_later_steps_skip_the_actor_and_say_what_that_saved(passes: list[bool], tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, "rollout")
    for step in (5, 6):
        old_log_probs(trainer, step)
    passes.clear()
    assert list(old_log_probs(trainer, 7)) == ["rollout_entropy/time_saved_s"]
    assert passes == [True]
    passes.clear()
    old_log_probs(trainer, 21)
    assert passes == [False, True]


def test_without_checks_the_actor_is_never_asked(passes: list[bool], tmp_path: Path) -> None:
    assert old_log_probs(trainer_of(tmp_path, "rollout", check_every=0), 1) == {}
    assert passes == [True]


@pytest.mark.parametrize(("source", "compared"), [("actor", False), ("both", True)])
def test_the_other_sources_run_the_actors_pass_once(
    passes: list[bool], tmp_path: Path, source: str, compared: bool
) -> None:
    metrics = old_log_probs(trainer_of(tmp_path, source), 5)
    assert passes == [False]
    assert ("rollout_entropy/abs_diff_max" in metrics) is compared
    assert ("rollout_entropy/check_s" in metrics) is compared  # what `rollout` would save
    assert metrics.get("rollout_entropy/time_saved_s", 0.0) == 0.0


def test_a_dead_engine_is_named_with_the_way_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    trainer = run_trainer(tmp_path)
    trainer.llm_server_manager = SimpleNamespace(server_handles=["a", "b"])
    monkeypatch.setattr(health, "dead_servers", lambda servers: ["server 1: gone"] if servers == ["a", "b"] else [])
    with pytest.raises(UserError) as caught:
        trainer.health.check_servers()
    assert "vLLM died (server 1: gone)" in str(caught.value)
    assert f"trainer.run_dir={tmp_path}" in str(caught.value)
    assert "See the engine's traceback in the run's log" in str(caught.value)
    assert "\n" not in str(caught.value)
    monkeypatch.setattr(health, "dead_servers", lambda servers: [])
    trainer.health.check_servers()


@pytest.mark.parametrize("moment", ["on_sample_end", "_validate"])
def test_what_other_engines_left_is_not_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, moment: str) -> None:
    """With several engines verl goes on with fewer responses when one has died."""
    trainer = run_trainer(tmp_path)
    trainer.global_steps, trainer._in_training = 5, True
    trainer.llm_server_manager = SimpleNamespace(server_handles=["a", "b"])
    dead: list[str] = []
    monkeypatch.setattr(health, "dead_servers", lambda servers: dead if servers else [])
    for verls in (PPOTrainerSync, ValidatingTrainer):
        monkeypatch.setattr(verls, moment, lambda self: {"val": 1.0}, raising=False)
    end = getattr(RunTrainer, moment)
    end(trainer)
    dead.append("server 1: gone")
    with pytest.raises(UserError, match=r"^vLLM died \(server 1: gone\)"):
        end(trainer)


def test_a_dead_server_of_the_guide_is_told_from_the_policys(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    trainer = run_trainer(tmp_path)
    trainer.llm_server_manager = SimpleNamespace(server_handles=["a"])
    trainer.guide_servers = SimpleNamespace(server_handles=["g"])
    monkeypatch.setattr(health, "dead_servers", lambda servers: ["server 0: gone"] if servers == ["g"] else [])
    with pytest.raises(UserError) as caught:
        trainer.health.check_servers()
    assert str(caught.value).startswith("the guide's vLLM died (server 0: gone; algorithm.guide.model=")
    assert f"trainer.run_dir={tmp_path}" in str(caught.value)
    assert "\n" not in str(caught.value)
