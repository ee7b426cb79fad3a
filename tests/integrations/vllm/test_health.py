"""Which rollout servers count as dead, asked of real Ray actors."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from actor_death import await_death
from local_ray import start_ray
from ray.exceptions import ActorUnavailableError

from gtpo_verl.integrations.health import dead_servers

pytestmark = pytest.mark.slow


class Server:
    """As much of verl's server as is asked for."""

    def __init__(self, errored: bool | None) -> None:
        if errored is not None:  # only a replica's first node has an engine
            self.engine = SimpleNamespace(errored=errored)


def unavailable() -> None:
    raise ActorUnavailableError("the network is down", None)


def test_the_dead_are_told_from_the_unreachable() -> None:
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # Ray's workers cannot import the tests
    start_ray(num_cpus=1)
    try:
        actor = ray.remote(num_cpus=0)(Server)
        servers: list[Any] = [actor.remote(errored) for errored in (False, True, None, False)]
        ray.get([server.__ray_ready__.remote() for server in servers])
        ray.kill(servers[3])
        await_death(servers[3])
        task = ray.remote(num_cpus=0)(unavailable)
        servers.append(SimpleNamespace(__ray_call__=SimpleNamespace(remote=lambda function: task.remote())))
        assert dead_servers(servers) == [
            "server 1: its engine's process has ended",
            "server 3: its Ray actor has ended",
        ]
    finally:
        ray.shutdown()
