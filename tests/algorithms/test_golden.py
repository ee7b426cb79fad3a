"""Numbers worked out by hand."""

import math

import pytest
import torch

from gtpo_verl.algorithms import (
    GRPOSConfig,
    GTPOConfig,
    group_relative_overlong_penalty,
    grpo_advantages,
    grpo_s_advantages,
    gtpo_advantages,
    soft_overlong_penalty,
)

CORRECT = [[3.0, 1.0], [1.0, 3.0]]
WRONG = [[4.0, 1.0], [1.0, 4.0]]
VERDICT = torch.tensor([True, True, False, False])
GROUP = torch.zeros(4, dtype=torch.int64)
MASK = torch.ones(4, 2, dtype=torch.bool)
ENTROPY = torch.tensor(CORRECT + WRONG, dtype=torch.float64)


def gtpo(**settings: object) -> tuple[torch.Tensor, torch.Tensor]:
    out = gtpo_advantages(ENTROPY, VERDICT, MASK, GROUP, GTPOConfig(**settings))
    return out.shaped_rewards, out.advantages


def grpo_s(**settings: object) -> tuple[torch.Tensor, torch.Tensor]:
    entropy = torch.tensor([[3.0, 1.0], [1.0, 5.0], [4.0, 4.0], [1.0, 1.0]], dtype=torch.float64)
    out = grpo_s_advantages(entropy, VERDICT, MASK, GROUP, GRPOSConfig(**settings))
    return out.shaped_rewards, out.advantages


def close(actual: torch.Tensor, expected: list) -> None:
    torch.testing.assert_close(actual, torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-9)


def test_shaped_rewards_of_the_late_text():
    close(gtpo()[0], [[1.15, 1.05], [1.05, 1.15], [-1.04, -1.16], [-1.16, -1.04]])


def test_shaped_rewards_of_the_first_version_give_wrong_responses_zero():
    close(gtpo(alpha1=0.9, negatives="zero")[0], [[1.05, 0.95], [0.95, 1.05], [0, 0], [0, 0]])


def test_shaped_rewards_of_the_second_version_have_no_base_for_wrong_responses():
    close(gtpo(alpha1=0.9, negatives="inverse")[0], [[1.05, 0.95], [0.95, 1.05], [-0.4, -1.6], [-1.6, -0.4]])


def test_geometric_weights():
    # Geometric means: sqrt(3 * 1) of the entropies of the correct, sqrt(1/4 * 1) of the inverse ones of the wrong.
    r = math.sqrt(3)
    shaped, _ = gtpo(mean="geometric")
    close(shaped[:2], [[1 + 0.1 * r, 1 + 0.1 / r], [1 + 0.1 / r, 1 + 0.1 * r]])
    close(shaped[2:], [[-1.05, -1.2], [-1.2, -1.05]])


def test_clip_of_the_early_text():
    # α1 = 1, κ = 10: [1, 1.1]; the lower bound never binds with α1 = 1, with α1 = 0.96 it does.
    close(gtpo(clip_kappa=10.0)[0][:2], [[1.1, 1.05], [1.05, 1.1]])
    close(gtpo(alpha1=0.94, clip_kappa=10.0)[0][:2], [[1.034, 1.0], [1.0, 1.034]])


def test_length_penalty_is_added_after_the_clip_and_to_correct_responses_alone():
    penalty = torch.tensor([-0.5, 0.0, -0.7, -0.7])
    out = gtpo_advantages(ENTROPY, VERDICT, MASK, GROUP, GTPOConfig(clip_kappa=10.0), length_penalty=penalty)
    close(out.shaped_rewards, [[0.6, 0.55], [1.05, 1.1], [-1.04, -1.16], [-1.16, -1.04]])


def test_normalization_over_the_rewards_and_the_zeros_of_the_other_side():
    # Correct side: 1.15, 1.05, 1.05, 1.15 and four zeros: mean 0.55, variance 2.43 / 7.
    # Wrong side: -1.04, -1.16, -1.16, -1.04 and four zeros: mean -0.55, variance (4.8544 - 2.42) / 7.
    plus, minus = math.sqrt(2.43 / 7) + 1e-6, math.sqrt(2.4344 / 7) + 1e-6
    close(
        gtpo()[1],
        [
            [0.6 / plus, 0.5 / plus],
            [0.5 / plus, 0.6 / plus],
            [-0.49 / minus, -0.61 / minus],
            [-0.61 / minus, -0.49 / minus],
        ],
    )


def test_normalization_with_zero_rewards_for_the_wrong_uses_one_set():
    # 1.15, 1.05, 1.05, 1.15, 0, 0, 0, 0 for both sides.
    std = math.sqrt(2.43 / 7) + 1e-6
    close(gtpo(negatives="zero")[1][2:], [[-0.55 / std] * 2] * 2)


def test_joint_normalization():
    # All eight rewards: mean 0, sum of squares 4.85 + 4.8544.
    std = math.sqrt(9.7044 / 7) + 1e-6
    close(gtpo(normalization="joint")[1], [[v / std for v in row] for row in gtpo()[0].tolist()])


def test_normalization_within_each_polarity_loses_the_verdict():
    # Each side has mean zero: half of the tokens of correct responses are punished.
    plus, minus = math.sqrt(0.01 / 3) + 1e-6, math.sqrt(0.0144 / 3) + 1e-6
    close(
        gtpo(normalization="within")[1],
        [
            [0.05 / plus, -0.05 / plus],
            [-0.05 / plus, 0.05 / plus],
            [0.06 / minus, -0.06 / minus],
            [-0.06 / minus, 0.06 / minus],
        ],
    )


def test_no_normalization_leaves_the_shaped_rewards():
    shaped, advantages = gtpo(normalization="none")
    close(advantages, shaped.tolist())


def test_axis_response_compares_the_tokens_of_one_response():
    # Every row is compared with its own mean: 3, 1 over 2 and 1/4, 1 over 5/8.
    close(gtpo(axis="response")[0], [[1.15, 1.05], [1.05, 1.15], [-1.04, -1.16], [-1.16, -1.04]])


def test_axis_matrix_compares_all_tokens_of_a_polarity():
    entropy = torch.tensor([[3.0, 1.0], [1.0, 1.0], [4.0, 1.0], [1.0, 1.0]], dtype=torch.float64)
    out = gtpo_advantages(entropy, VERDICT, MASK, GROUP, GTPOConfig(axis="matrix"))
    mean = 3.25 / 4  # of 1/4, 1, 1, 1
    close(out.shaped_rewards[:2], [[1.2, 1 + 0.2 / 3], [1 + 0.2 / 3, 1 + 0.2 / 3]])
    close(out.shaped_rewards[2:], [[-1 - 0.025 / mean, -1 - 0.1 / mean], [-1 - 0.1 / mean, -1 - 0.1 / mean]])


def test_batch_scope_compares_across_groups():
    group = torch.tensor([0, 1, 0, 1])
    out = gtpo_advantages(ENTROPY, VERDICT, MASK, group, GTPOConfig(scope="batch"))
    close(out.shaped_rewards, [[1.15, 1.05], [1.05, 1.15], [-1.04, -1.16], [-1.16, -1.04]])
    own = gtpo_advantages(ENTROPY, VERDICT, MASK, group, GTPOConfig())
    close(own.shaped_rewards, [[1.1, 1.1], [1.1, 1.1], [-1.1, -1.1], [-1.1, -1.1]])


def test_a_single_survivor_weighs_exactly_one():
    mask = torch.tensor([[1, 1], [1, 0], [1, 1], [1, 0]], dtype=torch.bool)
    shaped = gtpo_advantages(ENTROPY, VERDICT, mask, GROUP, GTPOConfig()).shaped_rewards
    assert shaped[0, 1].item() == 1.1
    assert shaped[2, 1].item() == -1.1


def test_grpo_s_rewards_and_advantages():
    # Mean entropies 2, 3, 4, 1: weights 0.8, 1.2 and (1/4, 1) over 5/8.
    shaped, advantages = grpo_s()
    close(shaped, [1.08, 1.12, -1.04, -1.16])
    plus = math.sqrt((1.08**2 + 1.12**2 - 4 * 0.55**2) / 3) + 1e-6
    minus = math.sqrt((1.04**2 + 1.16**2 - 4 * 0.55**2) / 3) + 1e-6
    close(advantages, [[0.53 / plus] * 2, [0.57 / plus] * 2, [-0.49 / minus] * 2, [-0.61 / minus] * 2])


def test_grpo_s_negatives():
    close(grpo_s(beta1=0.9, negatives="zero")[0], [0.98, 1.02, 0, 0])
    close(grpo_s(beta1=0.9, negatives="inverse")[0], [0.98, 1.02, -0.4, -1.6])


def test_grpo_s_geometric_means_of_weights_and_of_entropies():
    close(grpo_s(mean="geometric")[0][:2], [1 + 0.1 * math.sqrt(2 / 3), 1 + 0.1 * math.sqrt(3 / 2)])
    a, b = math.sqrt(3), math.sqrt(5)
    close(grpo_s(entropy_mean="geometric")[0][:2], [1 + 0.2 * a / (a + b), 1 + 0.2 * b / (a + b)])


def test_grpo_rewards_normalized_in_their_group():
    reward = torch.tensor([1.0, 0.0, 0.0, 1.0, 5.0], dtype=torch.float64)
    out = grpo_advantages(reward, torch.ones(5, 3, dtype=torch.bool), torch.tensor([7, 7, 7, 7, 8]))
    value = 0.5 / (math.sqrt(1 / 3) + 1e-6)
    close(out.advantages, [[v] * 3 for v in (value, -value, -value, value, 0.0)])


@pytest.mark.parametrize(
    ("length", "cache", "largest"),
    [(16384, 0, 0), (16385, -1 / 4096, -1 / 20480), (18432, -0.5, -0.1), (20480, -1, -0.2), (20481, -1, -1)],
)
def test_soft_overlong_penalty(length: int, cache: float, largest: float):
    lengths = torch.tensor([length])
    close(soft_overlong_penalty(lengths), [cache])
    close(soft_overlong_penalty(lengths, denominator="max"), [largest])


def test_group_relative_penalty_of_an_easy_group():
    # Three of four correct: K = max((100 + 300) / 2, 600 / 3) = 200.
    lengths = torch.tensor([100, 200, 300, 900])
    correct = torch.tensor([True, True, True, False])
    close(group_relative_overlong_penalty(lengths, correct, GROUP), [0, 0, -0.25, 0])


def test_group_relative_penalty_stays_above_one_half():
    # K = max((10 + 100) / 2, 130 / 4) = 55.
    lengths = torch.tensor([10, 10, 10, 100])
    expected = -0.5 * 45 / 55
    close(group_relative_overlong_penalty(lengths, torch.ones(4, dtype=torch.bool), GROUP), [0, 0, 0, expected])
    # K = max((1 + 90) / 2, 99 / 10) = 45.5, and twice that, 91, is beyond the longest: -1/2 itself cannot be had.
    lengths = torch.tensor([1] * 9 + [90])
    penalty = group_relative_overlong_penalty(lengths, torch.ones(10, dtype=torch.bool), torch.zeros(10).long())
    close(penalty[-1:], [-0.5 * 44.5 / 45.5])


def test_group_relative_penalty_between_easy_and_hard():
    # Two of three correct: K from all three lengths, max((10 + 90) / 2, 160 / 3).
    correct = torch.tensor([True, True, False])
    knee = 160 / 3
    penalty = group_relative_overlong_penalty(torch.tensor([60, 90, 10]), correct, torch.zeros(3).long())
    close(penalty, [-0.5 * (60 - knee) / knee, -0.5 * (90 - knee) / knee, 0])


@pytest.mark.parametrize("verdict", [[True, False, False, False], [True, True, False, False], [False] * 4])
def test_group_relative_penalty_leaves_hard_and_even_groups_alone(verdict: list[bool]):
    lengths = torch.tensor([1000, 900, 10, 10])
    close(group_relative_overlong_penalty(lengths, torch.tensor(verdict), GROUP), [0, 0, 0, 0])


def test_group_relative_penalty_does_not_count_empty_rows():
    # Without the empty rows three of four are correct (easy); with them three of six (in between).
    lengths = torch.tensor([100, 200, 300, 900, 0, 0])
    correct = torch.tensor([True, True, True, False, False, True])
    close(group_relative_overlong_penalty(lengths, correct, torch.zeros(6).long()), [0, 0, -0.25, 0, 0, 0])
