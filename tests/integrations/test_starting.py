"""Processes of a training that start beside each other, on a real Ray."""

import asyncio
import os
import sys
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from omegaconf import OmegaConf
from verl.single_controller.ray import base as worker_groups
from verl.trainer.ppo.v1 import trainer_base

from gtpo_verl.config import compose_config
from gtpo_verl.integrations.beside import Beside
from gtpo_verl.integrations.reward_loop import GroupRewardLoopManager
from gtpo_verl.integrations.starting import (
    NamedServersClient,
    Started,
    StartedServer,
    _launch,
    _launching,
    _servers_behind,
    _start_load_balancer,
)
from gtpo_verl.integrations.task_runner import TaskRunner, TaskRunnerClass
from gtpo_verl.integrations.vllm.server import EntropyVLLMHttpServer

pytestmark = pytest.mark.slow


def server_class() -> Any:
    """Stands in for vLLM's server, whose process takes half a minute. Ray sends a local class as code."""

    class Server:
        def __init__(self, config: Any, cuda_visible_devices: str) -> None:
            if config is None:
                raise ValueError("no config")
            self.arguments = config, cuda_visible_devices

        def get_arguments(self) -> Any:
            return self.arguments

        async def get_first(self, *, added: int = 0) -> Any:
            return self.arguments[0] + added

    return ray.remote(Server)


def replica(rank: int = 0) -> Any:
    return SimpleNamespace(
        server_class=server_class(),
        replica_rank=rank,
        name_suffix="",
        max_concurrency=7,
        _get_server_name_prefix=lambda: "vllm_",
    )


@pytest.fixture
def balancer(queue: None) -> Any:
    handle = _start_load_balancer(compose_config(["algo=dapo"]).actor_rollout_ref.rollout)
    yield handle
    ray.kill(handle)


def test_what_runs_beside_raises_where_it_is_waited_for() -> None:
    seen: list[Any] = []
    beside = Beside(lambda value: seen.append((value, threading.current_thread() is threading.main_thread())), 3)
    beside.wait()
    assert seen == [(3, False)]
    failing = Beside(int, "three")
    for _ in range(2):
        with pytest.raises(ValueError, match="three"):
            failing.wait()


@pytest.mark.parametrize("here", [True, False])
def test_a_job_runs_in_this_process_or_in_an_actor(queue: None, monkeypatch: pytest.MonkeyPatch, here: bool) -> None:
    """In both it has a configuration of its own, and what it raises ends the wait for it."""
    before = os.getpid()

    def run(self: TaskRunner, config: Any) -> None:
        config.seen = os.getpid() == before
        if config.fails:
            raise ValueError(f"in this process: {config.seen}")

    monkeypatch.setattr(TaskRunner, "run", run)
    ray.cloudpickle.register_pickle_by_value(sys.modules[TaskRunner.__module__])
    called: list[int] = []
    config = OmegaConf.create({"fails": False, "seen": None})
    try:
        runner = TaskRunnerClass(lambda: called.append(1), here=here).remote()
        assert ray.get(runner.run.remote(config)) is None
        config.fails = True
        with pytest.raises(ValueError, match=f"in this process: {here}"):
            ray.get(runner.run.remote(config))
    finally:
        ray.cloudpickle.unregister_pickle_by_value(sys.modules[TaskRunner.__module__])
    assert called == [1]
    assert config.seen is None


def test_the_load_balancer_imports_neither_verl_nor_torch(balancer: Any) -> None:
    """Each costs its process seconds of CPU time."""

    def imported(self: Any) -> list[str]:
        import sys

        return [name for name in ("verl", "torch", "vllm", "gtpo_verl") if name in sys.modules]

    ray.get(balancer.add_servers.remote({"127.0.0.1:1": "vllm_server_0_0"}))
    assert ray.get(balancer.acquire_server.remote("a request")) == ("127.0.0.1:1", "vllm_server_0_0")
    assert ray.get(balancer.__ray_call__.remote(imported)) == []


def test_clients_get_servers_that_start_after_them(balancer: Any) -> None:
    """Routing is verl's: the fewest requests in flight, and the same server for the same request."""
    client = NamedServersClient(config=compose_config(["algo=dapo"]), load_balancer_handle=balancer)
    servers = [StartedServer(replica(rank)) for rank in range(2)]
    made = [
        one.options(**one._options).remote(config=rank, cuda_visible_devices="") for rank, one in enumerate(servers)
    ]
    manager = object.__new__(_servers_behind(balancer, []))
    manager.rollout_replicas, manager.server_addresses = [replica(0), replica(1)], ["a:1", "b:2"]
    asyncio.run(manager._init_global_load_balancer())
    assert manager.global_load_balancer is balancer

    async def acquire() -> list[tuple[str, Any]]:
        return [await client._acquire_server(request) for request in ("one", "two", "one")]

    acquired = asyncio.run(acquire())
    assert sorted(address for address, _ in acquired[:2]) == ["a:1", "b:2"]
    assert acquired[2] == acquired[0]
    for address, handle in acquired:
        assert ray.get(handle.get_arguments.remote())[0] == ["a:1", "b:2"].index(address)
    for actor in made:
        ray.kill(actor)


def test_a_started_server_is_constructed_when_its_arguments_are_known(queue: None) -> None:
    server = StartedServer(replica())
    server.wait_for_imports()
    with pytest.raises(ValueError, match="no config"):
        server.options(**server._options).remote(config=None, cuda_visible_devices="0")
    actor = server.options(scheduling_strategy="DEFAULT", **server._options).remote(config=1, cuda_visible_devices="0")
    assert ray.get(actor.get_arguments.remote()) == (1, "0")
    assert ray.get(ray.get_actor("vllm_server_0_0").get_arguments.remote()) == (1, "0")
    assert ray.get(actor.get_first.remote(added=2)) == 3
    ray.kill(actor)


def test_a_client_of_a_started_server_does_not_import_vllm(queue: None) -> None:
    """Ray loads the class of an actor where it is found by name: vLLM is 5 s of CPU time in every agent loop."""

    def found() -> tuple[bool, bool]:
        before = "vllm" in sys.modules
        ray.get_actor("vllm_server_3_0")
        return before, "vllm" in sys.modules

    stock = replica(3)
    stock.server_class = ray.remote(EntropyVLLMHttpServer)
    server = StartedServer(stock)
    assert ray.get(ray.remote(found).remote()) == (False, False)
    ray.kill(server._actor)


def test_another_server_than_was_expected_is_made_by_verl(queue: None) -> None:
    server = StartedServer(replica())
    actor = server.options(name="another", max_concurrency=3).remote(config=1, cuda_visible_devices="0")
    assert ray.get(actor.get_arguments.remote()) == (1, "0")
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(server._actor.get_arguments.remote(), timeout=30)
    server.wait_for_imports()  # of the one that is gone: the queue starts all the same
    ray.kill(actor)


@pytest.mark.parametrize(
    ("override", "names"),
    [
        ("reward.reward_model.enable=true", ["RewardLoopManager"]),
        ("trainer.v1.trainer_mode=separate_async", ["RewardLoopManager"]),
        ("+actor_rollout_ref.rollout.agent.agent_loop_manager_class=mine.Manager", ["RewardLoopManager"]),
        ("actor_rollout_ref.rollout.router_config_path=mine.yaml", ["RewardLoopManager"]),
        ("trainer.device=cuda", ["RewardLoopManager", "LLMServerManager"]),
        ("trainer.device=cpu", ["RewardLoopManager", "LLMServerManager", "RayWorkerGroup"]),
    ],
)
def test_what_is_started_early(queue: None, monkeypatch: pytest.MonkeyPatch, override: str, names: list[str]) -> None:
    """Nothing whose servers or arguments verl, or the user, knows only later."""
    from gtpo_verl.integrations import starting

    rewards = SimpleNamespace(reward_loop_worker_handles=[])
    monkeypatch.setattr(starting, "GroupRewardLoopManager", lambda config: rewards)
    monkeypatch.setattr(starting, "_start_load_balancer", lambda rollout: "balancer")
    happened: list[str] = []
    server = SimpleNamespace(wait_for_imports=lambda: happened.append("vLLM imported"))
    monkeypatch.setattr(starting, "_start_replicas", lambda config: [SimpleNamespace(server_class=server)])
    monkeypatch.setattr(starting.tq, "init", lambda config: happened.append("queue"))
    made: list[Any] = []
    monkeypatch.setattr(starting.GroupAgentLoopManager, "create", lambda **arguments: made.append(arguments) or "loops")
    started = Started(compose_config(["algo=dapo", override]))
    assert list(started._instead()) == names
    started.wait_for_queue()
    early = "LLMServerManager" in names
    assert (started.agent_loops, len(made)) == ("loops" if early else None, int(early))
    assert happened == (["vLLM imported", "queue"] if early else ["queue"])


def test_a_queue_that_does_not_start_ends_the_wait_for_it(queue: None, monkeypatch: pytest.MonkeyPatch) -> None:
    from gtpo_verl.integrations import starting

    monkeypatch.setattr(starting.tq, "init", lambda config: int("no queue"))
    started = Started(compose_config(["algo=dapo", "reward.reward_model.enable=true"]))
    with pytest.raises(ValueError, match="no queue"):
        started.wait_for_queue()


def launching(fails: str = "") -> tuple[Any, list[str]]:
    """A replica that asks for its server and then starts an engine, and what has happened."""
    happened: list[str] = []
    going_on = threading.Event()

    async def init_hybrid(group: Any) -> None:
        if fails == "asking":
            raise ValueError("no rank")
        await asyncio.sleep(0.1)
        happened.append(f"asked for {group}")
        made.server_class.asked.set()
        await asyncio.to_thread(going_on.wait, 10)
        happened.append("engine")
        if fails == "engine":
            raise ValueError("no engine")

    made: Any = SimpleNamespace(server_class=SimpleNamespace(asked=threading.Event()), init_hybrid=init_hybrid)
    made.go_on = going_on.set
    return made, happened


def test_an_engine_starts_beside_its_ranks_and_is_waited_for() -> None:
    made, happened = launching()
    _launch(made, "the ranks")  # type: ignore[arg-type]
    assert happened == ["asked for the ranks"]
    made.go_on()
    asyncio.run(made.init_hybrid("the ranks"))
    assert happened == ["asked for the ranks", "engine"]


@pytest.mark.parametrize(("fails", "error"), [("asking", "no rank"), ("engine", "no engine")])
def test_an_engine_that_does_not_start_ends_the_wait_for_it(fails: str, error: str) -> None:
    made, _ = launching(fails)
    _launch(made, "the ranks")  # type: ignore[arg-type]
    made.go_on()
    with pytest.raises(ValueError, match=error):
        asyncio.run(made.init_hybrid("the ranks"))


def test_only_the_actors_ranks_start_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    from gtpo_verl.integrations import starting

    calls: list[tuple[str, str]] = []
    groups = {"critic": "its ranks", "actor_rollout": "the ranks"}
    monkeypatch.setattr(starting.RayWorkerGroup, "spawn", lambda self, prefix_set: groups)
    monkeypatch.setattr(starting, "_launch", lambda replica, group: calls.append((replica, group)))
    of_verl = object.__new__(_launching(["a replica"]))  # type: ignore[list-item]
    assert of_verl.spawn(set(groups)) == groups
    assert calls == [("a replica", "the ranks")]


def test_verls_trainer_finds_what_has_started_and_no_process_is_asked_for_a_port(
    queue: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a process imports verl, and the actor's ranks wait for it."""
    started = Started(compose_config(["algo=dapo", "reward.reward_model.enable=true"]))
    stock = worker_groups.get_master_addr_port
    monkeypatch.setattr(ray.remote_function.RemoteFunction, "_remote", lambda *_, **__: pytest.fail("a task"))
    with started.in_place():
        assert trainer_base.RewardLoopManager is GroupRewardLoopManager
        ports = [2**15, 2**16]
        address, port = ray.get(worker_groups.get_master_addr_port.options(num_cpus=0).remote(master_port_range=ports))
    assert address == ray.util.get_node_ip_address()
    assert ports[0] <= int(port) < ports[1]
    assert worker_groups.get_master_addr_port is stock
    assert trainer_base.RewardLoopManager is not GroupRewardLoopManager


def test_with_a_reward_model_verl_makes_the_reward_workers() -> None:
    started = Started(compose_config(["algo=dapo", "reward.reward_model.enable=true"]))
    assert started._instead() == {"RewardLoopManager": GroupRewardLoopManager}
