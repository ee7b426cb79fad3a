"""Cut points and the choice of responses."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from gtpo_verl.audit.cuts import choose, cut_points


def test_cuts_are_at_the_ends_of_lines_and_sentences() -> None:
    text = "We add 3 and 4.\nThat is 7; then 7+5=12.\nSo the answer is 12"
    tokens = list(text)
    points = cut_points(tokens, 4)
    assert [text[:point][-1] for point in points[1:-1]] == [".", ";", "\n"]
    assert points[0] == 0
    assert points[-1] == len(text)


def test_without_ends_the_grid_is_even() -> None:
    assert cut_points(["x"] * 12, 4).tolist() == [0, 3, 6, 9, 12]
    assert cut_points(["x"] * 3, 3).tolist() == [0, 1, 2, 3]


def test_with_fewer_tokens_than_steps_each_is_a_step() -> None:
    assert cut_points(["x", ".", "y"], 5).tolist() == [0, 1, 2, 3, 3, 3]
    assert cut_points(["x"], 2).tolist() == [0, 1, 1]


@given(st.lists(st.sampled_from(["a", ".", "\n", " ", ";"]), min_size=2, max_size=60), st.integers(2, 20))
def test_every_step_has_a_token(texts: list[str], steps: int) -> None:
    points = cut_points(texts, steps)
    assert len(points) == steps + 1
    assert (np.diff(points) > 0).sum() == min(steps, len(texts))
    assert (np.diff(points) >= 0).all()
    assert (points[0], points[-1]) == (0, len(texts))


def test_weights_make_totals_unbiased() -> None:
    rng = np.random.default_rng(0)
    groups = [f"p{number // 8}" for number in range(80)]
    correct, values = rng.random(80) < 0.4, rng.normal(size=80)
    totals = []
    for seed in range(2000):
        rows, weights = choose(groups, correct, 40, seed)
        assert len(rows) == len(set(rows.tolist())) == 40
        totals.append((weights * values[rows]).sum())
    assert abs(np.mean(totals) - values.sum()) < 4 * np.std(totals) / np.sqrt(len(totals))


def test_verdicts_are_balanced_and_the_limit_is_kept() -> None:
    groups = ["a"] * 8 + ["b"] * 8
    correct = np.array([True] * 7 + [False] + [True] + [False] * 7)
    rows, weights = choose(groups, correct, 4, 0)
    assert sorted(correct[rows].tolist()) == [False, False, True, True]
    assert sorted(weights.tolist()) == [1, 1, 7, 7]
    rows, weights = choose(groups, correct, 100, 0)
    assert rows.tolist() == list(range(16))
    assert set(weights.tolist()) == {1}
