"""The figures' own arithmetic and looks; that they are drawn at all is tested with the report."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gtpo_verl.algorithms.registry import algorithm, algorithms
from gtpo_verl.report import plots


def test_registered_methods_keep_their_style_whatever_is_beside_them():
    assert plots.arm_styles({"mine": "gtpo"}) == {"mine": algorithm("gtpo").style}
    beside = plots.arm_styles({"dapo": "dapo", "theirs": None, "a/gtpo": "gtpo"})
    assert (beside["dapo"], beside["a/gtpo"]) == (algorithm("dapo").style, algorithm("gtpo").style)


def test_a_method_that_the_registry_does_not_know_gets_a_free_style():
    free = plots.arm_styles({"gtpo": "gtpo", "theirs": "unheard_of"})["theirs"]
    assert free not in [entry.style for entry in algorithms().values()]


def test_no_two_arms_look_alike():
    arms = {f"{run}/{name}": name for run in "ab" for name in ("dapo", "gtpo", "grpo_s")}
    arms |= {f"run{n}": None for n in range(12)} | {name: name for name in algorithms()}
    styles = plots.arm_styles(arms)
    assert list(styles) == list(arms)
    assert len({(style.light, style.dashes) for style in styles.values()}) == len(arms)


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
    zeros = plots.Line("dapo", algorithm("dapo").style, np.arange(4), np.zeros(4))
    figure = plots.panels_figure([plots.Panel("flips", (zeros,), percent=True)], plots.LIGHT)
    low, high = figure.axes[0].get_ylim()
    assert low == 0 < high


def test_arms_with_one_validation_are_apart_with_their_intervals_at_one_step():
    low, high = np.array([0.4]), np.array([0.5])
    lines = [
        plots.Line(name, style, np.array([2.0]), np.array([0.45]), low, high)
        for name, style in plots.arm_styles({"DAPO": None, "GTPO": "gtpo"}).items()
    ]
    figure = plots.accuracy_figure(lines, plots.LIGHT, "title", "subtitle")
    (axes,) = figure.axes
    figure.canvas.draw()
    ticks = [label.get_text() for label in axes.get_xticklabels()]
    assert len(ticks) == len(set(ticks))
    bars = [collection.get_segments()[0] for collection in axes.collections]
    assert [bar[:, 1].tolist() for bar in bars] == [[0.4, 0.5]] * 2
    assert bars[0][0, 0] < 2 < bars[1][0, 0]


def test_a_logarithmic_axis_has_a_tick_at_both_ends():
    line = plots.Line("gtpo", algorithm("gtpo").style, np.arange(3), np.array([2e-6, 0.0, 1.3e-5]))
    figure = plots.panels_figure([plots.Panel("difference", (line,), log=True)], plots.LIGHT)
    assert figure.axes[0].get_ylim() == (1e-6, 1e-4)


def test_values_that_are_a_power_of_ten_have_an_axis():
    line = plots.Line("gtpo", algorithm("gtpo").style, np.arange(2), np.full(2, 1e-5))
    low, high = plots.panels_figure([plots.Panel("difference", (line,), log=True)], plots.LIGHT).axes[0].get_ylim()
    assert low <= 1e-5 < high
