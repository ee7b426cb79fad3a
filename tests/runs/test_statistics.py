"""The intervals: closed forms, invariances, and coverage where the truth is known."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gtpo_verl.runs.statistics import (
    DRAWS,
    Interval,
    cluster_means,
    cluster_standard_error,
    estimate,
    estimates,
    resampled_means,
)

accuracies = st.lists(st.floats(0, 1), min_size=2, max_size=40).map(np.array)


def test_cluster_means_are_those_of_each_prompt_in_sorted_order():
    names, means, counts = cluster_means(["b", "a", "b", "c", "b"], [1, 0, 0, 1, 1])
    assert names == ("a", "b", "c")
    np.testing.assert_allclose(means, [0, 2 / 3, 1])
    np.testing.assert_array_equal(counts, [1, 3, 1])


def test_standard_error_in_closed_form_on_a_hand_computed_case():
    # means 0, 1/2, 1: variance 1/4, standard error 1/2 / sqrt(3)
    assert cluster_standard_error(np.array([0.0, 0.5, 1.0])) == pytest.approx(0.5 / np.sqrt(3))


def test_standard_error_equals_the_sandwich_formula_for_equal_clusters():
    values = np.random.default_rng(0).random((30, 4))
    residual_sums = (values - values.mean()).sum(axis=1)
    sandwich = np.sqrt(30 / 29 * np.sum(residual_sums**2)) / values.size
    assert cluster_standard_error(values.mean(axis=1)) == pytest.approx(sandwich)


def test_standard_error_over_clusters_is_the_sandwich_formula():
    # residuals of (0, 1, 1, 1) are -3/4 and three times 1/4; clusters {0, 1} and {2, 3} have residual sums -1/2 and 1/2
    means = np.array([0.0, 1.0, 1.0, 1.0])
    assert cluster_standard_error(means, ["a", "a", "b", "b"]) == pytest.approx(np.sqrt(2 * (1 / 4 + 1 / 4)) / 4)
    assert cluster_standard_error(means, list("abcd")) == pytest.approx(cluster_standard_error(means))


def test_clusters_of_one_prompt_each_change_nothing():
    means = np.random.default_rng(7).random((40, 2))
    names = [f"{n:02}" for n in range(40)]
    np.testing.assert_array_equal(resampled_means(means, clusters=names), resampled_means(means))


def test_prompts_of_a_cluster_are_drawn_together():
    """Two clusters of sizes 1 and 3: a draw is one of them twice, or both, and the mean is over the prompts drawn."""
    means = np.array([[1.0], [0.0], [0.0], [0.5]])
    draws = resampled_means(means, clusters=["a", "b", "b", "b"])[:, 0]
    assert sorted(set(np.round(draws, 9))) == pytest.approx([1 / 6, 3 / 8, 1])
    assert np.mean(np.isclose(draws, 3 / 8)) == pytest.approx(0.5, abs=0.02)
    assert estimate(means[:, 0], clusters=["a", "b", "b", "b"]).value == 3 / 8


def test_no_interval_where_all_clusters_have_the_same_mean():
    means = np.array([0.1, 0.3, 0.2, 0.1, 0.3])
    assert estimate(means, clusters=["a", "a", "b", "c", "c"]).interval is None
    assert estimate(means, clusters=["a"] * 5).interval is None


def test_spread_of_the_cluster_bootstrap_is_the_closed_form():
    rng = np.random.default_rng(8)
    clusters = [f"{n // 7}" for n in range(1_400)]
    means = np.repeat(rng.random(200), 7) + 0.1 * rng.random(1_400)
    spread = resampled_means(means[:, None], clusters=clusters).std()
    assert spread == pytest.approx(cluster_standard_error(means, clusters) * np.sqrt(199 / 200), rel=0.03)
    assert spread > 2 * cluster_standard_error(means)


def test_one_cluster_has_no_standard_error():
    with pytest.raises(ValueError, match="at least 2 clusters, got 1"):
        cluster_standard_error(np.array([0.5]))


def test_spread_of_the_bootstrap_is_the_closed_form():
    means = np.random.default_rng(1).random(200)
    spread = resampled_means(means[:, None]).std()
    # the bootstrap draws from the sample itself, whose variance has P instead of P - 1 in its denominator;
    # a standard deviation of 10,000 draws is known to about 0.7 %
    assert spread == pytest.approx(cluster_standard_error(means) * np.sqrt(199 / 200), rel=0.03)


def test_interval_is_the_normal_one_for_many_prompts():
    means = np.random.default_rng(2).random(2_000)
    interval = estimate(means).interval
    assert interval is not None
    half = 1.959964 * cluster_standard_error(means)
    assert interval.low == pytest.approx(means.mean() - half, abs=0.05 * half)
    assert interval.high == pytest.approx(means.mean() + half, abs=0.05 * half)


def test_draws_do_not_depend_on_how_they_are_chunked(monkeypatch: pytest.MonkeyPatch):
    means = np.random.default_rng(3).random((50, 2))
    whole = resampled_means(means, draws=101)
    monkeypatch.setattr("gtpo_verl.runs.statistics._CHUNK", 700)
    # sums of other lengths may be added in another order
    np.testing.assert_allclose(resampled_means(means, draws=101), whole, rtol=1e-12)


@settings(max_examples=25, deadline=None)
@given(accuracies)
def test_each_column_has_the_interval_it_has_alone(means: np.ndarray):
    beside, alone = estimates(np.stack([means, means[::-1]], axis=1), draws=200)[0], estimate(means, draws=200)
    assert beside.value == pytest.approx(alone.value)
    assert (beside.interval is None) == (alone.interval is None)
    if beside.interval and alone.interval:
        assert (beside.interval.low, beside.interval.high) == pytest.approx((alone.interval.low, alone.interval.high))


@settings(max_examples=25, deadline=None)
@given(accuracies, st.floats(-0.5, 0.5))
def test_a_shift_of_all_prompts_shifts_the_interval(means: np.ndarray, shift: float):
    here, there = estimate(means, draws=200), estimate(means + shift, draws=200)
    assert there.value == pytest.approx(here.value + shift, abs=1e-9)
    if here.interval and there.interval:
        assert there.interval.low == pytest.approx(here.interval.low + shift, abs=1e-9)
        assert there.interval.high == pytest.approx(here.interval.high + shift, abs=1e-9)


@settings(max_examples=25, deadline=None)
@given(accuracies)
def test_swapping_before_and_after_mirrors_the_interval(difference: np.ndarray):
    here, there = estimate(difference, draws=200).interval, estimate(-difference, draws=200).interval
    if here is None:
        assert there is None
    else:
        assert there is not None
        assert (there.low, there.high) == (pytest.approx(-here.high), pytest.approx(-here.low))


@settings(max_examples=25, deadline=None)
@given(accuracies)
def test_interval_lies_within_the_values(means: np.ndarray):
    interval = estimate(means, draws=200).interval
    if interval is not None:
        assert means.min() - 1e-12 <= interval.low <= interval.high <= means.max() + 1e-12


@pytest.mark.parametrize("means", [[0.25], [1.0, 1.0, 1.0], [0.0, 0.0]])
def test_no_interval_without_spread(means: list[float]):
    assert estimate(np.array(means)).interval is None


def test_the_same_seed_gives_the_same_interval_and_another_seed_another():
    means = np.random.default_rng(4).random(30)
    assert estimate(means) == estimate(means)
    assert estimate(means, seed=1) != estimate(means, seed=2)


def test_pairing_narrows_the_interval_of_a_difference():
    rng = np.random.default_rng(5)
    difficulty = rng.random(300)
    before, after = difficulty + 0.05 * rng.random(300), difficulty + 0.1 + 0.05 * rng.random(300)
    paired = estimate(after - before).interval
    separate = resampled_means(after[:, None], seed=1)[:, 0] - resampled_means(before[:, None], seed=2)[:, 0]
    low, high = np.quantile(separate, [0.025, 0.975])
    assert paired is not None
    assert paired.high - paired.low < 0.2 * (high - low)


@pytest.mark.parametrize(
    ("interval", "expected"),
    [
        (Interval(0.01, 0.2), True),
        (Interval(-0.2, -0.01), True),
        (Interval(-0.1, 0.1), False),
        (Interval(0, 0.1), False),
    ],
)
def test_excludes_zero(interval: Interval, expected: bool):
    assert interval.excludes_zero() is expected


@pytest.mark.slow
def test_coverage_on_simulated_trainings():
    """95 % of the intervals hold the true gain; intervals that take samples for independent hold it less often."""
    rng = np.random.default_rng(6)
    trials, prompts, samples = 1_000, 120, 4
    # a prompt is solved with chance p before and p + 0.3 p (1 - p) after, p ~ Beta(0.6, 0.6):
    # the true gain is 0.3 E[p (1 - p)]
    a = 0.6
    truth_before, truth_gain = 0.5, 0.3 * a * a / (2 * a * (2 * a + 1))
    gain_held = before_held = naive_held = 0
    for trial in range(trials):
        p = rng.beta(a, a, prompts)
        before = rng.random((prompts, samples)) < p[:, None]
        after = rng.random((prompts, samples)) < (p + 0.3 * p * (1 - p))[:, None]
        columns = np.stack([before.mean(axis=1), (after.mean(axis=1) - before.mean(axis=1))], axis=1)
        start, gain = (e.interval for e in estimates(columns, draws=2_000, seed=trial))
        assert start is not None
        assert gain is not None
        before_held += start.low <= truth_before <= start.high
        gain_held += gain.low <= truth_gain <= gain.high
        half = 1.959964 * np.sqrt(before.mean() * (1 - before.mean()) / before.size)
        naive_held += abs(before.mean() - truth_before) <= half
    # three standard errors of a share of 0.95 in 1,000 trials are 0.021
    assert 0.929 <= gain_held / trials <= 0.971
    assert 0.929 <= before_held / trials <= 0.971
    assert naive_held / trials < 0.88


def test_the_report_uses_ten_thousand_draws():
    assert DRAWS == 10_000
    assert resampled_means(np.array([[0.0], [1.0]])).shape == (10_000, 1)
