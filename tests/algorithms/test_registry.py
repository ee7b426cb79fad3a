"""The registry: the fixed interface of a method, what is refused, and a method of another package."""

import importlib.metadata
from dataclasses import dataclass, replace

import pytest
import torch

from gtpo_verl.algorithms import (
    Batch,
    GRPOSConfig,
    GTPOConfig,
    algorithm,
    algorithms,
    group_relative_overlong_penalty,
    grpo_advantages,
    grpo_s_advantages,
    gtpo_advantages,
    registry,
)
from gtpo_verl.errors import UserError

MASK = torch.ones(6, 5, dtype=torch.bool)
GROUP = torch.tensor([0, 0, 0, 1, 1, 1])
CORRECT = torch.tensor([True, False, False, True, True, False])
ENTROPY = torch.rand(6, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
REWARDS = torch.where(CORRECT, 1.0, -1.0).double()
PENALTY = torch.tensor([-0.25, 0, 0, 0, -0.5, 0], dtype=torch.float64)
FULL = Batch(MASK, GROUP, CORRECT, ENTROPY, REWARDS, old_log_probs=-ENTROPY, length_penalty=PENALTY)


def test_an_entry_computes_what_the_function_does() -> None:
    token = algorithm("gtpo").advantages(FULL, GTPOConfig(alpha2=0.5))
    expected = gtpo_advantages(ENTROPY, CORRECT, MASK, GROUP, GTPOConfig(alpha2=0.5), PENALTY)
    torch.testing.assert_close(token.advantages, expected.advantages, atol=0, rtol=0)
    sequence = algorithm("grpo_s").advantages(FULL, GRPOSConfig())
    expected = grpo_s_advantages(ENTROPY, CORRECT, MASK, GROUP, GRPOSConfig(), PENALTY)
    torch.testing.assert_close(sequence.advantages, expected.advantages, atol=0, rtol=0)
    for name in ("dapo", "grpo"):
        outcome = algorithm(name).advantages(FULL)
        expected = grpo_advantages(REWARDS + PENALTY, MASK, GROUP, CORRECT)
        torch.testing.assert_close(outcome.advantages, expected.advantages, atol=0, rtol=0)


def test_without_a_config_the_published_setting_holds() -> None:
    for entry in algorithms().values():
        torch.testing.assert_close(
            entry.advantages(FULL).advantages, entry.advantages(FULL, entry.config()).advantages, atol=0, rtol=0
        )
    assert (algorithm("gtpo").config().alpha1, algorithm("gtpo").config().alpha2) == (1.0, 0.1)


def test_a_penalty_that_the_config_names_is_computed_and_one_in_the_batch_wins() -> None:
    config = GTPOConfig(length_penalty="grop", gamma=0.51)
    mask = torch.arange(5) < torch.tensor([5, 3, 3, 1, 5, 2])[:, None]
    bare = replace(FULL, response_mask=mask, length_penalty=None)
    computed = algorithm("gtpo").advantages(bare, config).advantages
    penalty = group_relative_overlong_penalty(mask.sum(1), CORRECT, GROUP, 0.51)
    assert penalty.min() < 0
    given = replace(bare, length_penalty=penalty)
    torch.testing.assert_close(computed, algorithm("gtpo").advantages(given, config).advantages)
    other = replace(bare, length_penalty=PENALTY)
    assert (computed - algorithm("gtpo").advantages(other, config).advantages).abs().max() > 1e-3


@pytest.mark.parametrize(("name", "missing"), [("gtpo", "entropy"), ("grpo_s", "entropy"), ("dapo", "rewards")])
def test_a_batch_without_what_a_method_needs_is_refused_by_name(name: str, missing: str) -> None:
    with pytest.raises(ValueError, match=rf"{name} needs {missing}"):
        algorithm(name).advantages(replace(FULL, **{missing: None}))


def test_an_unknown_name_is_answered_with_the_closest() -> None:
    with pytest.raises(UserError, match="did you mean gtpo"):
        algorithm("gtppo")


def test_a_setting_that_cannot_be_names_the_rule() -> None:
    with pytest.raises(UserError, match=r"algorithm\.gtpo: .*no setting 'alpa2'; did you mean alpha2"):
        algorithm("gtpo").configure({"alpa2": 1})
    with pytest.raises(UserError, match=r"algorithm\.gtpo: alpha2 must be in \[0, inf\], got -1"):
        algorithm("gtpo").configure({"alpha2": -1})


@pytest.mark.parametrize("name", algorithms())
def test_an_unusual_setting_is_remarked_on_and_a_default_never(name: str) -> None:
    assert algorithm(name).configure({})[1] == []
    if name in ("gtpo", "grpo_s"):
        key = {"gtpo": "alpha2", "grpo_s": "beta2"}[name]
        (unusual,) = algorithm(name).configure({key: 0.5})[1]
        assert f"{key} = 1.5" in unusual


def test_an_entry_names_the_keys_that_it_may_change() -> None:
    keys = algorithm("grpo_s").keys
    assert "algorithm.grpo_s." in keys
    assert "algorithm.gtpo." not in keys
    assert "actor_rollout_ref.actor.policy_loss.seq_ratio" in keys
    assert not [key for key in keys if key.startswith("data.")]


@dataclass(frozen=True)
class SignConfig:
    scale: float = 2.0


SIGN = registry.Algorithm(
    name="sign",
    label="Sign",
    level="outcome",
    needs=frozenset(),
    config=SignConfig,
    compute=lambda batch, config: registry.AdvantageOutput(
        config.scale * (2.0 * batch.correct[:, None] - 1) * batch.response_mask, None, {}
    ),
    loss="vanilla",
    aggregation="token-mean",
)


@pytest.fixture
def other_package(monkeypatch: pytest.MonkeyPatch):
    """Entry points as another distribution would declare them: {name: what it loads}."""

    class Point:
        def __init__(self, name: str, value: object) -> None:
            self.name, self.value, self.load = name, f"other:{name}", lambda: value

    def declare(**entries: object) -> None:
        points = [Point(name, value) for name, value in entries.items()]
        monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: points)
        algorithms.cache_clear()

    yield declare
    algorithms.cache_clear()


@pytest.mark.slow
def test_another_package_brings_a_method_by_an_entry_point(other_package) -> None:
    other_package(sign=SIGN)
    assert list(algorithms())[-1] == "sign"
    torch.testing.assert_close(
        algorithm("sign").advantages(FULL).advantages, (2 * REWARDS.float())[:, None].expand(6, 5)
    )
    from gtpo_verl.config import _defaults, compose_config  # its settings are keys of a run

    _defaults.cache_clear()  # another test of this process may have composed before there was the method
    assert compose_config(["algorithm.sign.scale=3"]).algorithm.sign.scale == 3
    with pytest.raises(UserError, match=r"did you mean algorithm\.sign\.scale"):
        compose_config(["algorithm.sign.scal=3"])


def test_what_is_no_method_or_has_a_name_twice_is_refused(other_package) -> None:
    other_package(broken="text")
    with pytest.raises(UserError, match="must be an Algorithm"):
        algorithms()
    other_package(gtpo=replace(SIGN, name="gtpo"))
    with pytest.raises(UserError, match="exists already"):
        algorithms()


def test_impossible_entries_are_refused() -> None:
    with pytest.raises(ValueError, match="level of sign"):
        replace(SIGN, level="word")
    with pytest.raises(ValueError, match="needs logits"):
        replace(SIGN, needs=frozenset({"logits"}))
