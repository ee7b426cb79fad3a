"""The figures' own arithmetic and looks; that they are drawn at all is tested with the report."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gtpo_verl.report import plots


def test_known_arms_keep_their_look_whatever_stands_beside_them():
    alone = plots.arm_styles(["gtpo"])["gtpo"]
    assert plots.arm_styles(["dapo", "mine", "gtpo"])["gtpo"] == alone
    assert plots.arm_styles(["run/gtpo"])["run/gtpo"] == alone


def test_no_two_arms_look_alike():
    labels = ["a/dapo", "a/gtpo", "a/grpo_s", "b/dapo", "b/gtpo", "b/grpo_s", *(f"run{n}" for n in range(12))]
    styles = plots.arm_styles(labels)
    assert list(styles) == labels
    assert len({(style.light, style.dashes) for style in styles.values()}) == len(labels)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=8), st.floats(0.01, 0.3))
def test_labels_are_moved_apart_without_changing_their_order_or_centre(heights: list[float], gap: float):
    places = plots._spread(sorted(heights), gap)
    assert all(after - before >= gap - 1e-9 for before, after in itertools.pairwise(places))
    assert sum(places) == pytest.approx(sum(heights))


def test_labels_far_apart_stay_where_they_are():
    assert plots._spread([0.1, 0.5, 0.9], 0.2) == pytest.approx([0.1, 0.5, 0.9])


def test_running_mean_on_a_hand_computed_case():
    np.testing.assert_allclose(plots.running_mean(np.array([0.0, 3.0, 6.0, 0.0]), 3), [1.5, 3, 3, 3])


@given(st.lists(st.floats(-1, 1), min_size=1, max_size=50), st.sampled_from([1, 3, 7]))
def test_running_mean_stays_within_the_data_and_keeps_a_constant(values: list[float], window: int):
    smooth = plots.running_mean(np.array(values), window)
    assert min(values) - 1e-12 <= smooth.min() <= smooth.max() <= max(values) + 1e-12
    np.testing.assert_allclose(plots.running_mean(np.full(len(values), 0.3), window), 0.3)


@pytest.mark.parametrize(("points", "window"), [(1, 1), (20, 1), (60, 7), (200, 21)])
def test_smoothing_window_is_odd_and_a_tenth_of_the_curve(points: int, window: int):
    assert plots.smoothing_window(points) == window


def test_shares_that_stay_at_zero_are_drawn_at_the_bottom():
    zeros = plots.Line("dapo", plots.arm_styles(["dapo"])["dapo"], np.arange(4), np.zeros(4))
    figure = plots.panels_figure([plots.Panel("flips", (zeros,), percent=True)], plots.LIGHT)
    low, high = figure.axes[0].get_ylim()
    assert low == 0 < high


def test_a_logarithmic_axis_has_a_tick_at_both_ends():
    line = plots.Line("gtpo", plots.arm_styles(["gtpo"])["gtpo"], np.arange(3), np.array([2e-6, 0.0, 1.3e-5]))
    figure = plots.panels_figure([plots.Panel("difference", (line,), log=True)], plots.LIGHT)
    assert figure.axes[0].get_ylim() == (1e-6, 1e-4)


def test_values_that_are_a_power_of_ten_have_an_axis():
    line = plots.Line("gtpo", plots.arm_styles(["gtpo"])["gtpo"], np.arange(2), np.full(2, 1e-5))
    low, high = plots.panels_figure([plots.Panel("difference", (line,), log=True)], plots.LIGHT).axes[0].get_ylim()
    assert low <= 1e-5 < high
