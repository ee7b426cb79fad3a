"""The figures' own arithmetic and looks; that they are drawn at all is tested with the report."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gtpo_verl.algorithms.registry import algorithm, algorithms
from gtpo_verl.report import charts


def test_registered_methods_keep_their_style_whatever_is_beside_them():
    assert charts.arm_styles({"mine": "gtpo"}) == {"mine": algorithm("gtpo").style}
    beside = charts.arm_styles({"dapo": "dapo", "theirs": None, "a/gtpo": "gtpo"})
    assert (beside["dapo"], beside["a/gtpo"]) == (algorithm("dapo").style, algorithm("gtpo").style)


def test_a_method_that_the_registry_does_not_know_gets_a_free_style():
    free = charts.arm_styles({"gtpo": "gtpo", "theirs": "unheard_of"})["theirs"]
    assert free not in [entry.style for entry in algorithms().values()]


def test_no_two_arms_look_alike():
    arms = {f"{run}/{name}": name for run in "ab" for name in ("dapo", "gtpo", "grpo_s")}
    arms |= {f"run{n}": None for n in range(12)} | {name: name for name in algorithms()}
    styles = charts.arm_styles(arms)
    assert list(styles) == list(arms)
    assert len({(style.light, style.dashes) for style in styles.values()}) == len(arms)


def test_running_mean_on_a_hand_computed_case():
    np.testing.assert_allclose(charts.running_mean(np.array([0.0, 3.0, 6.0, 0.0]), 3), [1.5, 3, 3, 3])


@given(st.lists(st.floats(-1, 1), min_size=1, max_size=50), st.sampled_from([1, 3, 7]))
def test_running_mean_stays_within_the_data_and_keeps_a_constant(values: list[float], window: int):
    smooth = charts.running_mean(np.array(values), window)
    assert min(values) - 1e-12 <= smooth.min() <= smooth.max() <= max(values) + 1e-12
    np.testing.assert_allclose(charts.running_mean(np.full(len(values), 0.3), window), 0.3)


@pytest.mark.parametrize(("points", "window"), [(1, 1), (20, 1), (60, 7), (200, 21)])
def test_smoothing_window_is_odd_and_a_tenth_of_the_curve(points: int, window: int):
    assert charts.smoothing_window(points) == window


def domain(line: charts.Line, **options: bool) -> dict:
    chart = charts.panel_chart(charts.Panel("", (line,), **options), charts.arm_styles({"gtpo": "gtpo"}))
    return chart["layer"][-1]["encoding"]["y"]["scale"]


def test_values_that_stay_at_zero_are_drawn_at_the_bottom():
    assert domain(charts.Line("gtpo", np.arange(4.0), np.zeros(4)), percent=True) == {"domain": [0, 1]}


@pytest.mark.parametrize(("values", "ends"), [([2e-6, 0.0, 1.3e-5], [1e-6, 1e-4]), ([1e-5] * 2, [1e-5, 1e-4])])
def test_a_logarithmic_axis_has_a_tick_at_both_ends(values: list[float], ends: list[float]):
    line = charts.Line("gtpo", np.arange(float(len(values))), np.array(values))
    assert domain(line, log=True)["domain"] == pytest.approx(ends)


@pytest.mark.parametrize(("points", "joined"), [(3, False), (4, True)])
def test_three_points_are_no_trend_line(points: int, joined: bool):
    styles = charts.arm_styles({"gtpo": "gtpo"})
    line = charts.Line("gtpo", np.arange(float(points)), np.ones(points), np.zeros(points), np.ones(points))
    marks = [layer["mark"]["type"] for layer in charts.panel_chart(charts.Panel("", (line,)), styles)["layer"]]
    assert ("line" in marks, "area" in marks) == (joined, joined)


def test_long_curves_keep_their_ends_and_every_arm_its_colour():
    styles = charts.arm_styles({"DAPO": "dapo", "GTPO": "gtpo"})
    line = charts.Line("GTPO", np.arange(5000.0), np.arange(5000.0))
    chart = charts.panel_chart(charts.Panel("", (line,)), styles)
    (values,) = chart["data"]["values"]
    assert (values["x"][0], values["x"][-1], len(values["x"])) == (0, 4999, 400)
    assert chart["encoding"]["color"]["scale"] == {"domain": ["DAPO", "GTPO"], "range": ["var(--arm1)", "var(--arm2)"]}
    assert charts.variables(styles, "light")["arm2"] == algorithm("gtpo").style.light
