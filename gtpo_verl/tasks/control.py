"""The control of every embedded task: a verdict on training responses that says nothing about the answer."""

import hashlib
from collections.abc import Callable, Mapping
from typing import Any

Verifier = Callable[..., Any]


def control(compute_score: Verifier, probability: float) -> Verifier:
    """The control of a task, in the form that verl calls: right at random on training rows, whatever the answer.

    An arm with it runs through the same code and should learn nothing. Rows of any split but ``train`` are scored
    truthfully, by the task's ``compute_score``. ``probability``: of a right verdict, unless the run sets another one in
    ``reward_kwargs``, as it may set ``seed``.
    """
    default = probability

    def random_verdict(
        data_source: str,
        solution_str: str,
        ground_truth: str,
        extra_info: Mapping[str, Any],
        *,
        seed: int = 0,
        probability: float = default,
        **_: Any,
    ) -> dict[str, Any]:
        verdict = dict(compute_score(data_source, solution_str, ground_truth))
        if extra_info["split"] != "train":
            return verdict
        key = repr((seed, extra_info["question"], solution_str))
        digest = hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()
        right = int.from_bytes(digest[:8], "big") / 2**64 < probability
        return verdict | {"score": 1.0 if right else -1.0, "acc": float(right)}

    return random_verdict
