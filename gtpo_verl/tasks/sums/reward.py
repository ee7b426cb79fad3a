"""The task's verifier, in the form that verl calls: a response is right or wrong by its final answer alone.

verl loads it by ``reward.custom_reward_function.path=pkg://gtpo_verl.tasks.sums.reward`` and ``name=compute_score`` (or
``name=random_verdict`` for the control arm). The module imports nothing beyond the standard library.
"""

import hashlib
import re
from collections.abc import Mapping
from typing import Any, TypedDict

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
    data_source: str,
    solution_str: str,
    ground_truth: str,
    extra_info: Mapping[str, Any] | None = None,
    **_: Any,
) -> Verdict:
    """Score a response by its final answer: +1 where it equals ``ground_truth``, -1 where it differs or is missing."""
    pred = read_answer(solution_str)
    return _verdict(pred != "" and pred == ground_truth, pred)


def random_verdict(
    data_source: str,
    solution_str: str,
    ground_truth: str,
    extra_info: Mapping[str, Any] | None = None,
    *,
    seed: int = 0,
    probability: float = 0.45,
    **_: Any,
) -> Verdict:
    """Draw the verdict on a training response from a seeded hash of prompt and response: right with ``probability``.

    The control: its arm runs through the same code with a reward that says nothing about the answer. Rows of any split
    but ``train`` are scored as by ``compute_score``, so that validation measures what was learnt. ``extra_info`` must
    hold ``split`` and ``question``, as the task's files do; KeyError otherwise.
    """
    extra_info = extra_info or {}
    if extra_info["split"] != "train":
        return compute_score(data_source, solution_str, ground_truth)
    digest = hashlib.sha256(
        repr((seed, extra_info["question"], solution_str)).encode("utf-8", "surrogatepass")
    ).digest()
    uniform = int.from_bytes(digest[:8], "big") / 2**64
    return _verdict(uniform < probability, read_answer(solution_str))


def _verdict(right: bool, pred: str) -> Verdict:
    return {"score": 1.0 if right else -1.0, "acc": float(right), "pred": pred}
