"""Processes that start beside each other.

verl starts TransferQueue, then the actor's ranks, the reward workers, vLLM's servers, the load balancer and the agent
loops, and waits for each. Most of a start is the import of torch, transformers, verl and vLLM, 5 to 10 s of CPU time in
every process, and no process needs another one for that.
"""

import asyncio
import inspect
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import ray
import transfer_queue as tq
from omegaconf import DictConfig
from ray.exceptions import RayActorError
from verl.plugin.platform import get_platform
from verl.single_controller.ray import RayWorkerGroup
from verl.single_controller.ray import base as worker_groups
from verl.trainer.ppo.utils import need_teacher_policy
from verl.trainer.ppo.v1 import trainer_base
from verl.workers.rollout import router
from verl.workers.rollout.llm_server import LLMServerManager
from verl.workers.rollout.replica import RolloutReplica, get_rollout_replica_class

from gtpo_verl.integrations.agent_loops import GroupAgentLoopManager
from gtpo_verl.integrations.beside import Beside, Here
from gtpo_verl.integrations.reward_loop import GroupRewardLoopManager
from gtpo_verl.integrations.standalone import guide_of
from gtpo_verl.integrations.streams import SeedingClient
from gtpo_verl.integrations.temporarily import temporarily


class Started:
    """The processes of a training that need no other one, started as soon as Ray is up.

    TransferQueue; reward workers, unless there is a reward model; with verl's synchronous trainer also the load
    balancer, servers and agent loops of the policy, unless the run names a router or a manager of agent loops of its
    own, or a teacher or a guide answers too: the clients of these are of servers that are not there yet.
    """

    def __init__(self, config: DictConfig) -> None:
        self._config = config
        self.rewards: GroupRewardLoopManager | None = None
        self.agent_loops: Any = None
        self._balancer: Any = None
        self._replicas: list[Any] = []  # vLLM's, whose class has the attribute `server_class`
        if not config.reward.reward_model.enable:
            self._start_workers(config)
        self._queue = Beside(self._start_queue)

    def _start_workers(self, config: DictConfig) -> None:
        rollout = config.actor_rollout_ref.rollout
        self.rewards = GroupRewardLoopManager(config=config)
        others = need_teacher_policy(config) or guide_of(config).served
        own = rollout.get("router_config_path") or rollout.agent.get("agent_loop_manager_class")
        if config.trainer.v1.trainer_mode == "sync" and not others and not own:
            self._balancer = _start_load_balancer(rollout)
            self._replicas = _start_replicas(config)

    def _start_queue(self) -> None:
        """TransferQueue, and the agent loops, which need it, where their servers are known.

        Not before the servers have imported vLLM: whose engines, started then, do so once more, and are waited for
        longest.
        """
        for replica in self._replicas:
            replica.server_class.wait_for_imports()
        tq.init(self._config.transfer_queue)
        if self.rewards is None or self._balancer is None:
            return
        self.agent_loops = GroupAgentLoopManager.create(
            config=self._config,
            llm_client=NamedServersClient(config=self._config, load_balancer_handle=self._balancer),
            teacher_client=None,
            reward_loop_worker_handles=self.rewards.reward_loop_worker_handles,
        )

    def wait_for_queue(self) -> None:
        """Return when TransferQueue is up and the agent loops have been created.

        Raises:
            BaseException: what their start raised.
        """
        self._queue.wait()

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """In the block, verl's trainer finds what has been started where it would start it."""
        with ExitStack() as stack:
            for name, made in self._instead().items():
                stack.enter_context(temporarily(trainer_base, name, made))
            if len(ray.nodes()) == 1:
                # verl asks a process on the node of the first rank, which starts for that alone
                ask: Any = worker_groups.get_master_addr_port
                stack.enter_context(temporarily(worker_groups, "get_master_addr_port", Here(ask._function)))
            yield

    def _instead(self) -> dict[str, Any]:
        """What takes the place of the classes in verl's trainer module, by name."""
        rewards = self.rewards
        if rewards is None:
            return {"RewardLoopManager": GroupRewardLoopManager}
        made: dict[str, Any] = {"RewardLoopManager": lambda **_: rewards}
        if self._balancer is not None:
            made["LLMServerManager"] = _servers_behind(self._balancer, self._replicas)
        if self._replicas and self._config.trainer.device == "cpu":
            made["RayWorkerGroup"] = _launching(self._replicas)
        return made


def _start_load_balancer(rollout: DictConfig) -> Any:
    """verl's load balancer without servers, which are added when they are up.

    Its class travels as code, and of the servers it gets names: its process imports neither verl nor vLLM, which a
    handle would, whose methods are annotated with their types. `NamedServersClient` makes handles of the names.
    """
    ray.cloudpickle.register_pickle_by_value(router)
    try:
        return router.get_router_handle(servers={}, full_determinism=rollout.get("full_determinism", False))
    finally:
        ray.cloudpickle.unregister_pickle_by_value(router)


def _servers_behind(balancer: Any, replicas: list[RolloutReplica]) -> type[LLMServerManager]:
    """verl's manager of vLLM servers, for a load balancer and replicas that there are already.

    Args:
        replicas: of `_start_replicas`; without any, verl makes them.
    """

    class ServersBehind(LLMServerManager):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            if replicas:
                made: Any = lambda replica_rank, **_: replicas[replica_rank]  # noqa: E731
                self.rollout_replica_class = made  # verl's base class leaves it as it is
            super().__init__(*args, **kwargs)

        async def _init_global_load_balancer(self) -> None:
            self.global_load_balancer = balancer
            names = [_server_name(replica) for replica in self.rollout_replicas]
            await balancer.add_servers.remote(dict(zip(self.server_addresses, names, strict=True)))

    return ServersBehind


def _launching(replicas: list[RolloutReplica]) -> type[RayWorkerGroup]:
    """verl's worker group, which starts the engines of ``replicas`` before its ranks load the model.

    Not on a GPU, where an engine measures how much memory the ranks have left.
    """

    class LaunchingWorkerGroup(RayWorkerGroup):
        def spawn(self, prefix_set: Any) -> Any:
            groups = super().spawn(prefix_set)
            for role, group in groups.items():
                if role.startswith("actor"):
                    for replica in replicas:
                        _launch(replica, group)
            return groups

    return LaunchingWorkerGroup


def _launch(replica: Any, group: RayWorkerGroup) -> None:
    """Start a replica's engine in a thread; returns when the ranks have told it where they are.

    They answer no question while they load the model.
    """
    asked: threading.Event = replica.server_class.asked
    init_hybrid = replica.init_hybrid

    async def launch() -> None:
        try:
            await init_hybrid(group)
        finally:
            asked.set()  # where it has failed before it asked

    launched = Beside(asyncio.run, launch())
    replica.init_hybrid = lambda group: asyncio.to_thread(launched.wait)
    asked.wait()


class NamedServersClient(SeedingClient):
    """The client of a load balancer that knows the servers by their names."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._handles: dict[str, Any] = {}

    async def _acquire_server(self, request_id: str, **extra: Any) -> tuple[str, Any]:
        name: Any
        server, name = await super()._acquire_server(request_id, **extra)
        if name not in self._handles:
            self._handles[name] = ray.get_actor(name)
        return server, self._handles[name]


def _server_name(replica: Any) -> str:
    """The name of the Ray actor that verl makes for the first, or only, node of a replica of the policy."""
    return f"{replica._get_server_name_prefix()}server_{replica.replica_rank}_0{replica.name_suffix}"


def _start_replicas(config: DictConfig) -> list[RolloutReplica]:
    """The replicas of the policy, whose servers' processes have been started; none where verl must place them.

    verl creates a server on the node of its replica's ranks, which are not there yet: on a cluster of one node there is
    only one place.
    """
    rollout = config.actor_rollout_ref.rollout
    if len(ray.nodes()) > 1 or rollout.name != "vllm" or rollout.disaggregation.enabled:
        return []
    size = rollout.tensor_model_parallel_size * rollout.data_parallel_size * rollout.pipeline_model_parallel_size
    replica_class = get_rollout_replica_class(rollout.name)
    replicas = [
        replica_class(
            replica_rank=rank,
            config=rollout,
            model_config=config.actor_rollout_ref.model,
            gpus_per_node=rollout.n_gpus_per_node,
        )
        for rank in range(config.trainer.nnodes * config.trainer.n_gpus_per_node // size)
    ]
    for replica in replicas:
        of_vllm: Any = replica
        of_vllm.server_class = StartedServer(replica)
    return replicas


class StartedServer:
    """Takes the place of a replica's Ray class of servers: the actor that it makes is there already.

    Args:
        replica: of one node.

    Attributes:
        asked: set when verl has asked for the server.
    """

    def __init__(self, replica: Any) -> None:
        self.asked = threading.Event()
        self._stock = replica.server_class
        self._options = {
            "name": _server_name(replica),
            "runtime_env": {
                "env_vars": dict.fromkeys(get_platform().ray_noset_envvars(), "1") | get_platform().rollout_env_vars()
            },
            "max_concurrency": replica.max_concurrency,
        }
        server_class: Any = ray.remote(_constructed_later(self._stock.__ray_actor_class__))
        self._actor: Any = server_class.options(**self._options).remote()

    def wait_for_imports(self) -> None:
        """Return when the actor's process has imported vLLM, or is gone, as where verl wants another server."""
        with suppress(RayActorError):  # whoever needs the server gets the reason
            ray.get(self._actor.__ray_ready__.remote())

    def options(self, **options: Any) -> Any:
        """Itself; an ordinary class where verl wants another server than was expected."""
        self.asked.set()
        wanted = {name: value for name, value in options.items() if name != "scheduling_strategy"}
        if wanted == self._options:
            return self
        ray.kill(self._actor)
        return self._stock.options(**options)

    def remote(self, **arguments: Any) -> Any:
        """The actor, constructed."""
        ray.get(self._actor.construct.remote(**arguments))
        return self._actor


def _constructed_later(stock: Any) -> type:
    """A class that forwards to one of ``stock``, which its method ``construct`` makes once the arguments are known.

    Not a subclass: whoever gets a handle by name loads the class of the actor, and with a subclass its module, in every
    agent loop the seconds that vLLM takes. Here that is code for a name or, where Ray sends it as code, for ``stock``,
    loaded by the actor alone.
    """
    pickled = ray.cloudpickle.dumps(stock)

    def load(self: Any) -> None:
        self.stock = ray.cloudpickle.loads(pickled)

    def construct(self: Any, **arguments: Any) -> None:
        self.server = self.stock(**arguments)

    methods = {
        name: _forwarding(name, asynchronous=inspect.iscoroutinefunction(method))
        for name, method in inspect.getmembers(stock, inspect.isfunction)
        if not name.startswith("__")
    }
    return type(stock.__name__, (), methods | {"__init__": load, "construct": construct})


def _forwarding(name: str, *, asynchronous: bool) -> Any:
    """The method ``name`` of a class that forwards to its attribute ``server``."""

    async def awaiting(self: Any, *args: Any, **kwargs: Any) -> Any:
        return await getattr(self.server, name)(*args, **kwargs)

    def calling(self: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.server, name)(*args, **kwargs)

    return awaiting if asynchronous else calling
