"""Correct is ``acc`` at or above the threshold, and nothing else."""

import math

import pytest

from gtpo_verl.errors import UserError
from gtpo_verl.runs.correctness import is_correct, score, verdict


@pytest.mark.parametrize(
    ("acc", "threshold", "correct"),
    [(1.0, 1.0, True), (0.5, 0.5, True), (0.49, 0.5, False), (None, 0.0, False), (float("nan"), 0.0, False)],
)
def test_correct_is_at_or_above_the_threshold(acc: float | None, threshold: float, correct: bool) -> None:
    assert is_correct(acc, threshold) is correct


def test_a_verdict_is_a_number() -> None:
    assert [verdict({"acc": acc}, "here") for acc in (1, True, 0.5, "1")] == [1.0, 1.0, 0.5, 1.0]
    assert math.isnan(verdict({"acc": None}, "here"))


@pytest.mark.parametrize("acc", ["yes", "", [1], {"acc": 1}, 10**400])
def test_what_is_no_number_is_refused(acc: object) -> None:
    with pytest.raises(UserError, match=r"returned acc=.* on response 7: it must be a number") as e:
        verdict({"acc": acc}, "on response 7")
    assert "\n" not in str(e.value)


def test_a_response_without_a_verdict_is_refused() -> None:
    with pytest.raises(UserError, match="no verdict on response 7: it must return a dict with `acc`"):
        verdict({"pred": "2"}, "on response 7")
    assert verdict({"score": -1.0}, "here") == -1.0


def test_the_score_is_the_functions_own_or_the_number_that_it_returned() -> None:
    assert [score(info) for info in ({"score": -1.0, "acc": 0.0}, {"acc": 0.25}, {"pred": "2"})] == [-1.0, 0.25, None]
