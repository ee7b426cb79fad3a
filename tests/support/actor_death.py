"""The end of a Ray actor, which does not come at once: one that is killed may still answer a call or two."""

import time
from typing import Any

import ray
from ray.exceptions import RayActorError


def await_death(actor: Any) -> None:
    """Return when Ray fails the calls of an actor that was told to end; one of a minute later is an error."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            ray.get(actor.__ray_ready__.remote(), timeout=60)
        except RayActorError:
            return
        time.sleep(0.05)
    raise AssertionError("the actor still answers")
