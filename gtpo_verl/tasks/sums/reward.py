"""The task's verifier, in the form that verl calls: a response is right or wrong by its final answer alone.

verl loads it by ``reward.custom_reward_function.path=pkg://gtpo_verl.tasks.sums.reward`` and ``name=compute_score`` (or
``name=random_verdict`` for the control arm).
"""

import re
from collections.abc import Mapping
from typing import Any, TypedDict

from gtpo_verl.tasks.control import control

NUMBER = re.compile(r"0|[1-9][0-9]{0,8}")


class Verdict(TypedDict):
    """DAPO's outcome reward (±1), the verdict (1.0 right, 0.0 wrong), and the extracted answer."""

    score: float
    acc: float
    pred: str


def read_answer(response: str) -> str:
    """Return the number after the last ``#``; the empty string where anything but a plain number follows it.

    A plain number has one to nine ASCII digits, no sign, no spaces and no leading zeros.
    """
    _, mark, text = response.rpartition("#")
    return text if mark and NUMBER.fullmatch(text) else ""


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Mapping[str, Any] | None = None, **_: Any
) -> Verdict:
    """Score a response by its final answer: +1 where it equals ``ground_truth``, -1 where it differs or is missing."""
    pred = read_answer(solution_str)
    right = pred != "" and pred == ground_truth
    return {"score": 1.0 if right else -1.0, "acc": float(right), "pred": pred}


random_verdict = control(compute_score, probability=0.45)
