"""Mixed-policy DAPO: the settings, the rule that gives rows to the guide, advantages and losses by numbers worked out
by hand and by loops in float64.
"""

import itertools
import math
from typing import Any

import pytest
import torch

from gtpo_verl.algorithms import grpo_advantages
from gtpo_verl.algorithms.losses import mixed_loss, sequence_loss, token_loss
from gtpo_verl.algorithms.mixed_policy import GuideConfig, guide_metrics, on_only_advantages

CLIP = (0.2, 0.28, 10.0)

# -------------------------------------------------------------------- settings


def test_the_default_has_no_guide() -> None:
    assert GuideConfig().reserved == 0
    assert [GuideConfig().rows(verdicts) for verdicts in ([], [True], [False], [True, False])] == [0, 0, 0, 0]


@pytest.mark.parametrize(
    ("mode", "all_wrong", "some", "all_correct"), [("mix", 2, 2, 0), ("zero", 3, 0, 0), ("both", 5, 2, 0)]
)
def test_which_rows_are_the_guides(mode: str, all_wrong: int, some: int, all_correct: int) -> None:
    config = GuideConfig(mode=mode, n_off=2, n_zero=3)
    assert config.reserved == all_wrong
    assert config.rows([False, False]) == all_wrong
    assert config.rows([False, True]) == some
    assert config.rows([True, True]) == all_correct
    assert config.rows([]) == 0, "all other rollouts failed"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mode": "mixed"}, "mode must be one of off, mix, zero, both, got 'mixed'; did you mean mix"),
        ({"source": "http"}, "source must be one of traces, server, got 'http'"),
        ({"source": "server"}, "source=server needs model=DIRECTORY"),
        ({"model": "guide"}, "model is read with source=server alone"),
        ({"replicas": 0}, "replicas must be a whole number, at least 1"),
        ({"n_off": 0}, "n_off must be a whole number, at least 1"),
        ({"n_zero": 1.5}, "n_zero must be a whole number"),
        ({"last_step": True}, "last_step must be a whole number"),
        ({"drop_wrong": "yes"}, "drop_wrong must be true or false"),
        ({"in_entropy_stats": 1}, "in_entropy_stats must be true or false"),
        ({"clip": "none", "shape_gamma": 0}, "shape_gamma must be above 0"),
        ({"shape_gamma": 0.1}, "shape_gamma is a shaping without a clip"),
        ({"ratio": "one"}, "ratio=one with clip=dapo"),
        ({"adv_scope": "own"}, "adv_scope must be one of"),
    ],
)
def test_impossible_settings(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GuideConfig(**settings)


# -------------------------------------------------------------------- advantages

UNION = [  # rewards of a group with the guide's last, and their advantages: own wrong, own correct, guide
    ([0] * 7 + [1], {0: -0.353552, 7: 2.474867}),
    ([0] * 8 + [1] * 8, {0: -0.968244, 8: 0.968244}),
    ([0] * 14 + [1, 0], {0: -0.249999, 14: 3.749985, 15: -0.249999}),
    ([1] + [0] * 6 + [1], {0: 1.620182, 1: -0.540061, 7: 1.620182}),
]


@pytest.mark.parametrize(("rewards", "expected"), UNION)
def test_advantages_over_the_union(rewards: list[int], expected: dict[int, float]) -> None:
    """A group whose own rows are all wrong teaches, and the guide's row is a row like any other."""
    mask, group = torch.ones(len(rewards), 3), torch.zeros(len(rewards), dtype=torch.long)
    A = grpo_advantages(torch.tensor(rewards).double(), mask, group).advantages
    assert {row: A[row, 0].item() for row in expected} == pytest.approx(expected, abs=1e-6)


ON_ONLY = [
    ([0] * 7 + [1], 1, {0: 0.0, 7: 1.0}),  # the divisor of equal rewards is 1
    ([1] + [0] * 6 + [1], 1, {0: 2.267781, 1: -0.377964, 7: 2.267781}),
    ([1, 0, 0, 1, 0, 5, -3], 2, {0: 1.095443, 1: -0.730296, 5: 8.398400, 6: -6.207508}),
]


@pytest.mark.parametrize(("rewards", "guides", "expected"), ON_ONLY)
def test_advantages_over_own_rows(rewards: list[int], guides: int, expected: dict[int, float]) -> None:
    guide = torch.arange(len(rewards)) >= len(rewards) - guides
    A = on_only_advantages(torch.tensor(rewards).double(), torch.zeros(len(rewards)), guide)
    assert {row: A[row].item() for row in expected} == pytest.approx(expected, abs=1e-5)


def test_own_statistics_against_the_loop() -> None:
    """Groups of different sizes, one without own rows, one with a single own row, in any order."""
    generator = torch.Generator().manual_seed(0)
    group = torch.randint(0, 5, (60,), generator=generator)
    group[-2:], guide = torch.tensor([7, 8]), torch.rand(60, generator=generator) < 0.3
    guide[-2:] = torch.tensor([True, False])
    rewards = torch.randn(60, generator=generator, dtype=torch.float64)
    for by_std in (True, False):
        A = on_only_advantages(rewards, group, guide, by_std)
        for i in range(60):
            own = [rewards[k].item() for k in range(60) if group[k] == group[i] and not guide[k]]
            expected = 0.0
            if own:
                mean = sum(own) / len(own)
                variance = sum((x - mean) ** 2 for x in own) / (len(own) - 1) if len(own) > 1 else 0.0
                expected = (rewards[i].item() - mean) / (math.sqrt(variance) + 1e-6 if variance and by_std else 1.0)
            assert A[i].item() == pytest.approx(expected, abs=1e-12)


def test_without_guide_rows_own_statistics_are_those_of_the_union() -> None:
    rewards, group = torch.tensor([1, 0, 0, 1, 1, 1, 0.5]).double(), torch.tensor([0, 0, 0, 1, 1, 2, 0])
    A = on_only_advantages(rewards, group, torch.zeros(7, dtype=torch.bool))
    union = grpo_advantages(rewards, torch.ones(7, 1), group).advantages[:, 0]
    torch.testing.assert_close(A, union, atol=1e-12, rtol=0)


# -------------------------------------------------------------------- loss


def policies(seed: int, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, ...]:
    """Log-probs, denominators, advantages, a mask with empty rows, and which rows are the guide's, a third."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.arange(9) < torch.randint(0, 10, (12, 1), generator=generator)
    old = -2 * torch.rand(12, 9, generator=generator, dtype=dtype)
    new = (old + 0.5 * torch.randn(12, 9, generator=generator, dtype=dtype)).clamp(max=0)
    advantages = torch.randn(12, 1, generator=generator, dtype=dtype).expand(12, 9)
    guide = torch.arange(12) % 3 == 2
    phi = -2 * torch.rand(12, 9, generator=generator, dtype=dtype)
    return new.requires_grad_(), torch.where(guide[:, None], phi, old), advantages, mask, guide


def one_term(w: torch.Tensor, A: float, of_guide: bool, clip: str, gamma: float | None) -> torch.Tensor:
    low, high, c = CLIP
    if of_guide and clip == "none":
        return -A * (w if gamma is None else w / (w + gamma))
    loss = torch.maximum(-A * w, -A * w.clamp(1 - low, 1 + high))
    return torch.minimum(loss, torch.tensor(-A * c)) if A < 0 else loss


SETTINGS = [("dapo", None), ("none", None), ("none", 0.1)]


@pytest.mark.parametrize(("clip", "gamma"), SETTINGS)
def test_every_token_and_its_gradient_against_the_loop(clip: str, gamma: float | None) -> None:
    for seed in range(5):
        new, old, advantages, mask, guide = policies(seed)
        spoiled = torch.where(mask, old, math.nan)  # padding may hold anything
        losses, _ = mixed_loss(new, spoiled, advantages, mask, guide, *CLIP, clip=clip, shape_gamma=gamma)
        losses.sum().backward()
        again = new.detach().clone().requires_grad_()
        expected = torch.zeros_like(losses)
        for i, t in mask.nonzero().tolist():
            w = (again[i, t] - old[i, t]).exp()
            expected[i, t] = one_term(w, advantages[i, t].item(), bool(guide[i]), clip, gamma)
        expected.sum().backward()
        assert new.grad is not None
        assert again.grad is not None
        torch.testing.assert_close(losses.detach(), expected.detach(), atol=1e-12, rtol=1e-12)
        torch.testing.assert_close(new.grad, again.grad, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("ratio", ["arithmetic", "geometric"])
@pytest.mark.parametrize(("clip", "gamma"), SETTINGS)
def test_every_sequence_and_its_gradient_against_the_loop(clip: str, gamma: float | None, ratio: str) -> None:
    for seed in range(3):
        new, old, advantages, mask, guide = policies(seed)
        A = advantages[:, 0]
        spoiled = torch.where(mask, old, math.nan)
        losses, metrics = mixed_loss(new, spoiled, A, mask, guide, *CLIP[:2], ratio=ratio, clip=clip, shape_gamma=gamma)
        losses.sum().backward()
        again = new.detach().clone().requires_grad_()
        expected = torch.zeros_like(losses)
        for i in mask.any(1).nonzero().squeeze(1).tolist():
            steps = (again[i] - old[i])[mask[i]]
            w = steps.exp().mean() if ratio == "arithmetic" else steps.mean().exp()
            if guide[i] and clip == "none":
                expected[i] = -A[i] * (w if gamma is None else w / (w + gamma))
            else:
                expected[i] = torch.maximum(-A[i] * w, -A[i] * w.clamp(1 - CLIP[0], 1 + CLIP[1]))
        expected.sum().backward()
        torch.testing.assert_close(losses.detach(), expected.detach(), atol=1e-12, rtol=1e-12)
        torch.testing.assert_close(new.grad, again.grad, atol=1e-12, rtol=1e-12)
        _, own = sequence_loss(new[~guide], old[~guide], A[~guide], mask[~guide], *CLIP[:2], ratio=ratio)
        assert {name: value.item() for name, value in metrics.items()} == pytest.approx(
            {name: value.item() for name, value in own.items()}
        )


def test_without_guide_rows_it_is_the_sequence_loss_bit_for_bit() -> None:
    new, old, advantages, mask, guide = policies(2, torch.float32)
    losses, metrics = mixed_loss(
        new, old, advantages[:, 0], mask, torch.zeros_like(guide), clip="none", ratio="arithmetic"
    )
    expected, its_metrics = sequence_loss(new, old, advantages[:, 0], mask)
    assert torch.equal(losses, expected)
    assert metrics == its_metrics
    gradients = [torch.autograd.grad(loss.sum(), new)[0] for loss in (losses, expected)]
    assert torch.equal(*gradients)


def test_the_three_losses_differ_on_guide_rows_alone() -> None:
    new, old, advantages, mask, guide = policies(1)
    found = [
        mixed_loss(new, old, advantages, mask, guide, *CLIP, clip=clip, shape_gamma=gamma)[0]
        for clip, gamma in SETTINGS
    ]
    for one, other in itertools.combinations(found, 2):
        assert torch.equal(one[~guide], other[~guide])
        assert not torch.allclose(one[guide], other[guide])


def test_gradient_weights_of_luffy() -> None:
    """γ π / (π + γ)² for π_φ = 1: a token that the policy would not write weighs more than without the shaping, π."""
    pi = torch.tensor([[0.01, 0.1, 0.9]]).double()
    new = pi.log().requires_grad_()
    ones = torch.ones(1, 3).double()
    losses, _ = mixed_loss(new, 0 * ones, ones, ones, torch.tensor([True]), *CLIP, clip="none", shape_gamma=0.1)
    losses.sum().backward()
    assert new.grad is not None
    assert (-new.grad[0]).tolist() == pytest.approx([0.082645, 0.25, 0.09], abs=1e-6)


def test_what_bounds_a_guide_token_under_daposs_clip() -> None:
    """A step on Â∇log π is r̂ up to 1 + ε_high and then 0 for A > 0; 0 below 1 - ε_low, then r̂, for A < 0."""
    ratios = torch.tensor([[0.1, 0.7, 1.0, 1.2, 1.3]]).double()
    for A, expected in ((1.0, [0.1, 0.7, 1.0, 1.2, 0.0]), (-1.0, [0.0, 0.0, -1.0, -1.2, -1.3])):
        new = ratios.log().requires_grad_()
        ones = torch.ones_like(ratios)
        losses, _ = mixed_loss(new, 0 * ones, A * ones, ones, torch.tensor([True]), *CLIP)
        losses.sum().backward()
        assert new.grad is not None
        assert (-new.grad[0]).tolist() == pytest.approx(expected)


def test_without_guide_rows_it_is_the_token_loss_bit_for_bit() -> None:
    for dtype in (torch.float32, torch.float64):
        new, old, advantages, mask, _ = policies(2, dtype)
        losses, metrics = mixed_loss(new, old, advantages, mask, torch.zeros(12).bool(), *CLIP, clip="none")
        expected, its_metrics = token_loss(new, old, advantages, mask, *CLIP)
        assert torch.equal(losses, expected)
        assert metrics == its_metrics
        gradients = [torch.autograd.grad(loss.sum(), new)[0] for loss in (losses, expected)]
        assert torch.equal(*gradients)


def test_metrics_are_those_of_own_rows() -> None:
    new, old, advantages, mask, guide = policies(3)
    _, metrics = mixed_loss(new, old, advantages, mask, guide, *CLIP)
    _, expected = token_loss(new[~guide], old[~guide], advantages[~guide], mask[~guide], *CLIP)
    assert {name: value.item() for name, value in metrics.items()} == pytest.approx(
        {name: value.item() for name, value in expected.items()}
    )
    *_, everybody = mixed_loss(new, old, advantages, mask, torch.ones(12).bool(), *CLIP)
    assert everybody["clipfrac"] == 0, "no own row"


def test_metrics_of_guide_rows() -> None:
    ratios = torch.tensor([[1.5, 0.5, 1.5, 0.5]]).double()
    advantages = torch.tensor([[1.0, 1.0, -1.0, -1.0]]).double()
    mask = torch.ones(1, 4, dtype=torch.bool)
    found = guide_metrics(ratios.log(), torch.zeros(1, 4).double(), advantages, mask, *CLIP[:2])
    assert found == pytest.approx({"ratio_mean": 1.0, "clipfrac": 0.5, "ess": 0.8})
    mask[0, 0] = False
    found = guide_metrics(ratios.log(), torch.zeros(1, 4).double(), advantages, mask, *CLIP[:2])
    assert found == pytest.approx({"ratio_mean": 2.5 / 3, "clipfrac": 1 / 3, "ess": 2.5**2 / 2.75 / 3})


def test_a_guide_that_is_the_policy_has_ratios_of_one() -> None:
    log_prob = -torch.rand(2, 5).double()
    found = guide_metrics(log_prob, log_prob, torch.ones(2, 5), torch.ones(2, 5).bool(), *CLIP[:2])
    assert found == pytest.approx({"ratio_mean": 1.0, "clipfrac": 0.0, "ess": 1.0})
    assert guide_metrics(
        torch.tensor([[-800.0]]), torch.tensor([[0.0]]), torch.ones(1, 1), torch.ones(1, 1).bool(), 0.2, 0.28
    )["ess"] == pytest.approx(1.0)
