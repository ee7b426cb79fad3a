"""The sums' verifier, which breaks in a training's reward worker: from its call number ``at`` on, ``times`` times.

To be set as ``reward.custom_reward_function.path``, with ``reward_kwargs`` of ``fault``, ``at`` and ``times``.
"""

import itertools
import os
import time
from typing import Any

import ray

from gtpo_verl.tasks.sums import reward

_calls = itertools.count(1)


def compute_score(*args: Any, fault: str, at: int, times: int = 1, **kwargs: Any) -> Any:
    """As `gtpo_verl.tasks.sums.reward.compute_score`, but for the calls that break."""
    score = dict(reward.compute_score(*args, **kwargs))
    if not ray.is_initialized():  # the checks before the start
        return score
    number = next(_calls)
    if not at <= number < at + times:
        return score
    if fault == "hang":
        time.sleep(1e6)
    if fault == "die":
        os._exit(1)
    if fault == "raise":
        raise RuntimeError("the verifier breaks")
    if fault == "exit":
        raise SystemExit(3)
    if fault == "string":
        score["score"] = "good"
    if fault == "nothing":
        return None
    if fault == "is_nan":  # nan alone would be read as the number
        score["score"] = float("nan")
    if fault == "no_score":  # without acc alone, the score is the verdict
        del score["acc"], score["score"]
    return score
