"""Checks whether the engines behind verl's rollout servers are alive.

verl treats a request that failed because its engine died like any failed request, and submits another one; in the
asynchronous trainers without end.
"""

from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, OutOfMemoryError, RayActorError

ANSWER_TIMEOUT = 10.0  # seconds


def dead_servers(servers: Sequence[Any]) -> list[str]:
    """Ask rollout servers (Ray actors of ``vLLMHttpServer``) for their engines; returns a reason per dead one."""
    asked = [server.__ray_call__.remote(_engine_is_dead) for server in servers]
    # A server that is too busy to answer is not dead.
    answered, _ = ray.wait(asked, num_returns=len(asked), timeout=ANSWER_TIMEOUT) if asked else ([], [])
    found = []
    for number, answer in enumerate(asked):
        if answer not in answered:
            continue
        try:
            dead = "its engine's process has ended" if ray.get(answer) else None
        except ActorUnavailableError:  # a network fault, or a node that Ray has not given up yet
            dead = None
        except RayActorError:
            dead = "its Ray actor has ended"
        except OutOfMemoryError:
            dead = "Ray ended it because the machine's memory ran out"
        if dead:
            found.append(f"server {number}: {dead}")
    return found


def _engine_is_dead(server: Any) -> bool:
    engine = getattr(server, "engine", None)  # only a replica's first node has one
    return engine is not None and bool(engine.errored)
