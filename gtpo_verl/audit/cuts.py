"""Where responses are cut into steps, and which responses are audited."""

from collections.abc import Mapping, Sequence

import numpy as np

from gtpo_verl.audit.values import Bools, Ints
from gtpo_verl.runs.statistics import Floats

ENDS = (".", "!", "?", ";", "\n")  # a token that ends with one ends a line, a sentence or a clause


def cut_points(texts: Sequence[str], steps: int, allowed: Sequence[bool] | None = None) -> Ints:
    """Cut a response into steps: (M + 1,) ascending token positions from 0 to T.

    Each cut is the end of a line or sentence nearest to an even grid, at most half a step away from it, or the grid's
    own token where there is none.

    Args:
        texts: the text of each of the T tokens.
        steps: M, at most T.
        allowed: of each token, whether a cut before it is possible; None: everywhere. A cut that no allowed token is
        near
            stays on the grid.

    Raises:
        ValueError: there are fewer tokens than steps.
    """
    length = len(texts)
    if length < steps:
        raise ValueError(f"a response of {length} tokens has no {steps} steps")
    ends = [place + 1 for place, text in enumerate(texts) if text.rstrip(" ").endswith(ENDS)]
    ends = [place for place in ends if place < length and (allowed is None or allowed[place])]
    points = [0]
    for number in range(1, steps):
        even = length * number / steps
        low, high = points[-1] + 1, length - (steps - number)  # every later step keeps a token
        near = [place for place in ends if low <= place <= high and abs(place - even) <= length / steps / 2]
        place = min(near, key=lambda each: abs(each - even)) if near else round(even)
        points.append(min(max(place, low), high))
    return np.array([*points, length], dtype=np.int64)


def choose(groups: Sequence[str], correct: Bools, possible: Bools, count: int, seed: int) -> tuple[Ints, Floats]:
    """Draw responses to audit: equally many of each verdict and prompt, as far as there are.

    Args:
        groups: (B,) the prompt of each response.
        correct: (B,) bool.
        possible: (B,) bool, those that can be audited.
        count: how many in all, at most.
        seed: of the draw.

    Returns:
        (N,) row numbers, ascending; (N,) weights, the responses of prompt and verdict over those drawn.
    """
    rng = np.random.default_rng(seed)
    strata: dict[tuple[str, bool], list[int]] = {}
    for row in np.flatnonzero(possible):
        strata.setdefault((groups[row], bool(correct[row])), []).append(int(row))
    shuffled = {key: rng.permutation(rows).tolist() for key, rows in strata.items()}
    drawn: dict[tuple[str, bool], list[int]] = {key: [] for key in shuffled}
    left = count
    while left > 0 and any(len(drawn[key]) < len(shuffled[key]) for key in shuffled):
        for key in _order(shuffled, rng):
            if left > 0 and len(drawn[key]) < len(shuffled[key]):
                drawn[key].append(shuffled[key][len(drawn[key])])
                left -= 1
    weights = {row: len(shuffled[key]) / len(rows) for key, rows in drawn.items() for row in rows}
    rows = sorted(weights)
    return np.array(rows, dtype=np.int64), np.array([weights[row] for row in rows])


def _order(strata: Mapping[tuple[str, bool], object], rng: np.random.Generator) -> list[tuple[str, bool]]:
    """The two verdicts of a prompt one after the other, prompts in random order: a limit cuts whole prompts."""
    prompts = list(dict.fromkeys(name for name, _ in strata))
    return [
        (prompts[place], verdict)
        for place in rng.permutation(len(prompts))
        for verdict in (False, True)
        if (prompts[place], verdict) in strata
    ]
