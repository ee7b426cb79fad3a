"""How several jobs share the devices of one Ray cluster: one starts at a time, and only when its devices are free.

verl waits for Ray's placement groups without a limit, and two jobs that start together find the same devices free. So
a job passes the turnstile, and keeps it until its placement groups are there.
"""

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import ray
from omegaconf import DictConfig
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from verl.plugin.platform import get_platform
from verl.single_controller.ray.base import ResourcePoolManager

from gtpo_verl.errors import UserError
from gtpo_verl.integrations.standalone import guide_servers
from gtpo_verl.integrations.turnstile import POLL, enter, leave

Bundle = dict[str, float]  # amounts by resource

MEMORY = "memory"  # Ray's name of it; in bytes
PATIENCE = 10.0  # seconds in which free devices are found free; resources of a job that has just ended come back late
PLACEMENT_TIMEOUT = 120.0  # seconds that a placement group of an admitted job may be pending
SERVER_CPUS = 2  # of each device of a standalone server, a literal in verl's replicas


class DevicesTakenError(UserError):
    """Another job was given the devices between this one's admission and its placement groups."""


# -------------------------------------------------------------------- what a job needs


def training_bundles(config: DictConfig) -> list[Bundle]:
    """What a training takes: a bundle for every node of every resource pool of verl's, and one for its own actors."""
    trainer, reward_model = config.trainer, config.reward.reward_model
    pools = [trainer]
    if reward_model.enable_resource_pool:
        pools.append(reward_model)
    distillation = config.get("distillation")
    if distillation and distillation.enabled:
        pools.append(distillation)
    bundles = [
        _bundle(pool.n_gpus_per_node, ResourcePoolManager.max_colocate_count)
        for pool in pools
        for _ in range(pool.nnodes)
    ]
    if trainer.v1.trainer_mode == "separate_async":
        bundles += _server_bundles(config)
    guide = guide_servers(config)
    if guide is not None:
        bundles += _server_bundles(guide)
    return [*bundles, *_actor_bundles(config, others=1)]  # the task runner


def serving_bundles(config: DictConfig) -> list[Bundle]:
    """What an evaluation takes: its servers and TransferQueue."""
    return [*_server_bundles(config), *_actor_bundles(config, others=0)]


def memory_bundles(needed: float, nodes: int) -> list[Bundle]:
    """``needed`` bytes, a share for every node: neither Ray nor verl counts what trainings without GPUs take, and Linux
    ends a process where several need more than there is.
    """
    return [{MEMORY: float(math.ceil(needed / nodes))} for _ in range(nodes)] if needed else []


def _server_bundles(config: DictConfig) -> list[Bundle]:
    """Those of standalone servers, a bundle for each node of each replica."""
    rollout = config.actor_rollout_ref.rollout
    devices = rollout.n_gpus_per_node * rollout.nnodes
    replica = rollout.tensor_model_parallel_size * rollout.data_parallel_size * rollout.pipeline_model_parallel_size
    each = min(replica, rollout.n_gpus_per_node)
    return [_bundle(each, SERVER_CPUS) for _ in range(devices // each)]


def _actor_bundles(config: DictConfig, others: int) -> list[Bundle]:
    """A CPU each for TransferQueue's controller and storage units, and for other actors."""
    units = config.transfer_queue.backend.SimpleStorage.num_data_storage_units
    return [{"CPU": 1.0} for _ in range(1 + units + others)]


def _bundle(devices: int, cpus: int) -> Bundle:
    return {device_resource(): float(devices), "CPU": float(devices * cpus)}


def device_resource() -> str:
    """Ray's name of this platform's devices."""
    return str(get_platform().ray_resource_name())


# -------------------------------------------------------------------- admission


def admit(
    bundles: Sequence[Bundle],
    *,
    wait: bool,
    say: Callable[[str], object],
    stopped: Callable[[], bool] = lambda: False,
) -> None:
    """Return when the cluster has room for these bundles, holding the turnstile until :func:`turnstile.leave`, and
    those of memory until the job ends.

    wait: for other jobs to end. say: takes a line when there is something to wait for. stopped: whether the job was
    asked to stop, which ends the waiting.

    Raises UserError: there is no room, and ``wait`` is off. Raises KeyboardInterrupt: ``stopped`` while it waited.
    """
    try:
        check_size(bundles)
    except UserError as error:
        if not wait:
            raise
        say(f"Waiting for more nodes: {error}")
    turnstile = enter(wait, say, stopped)
    with _queued(bundles) as probe:
        if not probe.wait(PATIENCE):
            if not wait:
                ray.kill(turnstile)
                raise UserError(
                    f"no room for this run: {_shortage(bundles)}. --wait waits until there is; otherwise give it fewer "
                    "devices, or stop another job."
                )
            ray.get(turnstile.wait.remote())
            say(f"Waiting for devices: {_shortage(bundles)}.")
            while not probe.wait(POLL):
                if stopped():
                    ray.kill(turnstile)
                    raise KeyboardInterrupt
    memory = [bundle for bundle in bundles if MEMORY in bundle]
    if memory:
        placement_group(memory)  # Ray removes it when the job ends


def check_size(bundles: Sequence[Bundle]) -> None:
    """Raise UserError where the cluster could not hold these bundles even if nothing else ran on it."""
    device = device_resource()
    nodes = [Counter(node["Resources"]) for node in ray.nodes() if node["Alive"]]
    largest = [f"{node[device]:.0f}" for node in nodes]
    for bundle in sorted(bundles, key=lambda bundle: bundle.get(device, 0), reverse=True):
        place = next((node for node in nodes if all(node[name] >= bundle[name] for name in bundle)), None)
        if place is None:
            remedy = f"{', '.join(largest)} {device}s. Set trainer.nnodes and trainer.n_gpus_per_node, or add nodes."
            if MEMORY in bundle:
                free = ", ".join(f"{node[MEMORY] / 2**30:.0f}" for node in nodes)
                remedy = f"{free} GiB. Add nodes, or say with `ray start --memory` that one has more."
            raise UserError(
                f"the cluster is too small for this run, even idle: {_shortage(bundles)}; its nodes have {remedy}"
            )
        place.subtract(bundle)


def check_room(bundles: Sequence[Bundle]) -> None:
    """Raise UserError where a Ray of this job's own has not what the job needs."""
    with _queued(bundles) as probe:
        if not probe.wait(PATIENCE):
            raise UserError(
                f"no room for this run: {_shortage(bundles)}. Set trainer.nnodes and trainer.n_gpus_per_node to what "
                "there is, of which the replicas of algorithm.guide.source=server take theirs besides; every unit of "
                "transfer_queue.backend.SimpleStorage.num_data_storage_units takes a CPU too."
            )


@contextmanager
def _queued(bundles: Sequence[Bundle]) -> Iterator[PlacementGroup]:
    """The bundles in Ray's own queue: all of them are placed, or none."""
    probe = placement_group(list(bundles), strategy="PACK")
    try:
        yield probe
    finally:
        remove_placement_group(probe)


def _shortage(bundles: Sequence[Bundle]) -> str:
    """What is needed and what is there, in words."""
    free, total = ray.available_resources(), ray.cluster_resources()
    device = device_resource()
    parts = [
        f"{sum(bundle.get(name, 0) for bundle in bundles):.0f} {name}s ({free.get(name, 0):.0f} of "
        f"{total.get(name, 0):.0f} in the cluster are free)"
        for name in (device, "CPU")
    ]
    memory = sum(bundle.get(MEMORY, 0) for bundle in bundles)
    if memory:
        sizes = (f"{size / 2**30:.0f}" for size in (memory, free.get(MEMORY, 0), total.get(MEMORY, 0)))
        parts.append("{} GiB of memory ({} of {} are free)".format(*sizes))
    most = max(bundle.get(device, 0) for bundle in bundles)
    return f"it needs {', '.join(parts[:-1])} and {parts[-1]}, {most:.0f} {device}s of them on one node"


# -------------------------------------------------------------------- placement


class Placement:
    """Follows the placement groups of a job that was admitted with these bundles, in a process of the job."""

    def __init__(self, bundles: Sequence[Bundle]) -> None:
        self._device = device_resource()
        self._needed = sum(bundle.get(self._device, 0) for bundle in bundles)
        self._pending_since: float | None = None
        self._complete = False

    def check(self) -> None:
        """Leave the turnstile when all placement groups are there; DevicesTakenError where one is pending too long."""
        if self._complete:
            return
        job = ray.get_runtime_context().get_job_id()  # the end of the ids of its groups
        groups = [group for name, group in placement_group_table().items() if name.endswith(job)]
        created = [group["bundles"].values() for group in groups if group["state"] == "CREATED"]
        placed = sum(float(bundle.get(self._device, 0)) for bundles in created for bundle in bundles)
        if placed >= self._needed:
            self._complete = True
            leave()
            return
        if not any(group["state"] in ("PENDING", "PREPARED") for group in groups):
            self._pending_since = None
            return
        now = time.monotonic()
        self._pending_since = self._pending_since or now
        if now - self._pending_since > PLACEMENT_TIMEOUT:
            raise DevicesTakenError(
                f"another job took devices of this run while it was starting: {placed:.0f} of {self._needed:.0f} "
                f"{self._device}s were placed within {PLACEMENT_TIMEOUT:.0f} s. Start it again, with --wait to wait "
                "until there is room."
            )
