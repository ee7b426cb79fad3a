"""Statistics over seeds: hand-computed cases, SciPy's own tests, and simulated experiments whose truth is known."""

from collections.abc import Callable

import numpy as np
import pytest
from scipy import stats

from gtpo_verl.evaluation import paired as module
from gtpo_verl.evaluation.paired import (
    compared,
    crossed_interval,
    detectable_difference,
    deviation_at_most,
    holm,
    interquartile_mean,
    least_sign_flip_p,
    paired,
    sign_flip_p,
    student_bounds,
    student_interval,
)

RUNS = 20_000
DRAWS: dict[str, Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]] = {
    "normal": lambda rng, shape: rng.normal(size=shape),
    "laplace": lambda rng, shape: rng.laplace(size=shape),
    "t3": lambda rng, shape: rng.standard_t(3, size=shape),
}


def draw(name: str, *shape: int) -> np.ndarray:
    return DRAWS[name](np.random.default_rng(7), shape)


def student_p(differences: np.ndarray) -> np.ndarray:
    return stats.ttest_1samp(differences, 0.0, axis=-1).pvalue


def test_students_interval_on_a_hand_computed_case():
    # mean 3, s = sqrt(2.5), t(0.975, 4) = 2.776445: half width 2.776445 * sqrt(2.5 / 5)
    interval = student_interval([1, 2, 3, 4, 5])
    assert (interval.low, interval.high) == pytest.approx((3 - 1.963243, 3 + 1.963243), abs=1e-6)
    assert [float(each) for each in student_bounds(np.full(3, 0.5))] == [0.5, 0.5]
    assert student_interval([0.5]) is None
    assert student_interval([0.1 + 0.2, 0.3]) is None  # no spread but rounding


def test_students_interval_and_test_agree_with_scipys_paired_test():
    arm, baseline = draw("normal", 2, 9)
    theirs = stats.ttest_rel(arm, baseline)
    expected = theirs.confidence_interval(0.95)
    bounds = [float(each) for each in student_bounds(arm - baseline)]
    assert bounds == pytest.approx([expected.low, expected.high])
    found = paired((arm - baseline).tolist())
    assert found.t_p == pytest.approx(theirs.pvalue)
    assert [found.interval.low, found.interval.high] == pytest.approx(bounds)


@pytest.mark.parametrize(
    ("differences", "p"),
    [
        ([1, 2, 3, 4, 5], 2 / 32),
        ([1, 2, 3, 4, -1], 6 / 32),  # sums of 9 or more: none negative, the last, or the first; and their negatives
        ([1, 1, -1, -1], 1.0),
        ([0.0, 0.0, 0.0], 1.0),
        ([-1.0] * 8, 2 / 256),
    ],
)
def test_sign_flip_p_on_small_cases(differences: list[float], p: float):
    assert float(sign_flip_p(np.array(differences, dtype=float))) == p


def test_sign_flip_test_agrees_with_scipys_permutation_test():
    for seed in range(5):
        differences = np.random.default_rng(seed).normal(0.4, 1, 8)
        theirs = stats.permutation_test(
            (differences,), np.mean, permutation_type="samples", n_resamples=np.inf, vectorized=True
        )
        assert float(sign_flip_p(differences)) == pytest.approx(theirs.pvalue)


def test_the_least_p_of_the_sign_flip_test():
    assert (least_sign_flip_p(5), least_sign_flip_p(8)) == (0.0625, 0.0078125)
    for n in (2, 5, 8):
        assert float(sign_flip_p(np.arange(1.0, n + 1))) == least_sign_flip_p(n)
    with pytest.raises(ValueError, match="at most 20"):
        sign_flip_p(np.ones(21))


def test_holm_on_a_hand_computed_case():
    # sorted 0.01 x 4, 0.02 x 3, 0.03 x 2, 0.5 x 1; never below the one before
    assert holm([0.5, 0.01, 0.03, 0.02]).tolist() == pytest.approx([0.5, 0.04, 0.06, 0.06])
    assert holm([0.6, 0.7]).tolist() == [1.0, 1.0]
    assert holm([0.04]).tolist() == [0.04]


def test_interquartile_mean_leaves_a_quarter_out_at_each_end():
    assert interquartile_mean([0, 1, 2, 3, 4, 5, 6, 100]) == 3.5
    assert interquartile_mean([0, 1, 2, 3, 100]) == 2
    assert interquartile_mean([1, 2, 6]) == 3


def test_a_comparison_counts_ties_as_half_and_knows_what_it_cannot_say():
    found = paired([0.1, 0.3, 0.0, -0.2])
    assert (found.seeds, found.mean, found.better) == (4, pytest.approx(0.05), 0.625)
    assert found.interval.low < 0 < found.interval.high
    alone = paired([0.2])
    assert (alone.interval, alone.t_p, alone.sign_flip_p, alone.detectable, alone.shown) == (None,) * 4 + (False,)
    same = paired([0.2, 0.2, 0.2])
    assert (same.interval, same.t_p, same.sign_flip_p) == (None, None, 0.25)


def test_seeds_are_compared_within_their_start():
    # by hand: means 1 and 5, squares around them 2 x 1, over 2 degrees of freedom; mean 3
    found = paired([0, 2, 5, 5], starts=["A", "A", "B", "B"])
    half = stats.t.ppf(0.975, 2) * 1 / 2
    assert [found.interval.low, found.interval.high] == pytest.approx([3 - half, 3 + half])
    assert found.t_p == pytest.approx(2 * stats.t.sf(3 / 0.5, 2))
    assert found.detectable == pytest.approx(detectable_difference(1.0, 4, 1, 2))
    alone = [0.0, 2.0, 5.0, 5.0]
    assert paired(alone, starts=["A", "B", "C", "D"]) == paired(alone) == paired(alone, starts=["A"] * 4)
    assert paired([1, 1, 5, 5], starts=["A", "A", "B", "B"]).t_p is None


@pytest.mark.parametrize("between", [0.0, 2.0])
def test_an_interval_within_starts_covers_the_mean_over_these_starts(between: float):
    starts, effects = ["A"] * 4 + ["B"] * 4, between * np.repeat([1, -1], 4)
    found = [paired(row, starts=starts) for row in (draw("normal", 2000, 8) + effects).tolist()]
    covered = np.mean([one.interval.low <= 0 <= one.interval.high for one in found])
    assert covered == pytest.approx(0.95, abs=0.015)
    assert np.mean([one.t_p <= 0.05 for one in found]) == pytest.approx(1 - covered)


def test_p_values_of_a_report_are_adjusted_together():
    rng = np.random.default_rng(3)
    families = [list(rng.normal(mean, 1, 8)) for mean in (2, 1, 0)]
    single = [paired(differences) for differences in families]
    together = compared([*families, [0.5]])
    assert [one.t_holm for one in together[:3]] == pytest.approx(holm([one.t_p for one in single]).tolist())
    flips = holm([one.sign_flip_p for one in single]).tolist()
    assert [one.sign_flip_holm for one in together[:3]] == pytest.approx(flips)
    assert (together[3].t_p, together[3].t_holm) == (None, None)
    # three comparisons ask for a larger difference than one
    assert together[0].detectable > single[0].detectable


@pytest.mark.parametrize("n", range(5, 11))
@pytest.mark.parametrize("name", DRAWS)
def test_coverage_and_false_positives_of_symmetric_differences(name: str, n: int):
    differences = draw(name, RUNS, n)
    low, high = student_bounds(differences)
    coverage = ((low <= 0) & (high >= 0)).mean()
    assert 0.93 <= coverage <= 0.97
    assert (student_p(differences) <= 0.05).mean() == pytest.approx(1 - coverage)
    assert (sign_flip_p(differences) <= 0.05).mean() <= 0.055


@pytest.mark.parametrize("name", DRAWS)
def test_holm_keeps_the_chance_of_any_false_positive(name: str):
    accuracy = draw(name, RUNS, 4, 8)
    differences = accuracy[:, 1:] - accuracy[:, :1]  # three arms share a baseline
    for p_values in (student_p(differences), sign_flip_p(differences)):
        assert (p_values <= 0.05).any(axis=1).mean() > 0.08  # without Holm
        assert (np.apply_along_axis(holm, 1, p_values) <= 0.05).any(axis=1).mean() <= 0.055


def test_skewed_differences_are_covered_less_as_the_documentation_says():
    differences = np.random.default_rng(7).exponential(size=(RUNS, 8)) - 1
    low, high = student_bounds(differences)
    assert 0.88 <= ((low <= 0) & (high >= 0)).mean() <= 0.90


@pytest.mark.parametrize(("n", "comparisons"), [(5, 1), (8, 1), (8, 3)])
def test_the_detectable_difference_is_shown_four_times_in_five(n: int, comparisons: int):
    shift = detectable_difference(2.0, n, comparisons)
    differences = np.random.default_rng(11).normal(shift, 2.0, (RUNS, n))
    shown = (student_p(differences) <= 0.05 / comparisons) & (differences.mean(axis=1) > 0)
    assert shown.mean() == pytest.approx(module.POWER, abs=0.015)


def test_the_upper_bound_of_a_standard_deviation_covers_as_it_says():
    assert deviation_at_most(1.0, 7) == pytest.approx(2.0353, abs=1e-4)  # sqrt(7 / 1.68987), of a table of chi-square
    drawn = np.random.default_rng(0).standard_normal((20_000, 5)).std(axis=1, ddof=1)
    assert np.mean([deviation_at_most(float(one), 4) >= 1 for one in drawn]) == pytest.approx(0.975, abs=0.005)


def test_the_crossed_interval_by_hand() -> None:
    """Mean squares 0.09 (two seeds), 0.25 (two prompts) and 0.01 (residual), so the variance is 0.33 / 4."""
    found = crossed_interval(np.array([[0.4, 0.8], [0.0, 0.6]]))
    free = 0.33**2 / (0.09**2 + 0.25**2 + 0.01**2)
    half = stats.t.ppf(0.975, free) * np.sqrt(0.33 / 4)
    assert (found.low, found.high) == pytest.approx((0.45 - half, 0.45 + half))
    assert crossed_interval(np.full((3, 4), 0.2)) is None
    assert crossed_interval(np.array([[0.1, 0.2]])) is None


def test_the_crossed_interval_covers_other_prompts_where_that_over_seeds_does_not() -> None:
    rng = np.random.default_rng(3)
    covered = np.zeros(2)
    for _ in range(1000):
        effects = rng.normal(0, 0.02, (8, 1)), rng.normal(0, 0.15, (1, 30)), rng.normal(0, 0.3, (8, 30))
        found = sum(effects)
        intervals = crossed_interval(found), student_interval(found.mean(axis=1))
        covered += [each.low <= 0 <= each.high for each in intervals]
    assert 930 < covered[0] < 970
    assert covered[1] < 850
