"""How many groups dynamic sampling asks for."""

import math

import pytest

from gtpo_verl.integrations.step.generation import groups_to_generate, groups_to_train


@pytest.mark.parametrize("missing", [1, 2, 7, 64, 512])
def test_with_signal_in_every_group_nothing_is_generated_in_vain(missing: int) -> None:
    assert groups_to_generate(missing, 1.0) == missing


@pytest.mark.parametrize("expected_yield", [0.02, 0.3, 0.5, 0.77, 0.99])
@pytest.mark.parametrize("missing", [1, 5, 24, 512])
def test_it_is_the_least_number_whose_mean_is_a_standard_deviation_above(missing: int, expected_yield: float) -> None:
    def low(groups: int) -> float:
        mean = groups * expected_yield
        return mean - math.sqrt(mean * (1 - expected_yield))

    groups = groups_to_generate(missing, expected_yield)
    assert low(groups) >= missing - 1e-9
    assert low(groups - 1) < missing


def test_one_round_is_enough_more_than_four_times_in_five() -> None:
    """Exact, from the binomial distribution."""
    for missing, share in ((24, 0.5), (64, 0.3), (128, 0.8)):
        groups = groups_to_generate(missing, share)
        enough = sum(math.comb(groups, k) * share**k * (1 - share) ** (groups - k) for k in range(missing, groups + 1))
        assert 0.8 < enough < 0.9


@pytest.mark.parametrize(("kept", "trained"), [(64, 64), (80, 64), (63, 32), (33, 32), (32, 32), (31, 31), (1, 1)])
def test_a_short_batch_is_whole_mini_batches_or_one_smaller_update(kept: int, trained: int) -> None:
    assert groups_to_train(kept, batch_size=64, mini_batch_size=32) == trained
