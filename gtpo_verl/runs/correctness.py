"""When a response is correct: the one definition that training, validation, `eval`, `verify` and reports share."""

import math
from collections.abc import Mapping
from typing import Any

from gtpo_verl.errors import UserError


def verdict(info: Mapping[str, Any], place: str) -> float:
    """The ``acc`` among what the reward function returned, else its ``score``; NaN, which is wrong, for None.

    ``info``: verl's ``reward_extra_info``: the dict that the function returned, or ``acc`` with the number. ``place``:
    the response, for messages. UserError: it has neither, or no number.
    """
    name = "acc" if "acc" in info else "score"
    if name not in info:
        raise UserError(
            f"the reward function returned no verdict {place}: it must return a dict with `acc` (1 for a correct "
            "answer, 0 for a wrong one) beside `score`; reward.custom_reward_function names the function."
        )
    acc = info[name]
    if acc is None:
        return math.nan
    try:
        return float(acc)
    except (TypeError, ValueError, OverflowError) as error:
        raise UserError(
            f"the reward function returned {name}={acc!r:.60} {place}: it must be a number, 1 for a correct answer and "
            "0 for a wrong one."
        ) from error


def score(info: Mapping[str, Any]) -> float | None:
    """The verifier's score, without the overlong penalty that verl's reward manager may add; None where there is none.

    ``info`` is verl's ``reward_extra_info``. Of a function that returned a number it has the number, the score, as
    ``acc``.
    """
    found = info.get("score", info.get("acc"))
    return None if found is None else float(found)


def is_correct(acc: float | None, threshold: float) -> bool:
    """Whether a response is correct: its ``acc`` is at least ``algorithm.correct_threshold``. None and NaN are not."""
    return acc is not None and acc >= threshold
