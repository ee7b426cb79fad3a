"""The control of every embedded task: a verdict on training responses that says nothing about the answer."""

import hashlib
from collections.abc import Mapping
from typing import Any


def draw(extra_info: Mapping[str, Any], response: str, *, seed: int, probability: float) -> bool | None:
    """Draw a verdict from a seeded hash of prompt and response: True with ``probability``; None where it is not drawn.

    An arm with it runs through the same code and should learn nothing. Rows of any split but ``train`` are to be scored
    truthfully, so that validation measures what was learnt. ``extra_info`` must hold ``split`` and ``question``, as the
    tasks' files do; KeyError otherwise.
    """
    if extra_info["split"] != "train":
        return None
    text = repr((seed, extra_info["question"], response))
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:8], "big") / 2**64 < probability
