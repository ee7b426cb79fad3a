"""Where responses are cut into steps, and which responses are audited."""

import itertools
from collections.abc import Sequence

import numpy as np

from gtpo_verl.audit.values import Bools, Ints
from gtpo_verl.runs.statistics import Floats

ENDS = (".", "!", "?", ";", "\n")  # a token that ends with one ends a line, a sentence or a clause


def cut_points(texts: Sequence[str], steps: int) -> Ints:
    """Cut a response of T tokens with these texts into M steps: (M + 1,) ascending positions from 0 to T.

    Each cut is the end of a line or sentence nearest to an even grid, at most half a step away from it, or the grid's
    own token where there is none. With fewer tokens than steps each is a step, and the last positions are all T.
    """
    length = len(texts)
    behind = [length] * max(0, steps - length)
    steps = min(steps, length)
    ends = [place for place, text in enumerate(texts[:-1], 1) if text.rstrip(" ").endswith(ENDS)]
    points = [0]
    for number in range(1, steps):
        even = length * number / steps
        low, high = points[-1] + 1, length - (steps - number)  # every later step keeps a token
        near = [place for place in ends if low <= place <= high and abs(place - even) <= length / steps / 2]
        place = min(near, key=lambda each: abs(each - even)) if near else round(even)
        points.append(min(max(place, low), high))
    return np.array([*points, length, *behind], dtype=np.int64)


def choose(groups: Sequence[str], correct: Bools, count: int, seed: int) -> tuple[Ints, Floats]:
    """Draw at most `count` responses to audit: equally many of each verdict and prompt, as far as there are.

    groups: (B,) the prompt of each response. correct: (B,) bool.
    Returns row numbers (N,), ascending, and weights (N,), the responses of prompt and verdict over those drawn.
    """
    rng = np.random.default_rng(seed)
    strata: dict[tuple[str, bool], list[int]] = {}
    for row, key in enumerate(zip(groups, correct.tolist(), strict=True)):
        strata.setdefault(key, []).append(row)
    shuffled = {key: rng.permutation(rows).tolist() for key, rows in strata.items()}
    drawn: dict[tuple[str, bool], list[int]] = {key: [] for key in shuffled}
    prompts = list(dict.fromkeys(prompt for prompt, _ in shuffled))
    left = min(count, sum(map(len, shuffled.values())))
    while left > 0:
        # The verdicts of a prompt one after the other, prompts in random order: a limit cuts whole prompts.
        for key in itertools.product([prompts[place] for place in rng.permutation(len(prompts))], (False, True)):
            if left > 0 and len(drawn.get(key, ())) < len(shuffled.get(key, ())):
                drawn[key].append(shuffled[key][len(drawn[key])])
                left -= 1
    weights = {row: len(shuffled[key]) / len(rows) for key, rows in drawn.items() for row in rows}
    rows = sorted(weights)
    return np.array(rows, dtype=np.int64), np.array([weights[row] for row in rows])
