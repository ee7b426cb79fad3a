"""The turnstile that jobs of one Ray cluster start through, one at a time: an actor whose name exists once.

Nothing of verl is imported: the actor starts in a second.
"""

import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import ray
from ray.exceptions import RayActorError

from gtpo_verl.errors import UserError

NAMESPACE, NAME = "gtpo_verl", "turnstile"
POLL = 1.0  # seconds
_held: dict[str, Any] = {}  # Ray ends an actor whose first handle is gone


class Turnstile:
    """The actor that a job holds from its admission until it has its placement groups; gone with the job."""

    def __init__(self, job: str) -> None:
        self.job = job
        self.waiting = False

    def wait(self) -> None:
        """The job that holds it waits for devices."""
        self.waiting = True

    def is_waiting(self) -> bool:
        return self.waiting

    def holder(self) -> str:
        return self.job


def enter(wait: bool, say: Callable[[str], object], stopped: Callable[[], bool]) -> Any:
    """Take the turnstile, after the job that holds it; returns the actor. Arguments as of `admission.admit`.

    Raises UserError: the holder waits for devices, and ``wait`` is off. Raises KeyboardInterrupt: ``stopped`` while it
    waited.
    """
    announced = False
    while True:
        try:
            actor = ray.remote(num_cpus=0)(Turnstile).options(name=NAME, namespace=NAMESPACE)
            _held["turnstile"] = actor.remote(ray.get_runtime_context().get_job_id())
            return _held["turnstile"]
        except ValueError:  # the name is taken
            pass
        waits = False
        with suppress(ValueError, RayActorError):  # it has just left
            waits = bool(ray.get(ray.get_actor(NAME, namespace=NAMESPACE).is_waiting.remote()))
        if waits and not wait:
            raise UserError(
                "no room for this run: another one waits for devices of this cluster. --wait queues this run behind it."
            )
        if not announced:
            say("Waiting for another run, which is just starting or waits for devices.")
        announced = True
        if stopped():
            raise KeyboardInterrupt
        time.sleep(POLL)


def leave() -> None:
    """Let the next job start, if this one holds the turnstile."""
    with suppress(ValueError, RayActorError):  # it is gone
        turnstile = ray.get_actor(NAME, namespace=NAMESPACE)
        if ray.get(turnstile.holder.remote()) == ray.get_runtime_context().get_job_id():
            ray.kill(turnstile)
