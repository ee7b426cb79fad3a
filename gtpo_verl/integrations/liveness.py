"""Whether Ray actors are alive, from the answers to what they were asked."""

from collections.abc import Mapping
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, OutOfMemoryError, RayActorError

ANSWER_TIMEOUT = 10.0  # seconds


def ended_actors(asked: Mapping[str, Any]) -> dict[str, str]:
    """Which actors have ended, and why.

    Args:
        asked: by name of an actor, the reference to its answer; a string is a reason to take it for ended. An actor
            that is too busy to answer has not ended.

    Returns:
        A reason for each actor that has ended, by name.
    """
    answers = list(asked.values())
    answered, _ = ray.wait(answers, num_returns=len(answers), timeout=ANSWER_TIMEOUT) if answers else ([], [])
    found = {}
    for name, answer in asked.items():
        if answer not in answered:
            continue
        try:
            why = ray.get(answer)
        except ActorUnavailableError:  # a network fault, or a node that Ray has not given up yet
            continue
        except RayActorError as error:
            if "creation task" in str(error):  # it never lived, and whoever made it gets the reason
                continue
            why = "its Ray actor has ended"
        except OutOfMemoryError:
            why = "Ray ended it because the machine's memory ran out"
        if isinstance(why, str):
            found[name] = why
    return found
