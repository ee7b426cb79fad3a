"""Types of the inputs of the advantages, metrics, and what is refused."""

import math
import warnings

import pytest
import torch

from gtpo_verl.algorithms import (
    GRPOSConfig,
    GTPOConfig,
    credit_metrics,
    group_relative_overlong_penalty,
    grpo_advantages,
    grpo_s_advantages,
    gtpo_advantages,
    response_lengths,
)

MASK = torch.tensor([[1, 1, 1], [1, 1, 0], [1, 0, 0], [1, 1, 1], [0, 0, 0]], dtype=torch.bool)
ENTROPY = torch.tensor(
    [[1.0, 2.0, 0.5], [0.3, 0.7, torch.nan], [2.0, torch.nan, -7.0], [0.1, 0.2, 0.3], [torch.nan] * 3]
)
CORRECT = torch.tensor([True, False, True, False, True])
GROUP = torch.tensor([3, 3, 3, 3, 3])


def gtpo(entropy=ENTROPY, correct=CORRECT, mask=MASK, group=GROUP, config=None, **kwargs):
    return gtpo_advantages(entropy, correct, mask, group, config or GTPOConfig(), **kwargs)


def test_a_constant_offset_too_small_for_float32_is_not_magnified():
    # All correct and `shape`: nothing but the entropies differs, and in float32 the rewards 1.1 + 1e-7 x would keep one
    # digit.
    entropy = (1 + 1e-4 * torch.rand(4, 50, generator=torch.Generator().manual_seed(0))).float()
    mask, group, correct = torch.ones(4, 50).bool(), torch.zeros(4).long(), torch.ones(4).bool()
    for config in (GTPOConfig(degenerate="shape"), GTPOConfig(degenerate="shape", normalization="within")):
        coarse = gtpo_advantages(entropy, correct, mask, group, config).advantages
        fine = gtpo_advantages(entropy.double(), correct, mask, group, config).advantages
        torch.testing.assert_close(coarse.double(), fine, rtol=0, atol=1e-5)


def test_half_precision_entropies_are_computed_in_float32():
    for dtype in (torch.bfloat16, torch.float16):
        half = ENTROPY.to(dtype)
        out = gtpo(half)
        assert out.advantages.dtype == torch.float32
        torch.testing.assert_close(out.advantages, gtpo(half.float()).advantages, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.float32])
def test_masks_of_other_types(dtype):
    torch.testing.assert_close(gtpo(mask=MASK.to(dtype)).advantages, gtpo().advantages, rtol=0, atol=0)
    config = GRPOSConfig()
    one = grpo_s_advantages(ENTROPY, CORRECT, MASK.to(dtype), GROUP, config).advantages
    torch.testing.assert_close(one, grpo_s_advantages(ENTROPY, CORRECT, MASK, GROUP, config).advantages, rtol=0, atol=0)


def test_lengths_are_the_numbers_of_tokens_inside_the_mask():
    generator = torch.Generator().manual_seed(0)
    mask = torch.rand(150, 30, generator=generator) < torch.rand(150, 1, generator=generator)
    mask[3] = False
    mask[4] = True
    assert response_lengths(mask).tolist() == [sum(row) for row in mask.tolist()]
    entropy = torch.where(mask, 1.0, torch.nan)
    correct, group = torch.arange(150) % 2 == 0, torch.arange(150) // 10
    out = gtpo_advantages(entropy, correct, mask, group, GTPOConfig(degenerate="shape"))
    assert ((out.shaped_rewards != 0) == mask).all()


def test_inputs_that_are_views_and_are_not_changed():
    entropy = torch.stack([ENTROPY, ENTROPY], dim=2)
    before = entropy.clone()
    out = gtpo(entropy[:, :, 0])
    torch.testing.assert_close(out.advantages, gtpo().advantages, rtol=0, atol=0)
    torch.testing.assert_close(entropy, before, rtol=0, atol=0, equal_nan=True)


def test_advantages_can_be_written_to_and_saved(tmp_path):
    advantages = gtpo().advantages
    advantages[0, 0] = 5.0
    torch.save(advantages, tmp_path / "advantages.pt")
    torch.testing.assert_close(torch.load(tmp_path / "advantages.pt"), advantages)


def test_nothing_at_all():
    out = gtpo_advantages(
        torch.zeros(0, 5), torch.zeros(0).bool(), torch.zeros(0, 5).bool(), torch.zeros(0).long(), GTPOConfig()
    )
    assert out.advantages.shape == (0, 5)
    out = gtpo(mask=torch.zeros_like(MASK))
    assert not out.advantages.any()
    assert out.metrics["groups"] == 0


def test_one_polarity_carries_no_signal():
    right = torch.ones(5, dtype=torch.bool)
    for correct in (right, ~right):
        out = gtpo(correct=correct)
        assert not out.advantages.any()
        assert not out.shaped_rewards.any()
        assert out.metrics["degenerate_share"] == 1.0
    # An empty row is not the wrong response that would make the group a mixed one.
    assert not gtpo(correct=torch.tensor([True, True, True, True, False])).advantages.any()


def test_degenerate_groups_leave_the_comparison_of_the_batch():
    entropy = torch.cat([ENTROPY[:4], 100 * ENTROPY[:4]])
    mask, group = torch.cat([MASK[:4]] * 2), torch.tensor([0] * 4 + [1] * 4)
    correct = torch.cat([CORRECT[:4], torch.ones(4).bool()])
    config = GTPOConfig(scope="batch", norm_scope="batch")
    both = gtpo_advantages(entropy, correct, mask, group, config)
    alone = gtpo_advantages(entropy[:4], correct[:4], mask[:4], group[:4], config)
    torch.testing.assert_close(both.advantages[:4], alone.advantages)
    assert not both.advantages[4:].any()


def lopsided(config):
    """One correct response in sixteen: the mean of the wrong side is all but that of its rewards, so many of these lie
    above it.
    """
    generator = torch.Generator().manual_seed(3)
    entropy = (1.5 * torch.randn(16, 40, generator=generator)).exp()
    correct = torch.arange(16) == 0
    return correct, gtpo_advantages(entropy, correct, torch.ones(16, 40).bool(), torch.zeros(16).long(), config)


def test_sign_flips_are_counted_before_they_are_removed():
    correct, plain = lopsided(GTPOConfig())
    flipped = (plain.advantages[~correct] > 0).double().mean().item()
    assert flipped > 0.1
    assert plain.metrics["sign_flip_wrong"] == pytest.approx(flipped)
    assert plain.metrics["sign_flip_correct"] == 0
    _, kept = lopsided(GTPOConfig(preserve_sign=True))
    assert kept.metrics["sign_flip_wrong"] == pytest.approx(flipped)
    torch.testing.assert_close(kept.advantages[~correct], plain.advantages[~correct].clamp(max=0))
    torch.testing.assert_close(kept.advantages[correct], plain.advantages[correct])


def test_metrics_are_those_of_the_definitions():
    mask = torch.tensor([[1] * 10, [1] * 9 + [0], [1] * 10, [1] * 4 + [0] * 6, [1] * 10, [1] * 10], dtype=torch.bool)
    entropy = torch.where(mask, torch.rand(6, 10, generator=torch.Generator().manual_seed(1)), torch.nan)
    correct = torch.tensor([True, True, False, False, True, True])
    group = torch.tensor([0, 0, 0, 0, 1, 1])
    out = gtpo_advantages(entropy, correct, mask, group, GTPOConfig())
    right, wrong = mask.clone(), mask.clone()
    right[[2, 3, 4, 5]], wrong[[0, 1, 4, 5]] = False, False
    rewards, advantages = out.shaped_rewards, out.advantages
    expected = {
        "groups": 2,
        "responses": 6,
        "degenerate_share": 0.5,
        "tail_alive_correct": 3,  # longer than nine tokens: rows 0, 4 and 5
        "tail_alive_wrong": 1,
        "shaped_correct_mean": rewards[right].mean().item(),
        "shaped_correct_std": rewards[right].std().item(),
        "shaped_wrong_mean": rewards[wrong].mean().item(),
        "shaped_wrong_std": rewards[wrong].std().item(),
        "sign_flip_correct": (advantages[right] < 0).float().mean().item(),
        "sign_flip_wrong": (advantages[wrong] > 0).float().mean().item(),
        "entropy_correct": entropy[mask & correct[:, None]].mean().item(),
        "entropy_wrong": entropy[mask & ~correct[:, None]].mean().item(),
        "floor_share": 0,
    }
    assert out.metrics == pytest.approx(expected, abs=1e-6)
    floored = gtpo_advantages(entropy, correct, mask, group, GTPOConfig(entropy_floor=0.5)).metrics["floor_share"]
    assert floored == pytest.approx((entropy[mask] <= 0.5).float().mean().item())
    # The same from the advantages alone, as for an estimator of somebody else's.
    spread = {"advantage_spread": sum(advantages[i][mask[i]].std(correction=0).item() for i in range(6)) / 6}
    known = {name: value for name, value in expected.items() if not name.startswith(("shaped", "floor"))}
    known["sign_flip_correct"] *= right.sum().item() / (mask & correct[:, None]).sum().item()  # of all groups
    assert credit_metrics(advantages, mask, group, correct, entropy) == pytest.approx(known | spread, abs=1e-6)
    assert spread["advantage_spread"] > 0
    assert credit_metrics(-advantages, mask, group, correct, entropy)["sign_flip_wrong"] > 0.5
    with pytest.raises(ValueError, match="advantages"):
        credit_metrics(advantages.repeat(1, 2), mask, group, correct, entropy)


def test_all_arms_report_by_the_same_names():
    reward = CORRECT.float()
    token = gtpo().metrics
    sequence = grpo_s_advantages(ENTROPY, CORRECT, MASK, GROUP, GRPOSConfig()).metrics
    baseline = grpo_advantages(reward, MASK, GROUP, correct=CORRECT, entropy=ENTROPY).metrics
    assert token.keys() == sequence.keys() == baseline.keys() | {"floor_share"}
    # verl aggregates a metric whose name contains one of these words in its own way.
    assert not [name for name in token if any(word in name for word in ("max", "min", "sum", "total"))]


def test_impossible_entropies_in_a_hole_do_not_matter():
    mask = MASK.clone()
    mask[0, 1] = False
    entropy = ENTROPY.clone()
    entropy[0, 1] = math.inf
    assert gtpo(entropy, mask=mask).advantages.isfinite().all()


def test_round_off_below_zero_is_floored():
    entropy = torch.where(MASK, -1e-3, torch.nan)
    floored = gtpo(torch.where(MASK, 0.0, torch.nan))
    torch.testing.assert_close(gtpo(entropy).advantages, floored.advantages)
    torch.testing.assert_close(gtpo(entropy.bfloat16()).advantages, floored.advantages)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"entropy": ENTROPY[:4]}, r"entropy has shape \(4, 3\).*row 4 \(position 0\) has no partner"),
        ({"entropy": ENTROPY[:, :2]}, r"position 2 \(from row 0 on\) has no partner"),
        ({"entropy": ENTROPY[0]}, r"entropy must be \(B, T\)"),
        ({"entropy": ENTROPY.nan_to_num().long()}, r"entropy must be \(B, T\), floating point"),
        ({"correct": CORRECT[:3]}, "correct has 3 rows and response_mask has 5: row 3 has no partner"),
        ({"correct": CORRECT.float()}, "correct must be bool"),
        ({"correct": CORRECT[:, None]}, r"correct must be a tensor of shape \(5,\)"),
        ({"correct": [True] * 5}, "correct must be a tensor"),
        ({"mask": MASK[0]}, r"response_mask must be \(B, T\)"),
        ({"group": torch.cat([GROUP, GROUP])}, "group has 10 rows and response_mask has 5: row 5 has no partner"),
        ({"group": GROUP.float()}, "group ids must be integers.*row 0 holds 3.0"),
        ({"group": GROUP > 0}, "group ids must be integers"),
        ({"group": [3, 3, "a", 3, 3]}, r"group must be an integer tensor \(B,\), got list"),
        ({"length_penalty": torch.zeros(2)}, "length_penalty has 2 rows"),
        ({"length_penalty": torch.tensor([0.0, 0, math.nan, 0, 0])}, "length_penalty of row 2 is nan"),
    ],
)
def test_batches_that_do_not_fit_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        gtpo(**changes)
    changes = {"entropy": ENTROPY, "correct": CORRECT, "mask": MASK, "group": GROUP} | changes
    rows = changes.pop("entropy"), changes.pop("correct"), changes.pop("mask"), changes.pop("group")
    with pytest.raises(ValueError, match=message):
        grpo_s_advantages(*rows, GRPOSConfig(), **changes)


def test_a_penalty_that_is_ignored_may_hold_anything():
    penalty = torch.tensor([-0.5, math.nan, 0.0, math.inf, math.nan])  # correct: rows 0 and 2; row 4 is empty
    out = gtpo(length_penalty=penalty)
    torch.testing.assert_close(out.advantages, gtpo(length_penalty=torch.tensor([-0.5, 0, 0, 0, 0])).advantages)


def test_shares_of_an_unusual_sum_are_mentioned():
    with pytest.warns(UserWarning, match=r"alpha1 \+ alpha2 = 1.3"):
        GTPOConfig(alpha2=0.3)
    with pytest.warns(UserWarning, match=r"beta1 \+ beta2 = 1.3"):
        GRPOSConfig(beta2=0.3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        GTPOConfig(), GRPOSConfig()  # the published 1.1
        GTPOConfig(alpha1=0.9), GRPOSConfig(beta1=0.9)


@pytest.mark.parametrize("shape", [(0, 5), (0, 0), (3, 0)])
@pytest.mark.parametrize("scope", ["group", "batch"])
def test_a_batch_of_nothing_has_no_advantages(shape, scope):
    rows = shape[0]
    batch = (
        torch.rand(shape),
        torch.ones(rows, dtype=torch.bool),
        torch.ones(shape, dtype=torch.bool),
        torch.zeros(rows, dtype=torch.int64),
    )
    assert gtpo_advantages(*batch, GTPOConfig(scope=scope, norm_scope=scope)).advantages.shape == shape
    assert grpo_s_advantages(*batch, GRPOSConfig(scope=scope, norm_scope=scope)).advantages.shape == shape
    assert grpo_advantages(torch.rand(rows), *batch[2:]).advantages.shape == shape


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_grpo_refuses_a_reward_that_is_not_finite_and_names_its_row(value):
    mask = torch.ones(3, 2, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"reward of row 1 is (nan|inf), it must be finite"):
        grpo_advantages(torch.tensor([1.0, value, 0.0]), mask, torch.zeros(3, dtype=torch.int64))
    mask[1] = False  # an empty row is ignored
    grpo_advantages(torch.tensor([1.0, value, 0.0]), mask, torch.zeros(3, dtype=torch.int64))


def test_grpo_gives_rewards_back_in_the_type_of_its_advantages():
    out = grpo_advantages(torch.tensor([1, 0]), torch.ones(2, 2, dtype=torch.bool), torch.zeros(2, dtype=torch.int64))
    assert out.shaped_rewards.dtype == out.advantages.dtype == torch.float32


def test_the_group_relative_penalty_takes_no_numbers_for_verdicts():
    with pytest.raises(ValueError, match="correct must be bool"):
        group_relative_overlong_penalty(torch.tensor([2, 4]), torch.tensor([1, 1]), torch.zeros(2, dtype=torch.int64))
    with pytest.raises(ValueError, match="group ids must be integers"):
        group_relative_overlong_penalty(torch.tensor([2, 4]), torch.tensor([True, True]), torch.tensor([0.0, math.nan]))


def test_responses_without_spread_have_none_however_far_apart_they_are():
    entropy = torch.tensor([0.05, 1.0, 2.0, 1.0])[:, None].expand(4, 20480).contiguous()
    correct = torch.tensor([True, True, True, False])
    mask, group = torch.ones(4, 20480, dtype=torch.bool), torch.zeros(4, dtype=torch.int64)
    out = gtpo_advantages(entropy, correct, mask, group, GTPOConfig(axis="matrix"))
    assert credit_metrics(out.advantages, mask, group, correct, entropy)["advantage_spread"] == 0.0


def test_weights_whose_squares_leave_float32() -> None:
    """Two wrong tokens of 0 and 1 nat: 1/H is 1e30 and 1, their geometric mean 1e15, so the weights are 1e15, 1e-15."""
    config = GTPOConfig(negatives="inverse", mean="geometric", normalization="none", entropy_floor=1e-30, axis="matrix")
    entropy = torch.tensor([[1e-20], [0.0], [1e6]])
    correct, mask = torch.tensor([True, False, False]), torch.ones(3, 1, dtype=torch.bool)
    out = gtpo_advantages(entropy, correct, mask, torch.zeros(3, dtype=torch.int64), config)
    assert out.metrics["shaped_wrong_std"] == pytest.approx(1e18 / math.sqrt(2), rel=1e-5)
    tiny = torch.tensor([[1.0], *[[0.0]], *[[1e6]] * 11])
    correct = torch.arange(13) == 0
    out = gtpo_advantages(tiny, correct, torch.ones(13, 1).bool(), torch.zeros(13, dtype=torch.int64), config)
    assert math.isfinite(out.metrics["shaped_wrong_std"])
