"""pass@k and the majority vote for k of a problem's n samples, computed exactly instead of by simulation."""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

MAX_VOTERS = 1000  # binomials must fit in float64: C(1000, 500) is 3e299


def pass_at_k(n: int, c: int, k: int) -> float:
    """Unbiased estimate of the probability that at least one of k samples is correct: 1 - C(n-c, k) / C(n, k).

    That is the share of the k-element subsets of the n samples of a problem, c of them correct, that contain a correct
    one. Drawing k samples with replacement, as verl's ``best@k`` does, is biased downwards. Returns the exact fraction,
    rounded once. Raises ValueError for k above n, for which no unbiased estimate exists, and other impossible numbers.
    Source: Chen et al. 2021 (arXiv 2107.03374), equation 1.
    """
    _check(n, c, k)
    draws = math.comb(n, k)
    return (draws - math.comb(n - c, k)) / draws  # Python rounds a quotient of integers correctly, at any size


def _check(n: int, c: int, k: int) -> None:
    if n < 1:
        raise ValueError(f"n={n}: a problem needs at least one sample")
    if not 0 <= c <= n:
        raise ValueError(f"c={c} correct of n={n} samples: c must be between 0 and n")
    if not 1 <= k <= n:
        raise ValueError(f"k={k} with n={n} samples: k must be between 1 and n, else no unbiased estimate exists")


def majority_at_k(answers: Sequence[str | None], correct: Sequence[bool], ks: Sequence[int]) -> list[float]:
    """Expected accuracy of the majority vote among k of a problem's samples, over all k-element subsets.

    The k samples are drawn without replacement, as for :func:`pass_at_k`. Answers vote as strings, unchanged; ties are
    broken uniformly at random. The accuracy of an answer is the mean over its samples (with a verifier that depends on
    the answer alone they agree). None and the empty string, an answer that could not be extracted, have no vote; a draw
    without any vote is wrong.

    answers, correct: of the n samples, at most 1000. ks: numbers of samples drawn, each between 1 and n. Raises
    ValueError for other numbers, and where lengths differ.
    """
    n = len(answers)
    if len(correct) != n:
        raise ValueError(f"{n} answers and {len(correct)} verdicts: each sample has one of each")
    if not 1 <= n <= MAX_VOTERS:
        raise ValueError(f"{n} samples: a vote is counted over 1 to {MAX_VOTERS}")
    for k in ks:
        _check(n, 0, k)
    groups: dict[str, list[bool]] = {}
    for answer, verdict in zip(answers, correct, strict=True):
        if answer:
            groups.setdefault(answer, []).append(bool(verdict))
    votes = sorted((len(verdicts), sum(verdicts) / len(verdicts)) for verdicts in groups.values())
    ways = _winning_ways(votes, n, max(ks))
    return [min(1.0, float(ways[k]) / math.comb(n, k)) for k in ks]


def _winning_ways(votes: Sequence[tuple[int, float]], n: int, largest: int) -> NDArray[np.float64]:
    """Number of ways to draw u of n samples, weighted by the accuracy of the vote among them; for u = 0 … ``largest``.

    ``votes``: samples and accuracy of each answer, ascending. The ways are counted by the winner's number of votes t:
    samples without an answer or with fewer than t alike are free; other answers give x < t votes, or x = t and tie.
    """
    total = np.zeros(largest + 1)
    silent = n - sum(count for count, _ in votes)
    for t in range(1, min(largest, votes[-1][0] if votes else 0) + 1):
        free = silent + sum(count for count, _ in votes if count < t)
        rivals = [(count, accuracy) for count, accuracy in votes if count >= t]
        ties = min(len(rivals), largest // t)
        # ways[s, u]: u samples drawn, s answers with t votes; right[s, u]: the same, weighted by the sum of accuracies
        ways, right = np.zeros((2, ties + 1, largest + 1))
        ways[0] = _binomials(free, largest)
        for count, accuracy in rivals:
            fewer = _binomials(count, t - 1)  # an answer has at least t samples here
            tied = math.comb(count, t)
            ways, right = (
                _times(ways, fewer) + tied * _joined(ways, t),
                _times(right, fewer) + tied * (_joined(right, t) + accuracy * _joined(ways, t)),
            )
        total += (right[1:] / np.arange(1, ties + 1)[:, None]).sum(axis=0)
    return total


def _binomials(count: int, highest: int) -> NDArray[np.float64]:
    """C(count, x) for x = 0 … ``highest``."""
    return np.array([float(math.comb(count, x)) for x in range(highest + 1)])


def _times(ways: NDArray[np.float64], more: NDArray[np.float64]) -> NDArray[np.float64]:
    """Product of each polynomial in the rows of ``ways`` with ``more``, truncated to the same degree."""
    return np.stack([np.convolve(row, more)[: ways.shape[1]] for row in ways])


def _joined(ways: NDArray[np.float64], votes: int) -> NDArray[np.float64]:
    """The ways with one more answer in the tie, which adds that many votes."""
    moved = np.zeros_like(ways)
    moved[1:, votes:] = ways[:-1, : ways.shape[1] - votes]
    return moved


def powers_of_two(n: int) -> list[int]:
    """1, 2, 4, … up to n, and n itself: the values of k that are reported for n samples."""
    return sorted({*(1 << i for i in range(n.bit_length())), n})
