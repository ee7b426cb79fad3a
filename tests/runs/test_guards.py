"""A metric outside its bounds for several steps in a row is said once, or ends the run."""

import pytest

from gtpo_verl.errors import UserError
from gtpo_verl.runs.guards import Bound, Guards, read_bounds


def said(guards: Guards, values: list[float]) -> list[int]:
    """The steps that warn."""
    return [step for step, value in enumerate(values, start=1) if guards.check(step, {"m": value, "other": 9.0})]


def test_a_bound_is_said_once_until_it_is_inside_again() -> None:
    guards = Guards({"low": Bound(metric="m", min=0.1, steps=2)})
    assert said(guards, [0.0, 0.2, 0.0, 0.05, 0.0, 0.1, 0.0, 0.0]) == [4, 8]


@pytest.mark.parametrize("limit", [{"min": 0.1}, {"max": 1.0}])
def test_nan_is_outside_of_every_limit(limit: dict[str, float]) -> None:
    guards = Guards({"bound": Bound(metric="m", steps=2, **limit)})
    assert said(guards, [float("nan"), 0.5, float("nan"), float("nan")]) == [4]


def test_a_value_that_stays_the_same_is_outside() -> None:
    guards = Guards({"stuck": Bound(metric="m", unchanged=True, steps=3)})
    assert said(guards, [0.5, 0.5, 0.5, 0.5, 0.6, 0.6]) == [4]


def test_a_metric_that_is_not_logged_in_a_step_says_nothing() -> None:
    guards = Guards({"high": Bound(metric="m", max=1.0, steps=2)})
    found = [guards.check(step, data) for step, data in enumerate(({"m": 2.0}, {}, {"m": 2.0}), start=1)]
    assert found[:2] == [[], []]
    assert found[2] == ["step 3: m is 2, and guards.bounds.high expects it at most 1.0; outside for 2 steps in a row."]


def test_a_bound_may_end_the_run() -> None:
    guards = Guards({"high": Bound(metric="m", max=1.0, action="stop")})
    assert guards.check(1, {"m": 1.0}) == []
    with pytest.raises(UserError, match=r"step 2: m is 1\.5, .*guards\.bounds\.high=null switches the bound off"):
        guards.check(2, {"m": 1.5})


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"max": 1.0}, "metric at least"),
        ({"metric": "m", "maximum": 1.0}, "it takes metric, min, max"),
        ({"metric": "m", "max": 1.0, "action": "raise"}, "choose warn or stop"),
        ({"metric": "m", "max": 1.0, "steps": 0}, "steps=0"),
        ({"metric": "m", "max": "high"}, "'high' is not a number"),
        ({"metric": "m"}, "set min, max or unchanged"),
    ],
)
def test_an_entry_that_cannot_be_read_is_refused(entry: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        read_bounds({"x": entry})


def test_an_entry_that_is_null_is_off() -> None:
    assert read_bounds({"x": None}) == {}
