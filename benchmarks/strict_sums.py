"""A verifier of the embedded sums by every step that is written: two errors do not make a correct answer."""

import random
from collections.abc import Mapping
from typing import Any

from gtpo_verl.tasks.sums.demonstrations import demonstration
from gtpo_verl.tasks.sums.reward import Verdict, read_answer


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Mapping[str, Any], **_: Any
) -> Verdict:
    """Score a response, as verl calls it: +1 where it is the worked solution of ``extra_info["question"]``, else -1."""
    problem = tuple(map(int, extra_info["question"].split("+")))
    right = solution_str == demonstration(problem, 0.0, random.Random())
    return {"score": 1.0 if right else -1.0, "acc": float(right), "pred": read_answer(solution_str)}
