"""Checks whether the engines behind verl's rollout servers are alive.

verl treats a request that failed because its engine died like any failed request, and submits another one; in the
asynchronous trainers without end.
"""

from collections.abc import Sequence
from typing import Any

from gtpo_verl.integrations.liveness import ended_actors


def dead_servers(servers: Sequence[Any]) -> list[str]:
    """Ask rollout servers (Ray actors of ``vLLMHttpServer``) for their engines; returns a reason per dead one."""
    asked = {f"server {number}": server.__ray_call__.remote(_engine_end) for number, server in enumerate(servers)}
    return [f"{name}: {why}" for name, why in ended_actors(asked).items()]


def _engine_end(server: Any) -> str | None:
    engine = getattr(server, "engine", None)  # only a replica's first node has one
    return "its engine's process has ended" if engine is not None and engine.errored else None
