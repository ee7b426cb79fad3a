"""Correct is ``acc`` at or above the threshold, and nothing else."""

import pytest

from gtpo_verl.runs.correctness import is_correct


@pytest.mark.parametrize(
    ("acc", "threshold", "correct"),
    [(1.0, 1.0, True), (0.5, 0.5, True), (0.49, 0.5, False), (None, 0.0, False), (float("nan"), 0.0, False)],
)
def test_correct_is_at_or_above_the_threshold(acc: float | None, threshold: float, correct: bool) -> None:
    assert is_correct(acc, threshold) is correct
