"""The task's verifier, in the form that verl calls: a response is right if it is a legal play that ends at 0.

verl loads it by ``reward.custom_reward_function.path=pkg://gtpo_verl.tasks.countdown.reward`` and
``name=compute_score`` (or ``name=random_verdict`` for the control arm).
"""

from collections.abc import Mapping
from typing import Any, TypedDict

from gtpo_verl.tasks.control import control
from gtpo_verl.tasks.countdown.rules import final_total, read_problem


class Verdict(TypedDict):
    """score: DAPO's outcome reward, ±1. acc: 1.0 where the response is right. legal: 1.0 where it keeps the rules, so
    that a wrong one with 1.0 failed by its search and one with 0.0 by its knowledge of the rules. pred: a legal play,
    which is the answer of a vote; empty for an illegal one.
    """

    score: float
    acc: float
    legal: float
    pred: str


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Mapping[str, Any] | None = None, **_: Any
) -> Verdict:
    """Score a response to the problem ``ground_truth``, ``2,3,8,9:18``: +1 where it solves it, else -1."""
    total = final_total(read_problem(ground_truth), solution_str)
    right, legal = total == 0, total is not None
    return {
        "score": 1.0 if right else -1.0,
        "acc": float(right),
        "legal": float(legal),
        "pred": solution_str if legal else "",
    }


random_verdict = control(compute_score, probability=0.25)
