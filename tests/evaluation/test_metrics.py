"""pass@k and the majority vote against closed forms and against enumeration of every draw."""

import math
from collections import Counter
from fractions import Fraction
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gtpo_verl.evaluation.metrics import majority_at_k, pass_at_k, powers_of_two


@pytest.mark.parametrize("n", range(1, 9))
def test_pass_at_k_is_the_share_of_draws_with_a_correct_sample(n: int) -> None:
    for c in range(n + 1):
        verdicts = [True] * c + [False] * (n - c)
        for k in range(1, n + 1):
            draws = [any(draw) for draw in combinations(verdicts, k)]
            assert pass_at_k(n, c, k) == sum(draws) / len(draws)


def test_pass_at_k_has_closed_forms_at_its_ends() -> None:
    assert pass_at_k(32, 5, 1) == 5 / 32
    assert pass_at_k(32, 0, 32) == 0.0
    assert pass_at_k(32, 1, 32) == 1.0
    assert pass_at_k(32, 1, 8) == 8 / 32  # one correct sample: the chance that it is drawn
    assert pass_at_k(32, 25, 8) == 1.0  # seven wrong samples cannot fill a draw of eight


def test_pass_at_k_stays_exact_where_floats_would_cancel_or_overflow() -> None:
    assert pass_at_k(10_000, 1, 3) == 3 / 10_000
    assert pass_at_k(10_000, 9_999, 1) == 0.9999
    exact = 1 - Fraction(math.comb(1_900, 1_000), math.comb(2_000, 1_000))
    assert pass_at_k(2_000, 100, 1_000) == float(exact)


@given(st.integers(1, 60), st.data())
def test_pass_at_k_grows_with_k_and_with_c(n: int, data: st.DataObject) -> None:
    c = data.draw(st.integers(0, n))
    by_k = [pass_at_k(n, c, k) for k in range(1, n + 1)]
    assert np.all(np.diff(by_k) >= 0)
    k = data.draw(st.integers(1, n))
    assert np.all(np.diff([pass_at_k(n, more, k) for more in range(n + 1)]) >= 0)
    assert by_k[0] == c / n


def test_pass_at_k_is_unbiased_where_drawing_with_replacement_is_not() -> None:
    """Averaged over c ~ Binomial(n, p) it is 1 - (1-p)^k, the truth; with replacement from the same samples it is
    not.
    """
    n, p, k = 8, 0.3, 4
    weights = [math.comb(n, c) * p**c * (1 - p) ** (n - c) for c in range(n + 1)]
    truth = 1 - (1 - p) ** k
    assert np.dot(weights, [pass_at_k(n, c, k) for c in range(n + 1)]) == pytest.approx(truth, abs=1e-14)
    replaced = [1 - (1 - c / n) ** k for c in range(n + 1)]
    assert np.dot(weights, replaced) < truth - 0.03


@pytest.mark.parametrize(
    ("n", "c", "k", "message"),
    [
        (0, 0, 1, "n=0: a problem needs at least one sample"),
        (4, 5, 1, "c=5 correct of n=4"),
        (4, -1, 1, "c=-1 correct of n=4"),
        (4, 1, 5, "k=5 with n=4 samples: k must be between 1 and n, else no unbiased estimate exists"),
        (4, 1, 0, "k=0 with n=4"),
    ],
)
def test_pass_at_k_says_what_is_wrong(n: int, c: int, k: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pass_at_k(n, c, k)


def enumerated_majority(answers: list[str | None], correct: list[bool], k: int) -> float:
    """The definition, draw by draw."""
    accuracy = {a: np.mean([v for b, v in zip(answers, correct, strict=True) if b == a]) for a in set(answers)}
    results = []
    for draw in combinations(answers, k):
        votes = Counter(answer for answer in draw if answer)
        winners = [answer for answer, count in votes.items() if count == max(votes.values())]
        results.append(np.mean([accuracy[answer] for answer in winners]) if winners else 0.0)
    return float(np.mean(results))


@given(
    st.lists(
        st.tuples(st.sampled_from(["7", "8", "9", "10", None, ""]), st.booleans()),
        min_size=1,
        max_size=8,
    )
)
def test_majority_is_that_of_every_draw(samples: list[tuple[str | None, bool]]) -> None:
    answers, correct = [a for a, _ in samples], [v for _, v in samples]
    ks = list(range(1, len(samples) + 1))
    expected = [enumerated_majority(answers, correct, k) for k in ks]
    assert majority_at_k(answers, correct, ks) == pytest.approx(expected, abs=1e-12)


def test_majority_by_hand() -> None:
    # of the three pairs: 7,7 is right, 7,8 twice is a tie
    assert majority_at_k(["7", "7", "8"], [True, True, False], [1, 2, 3]) == pytest.approx([2 / 3, 2 / 3, 1.0])
    # a sample without an answer has no vote, but takes a place in the draw
    assert majority_at_k(["7", None], [True, False], [1, 2]) == [0.5, 1.0]
    assert majority_at_k([None, ""], [True, True], [1, 2]) == [0.0, 0.0]


def test_majority_of_many_samples_is_finite_and_right() -> None:
    answers = [str(i % 3) for i in range(999)]
    verdicts = [answer == "1" for answer in answers]
    assert majority_at_k(answers, verdicts, [1, 2, 16]) == pytest.approx([1 / 3] * 3, rel=1e-12)
    assert majority_at_k(answers[:150], verdicts[:150], [128, 150]) == pytest.approx([1 / 3] * 2, rel=1e-12)
    certain = majority_at_k(["7"] * 600 + ["8"] * 400, [True] * 600 + [False] * 400, [1, 256])
    assert certain[0] == 0.6
    assert 0.999 < certain[1] <= 1


@pytest.mark.parametrize(
    ("answers", "correct", "ks", "message"),
    [
        (["1"], [True, False], [1], "1 answers and 2 verdicts"),
        ([], [], [1], "0 samples"),
        (["1"] * 1001, [True] * 1001, [1], "1001 samples"),
        (["1"], [True], [2], "k=2 with n=1"),
    ],
)
def test_majority_says_what_is_wrong(answers: list[str], correct: list[bool], ks: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        majority_at_k(answers, correct, ks)


def test_the_reported_ks() -> None:
    assert [powers_of_two(n) for n in (1, 2, 3, 8, 32)] == [
        [1],
        [1, 2],
        [1, 2, 3],
        [1, 2, 4, 8],
        [1, 2, 4, 8, 16, 32],
    ]
