"""Jobs that share a Ray cluster: a TransferQueue for each, and devices for one after the other. Real Ray, two nodes."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import transfer_queue as tq
from actor_death import await_death
from omegaconf import OmegaConf
from ray.cluster_utils import Cluster
from ray.util.placement_group import placement_group, remove_placement_group
from waiting import wait_until

from gtpo_verl.errors import UserError
from gtpo_verl.integrations import admission, queue_namespace, turnstile

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive]  # and in a process of its own, see the Makefile

GPUS, MEMORY = 2, 8 * 2**30  # logical, on each of the two nodes
NODES = {"num_cpus": 8, "num_gpus": GPUS, "memory": MEMORY}
QUEUE = OmegaConf.create({"backend": {"SimpleStorage": {"num_data_storage_units": 1}}})
# A job of its own: makes a queue, puts a row into it, lists what it sees, closes.
OTHER_JOB = """
import sys
import ray, torch, transfer_queue as tq
from omegaconf import OmegaConf
from tensordict import TensorDict
from gtpo_verl.integrations import queue_namespace
queue_namespace.register()
ray.init(address=sys.argv[1], log_to_driver=False)
tq.init(OmegaConf.create({"backend": {"SimpleStorage": {"num_data_storage_units": 1}}}))
row = TensorDict({"x": torch.ones(1, 1)}, batch_size=1)
tq.kv_batch_put(keys=["theirs"], partition_id="train", fields=row, tags=[{"owner": "other"}])
print(sorted(tq.kv_list(partition_id="train")["train"]), queue_namespace.namespace())
tq.close()
"""
HELD = """
import sys, time
import ray
from gtpo_verl.integrations import admission
ray.init(address=sys.argv[1], log_to_driver=False)
admission.admit([{"CPU": 1.0}], wait=False, say=print)
print("held", flush=True)
time.sleep(600)
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """This process is a job of it, the first."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "disabled")
        cluster = Cluster(initialize_head=True, head_node_args=NODES)
        cluster.add_node(**NODES)
        ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # Ray's workers cannot import the tests
        ray.init(address=cluster.address, log_to_driver=False)
        queue_namespace.register()
        yield cluster
        ray.shutdown()
        cluster.shutdown()


def python(program: str, cluster: Cluster) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", program, cluster.address]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


# -------------------------------------------------------------------- TransferQueue


class Worker:
    """A worker of the job: attaches to its queue, and closes it."""

    def attach(self) -> list[str]:
        queue_namespace.register()
        tq.init()
        seen = sorted(tq.kv_list(partition_id="train")["train"])
        tq.close()
        return seen


@pytest.fixture
def queue(cluster: Cluster) -> Iterator[None]:
    tq.init(QUEUE)
    yield
    tq.close()


def put(key: str) -> None:
    tq.kv_put(key=key, partition_id="train", tag={"owner": "this"})


def test_another_job_has_a_queue_of_its_own_and_ends_no_other(cluster: Cluster, queue: None) -> None:
    put("ours")
    printed, errors = python(OTHER_JOB, cluster).communicate(timeout=120)
    assert printed.startswith("['theirs'] transfer_queue-"), errors
    assert queue_namespace.namespace() not in printed
    put("ours too")
    assert sorted(tq.kv_list(partition_id="train")["train"]) == ["ours", "ours too"]


def test_a_worker_that_closes_leaves_the_queue_of_its_job(cluster: Cluster, queue: None) -> None:
    put("ours")
    worker = ray.remote(num_cpus=0)(Worker).remote()
    assert ray.get(worker.attach.remote(), timeout=60) == ["ours"]
    queue_namespace.QueueWatch().check()
    put("ours too")


def test_its_creator_ends_it(cluster: Cluster) -> None:
    tq.init(QUEUE)
    controller = ray.get_actor("TransferQueueController", namespace=queue_namespace.namespace())
    tq.close()
    await_death(controller)


@pytest.mark.parametrize("part", ["TransferQueueController", "TransferQueueStorageUnit#0"])
def test_a_dead_part_of_the_queue_is_named(cluster: Cluster, queue: None, part: str) -> None:
    space = queue_namespace.namespace() if "Controller" in part else None
    actor = ray.get_actor(part, namespace=space)
    ray.kill(actor)
    await_death(actor)
    with pytest.raises(UserError, match=f"TransferQueue died \\({part}: its Ray actor has ended\\)"):
        queue_namespace.QueueWatch().check()


def test_a_queue_that_does_not_start_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = queue_namespace.QueueWatch()
    watch.check()
    monkeypatch.setattr(queue_namespace, "START_TIMEOUT", -1.0)
    with pytest.raises(UserError, match=r"did not start .*num_data_storage_units"):
        queue_namespace.QueueWatch().check()


# -------------------------------------------------------------------- devices

NODE = {"GPU": float(GPUS), "CPU": 2.0}


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "PATIENCE", 1.0)
    monkeypatch.setattr(turnstile, "POLL", 0.1)


@pytest.fixture
def lines() -> Iterator[list[str]]:
    yield []
    turnstile.leave()


def turnstile_is_free() -> bool:
    try:
        ray.get_actor(turnstile.NAME, namespace=turnstile.NAMESPACE)
    except ValueError:
        return True
    return False


@pytest.mark.usefixtures("cluster", "quick")
def test_a_job_that_fits_is_admitted_and_takes_nothing(lines: list[str]) -> None:
    admission.admit([NODE, NODE], wait=False, say=lines.append)
    assert lines == []
    wait_until(lambda: ray.available_resources().get("GPU") == 2 * GPUS)


@pytest.mark.usefixtures("cluster", "quick")
@pytest.mark.parametrize(
    ("bundles", "reason"),
    [
        ([NODE, NODE, NODE], r"it needs 6 GPUs \(4 of 4 in the cluster are free\) and 6 CPUs"),
        ([{"GPU": 4.0, "CPU": 4.0}], r"it needs 4 GPUs \(4 of 4 .* 4 GPUs of them on one node"),
        ([{"GPU": 1.0, "CPU": 9.0}], r"9 CPUs \(16 of 16"),
    ],
)
def test_a_job_that_the_cluster_could_never_hold_says_so(bundles: list[dict[str, float]], reason: str) -> None:
    with pytest.raises(UserError, match=reason) as refused:
        admission.admit(bundles, wait=False, say=print)
    assert "even idle" in str(refused.value)
    assert "its nodes have 2, 2 GPUs" in str(refused.value)
    assert "\n" not in str(refused.value)
    wait_until(turnstile_is_free)
    with pytest.raises(UserError, match=reason):
        admission.check_room(bundles)


@pytest.mark.usefixtures("cluster", "quick")
def test_memory_that_no_node_has_says_so() -> None:
    with pytest.raises(UserError, match=r"even idle: it needs .* and 9 GiB of memory .* its nodes have 8, 8 GiB\. Add"):
        admission.admit([NODE, {admission.MEMORY: 9.0 * 2**30}], wait=False, say=print)
    wait_until(turnstile_is_free)


@pytest.mark.usefixtures("cluster", "quick")
def test_a_job_without_room_says_what_it_needs() -> None:
    other = placement_group([NODE])
    ray.get(other.ready(), timeout=30)
    try:
        admission.check_size([NODE, NODE])
        with pytest.raises(UserError, match=r"it needs 4 GPUs \(2 of 4 in the cluster are free\)") as refused:
            admission.admit([NODE, NODE], wait=False, say=print)
    finally:
        remove_placement_group(other)
    assert "--wait" in str(refused.value)
    wait_until(turnstile_is_free)


@pytest.mark.usefixtures("cluster", "quick")
def test_a_job_that_waits_is_admitted_when_another_ends(lines: list[str]) -> None:
    other = placement_group([NODE])
    ray.get(other.ready(), timeout=30)

    def say(line: str) -> None:
        lines.append(line)
        remove_placement_group(other)

    admission.admit([NODE, NODE], wait=True, say=say)
    (line,) = lines
    assert line.startswith("Waiting for devices: it needs 4 GPUs (2 of 4 in the cluster are free)")


@pytest.mark.usefixtures("cluster", "quick")
def test_a_job_that_waits_ends_when_it_is_asked_to_stop(lines: list[str]) -> None:
    with pytest.raises(KeyboardInterrupt):
        admission.admit([NODE, NODE, NODE], wait=True, say=lines.append, stopped=lambda: bool(lines))
    assert lines[0].startswith("Waiting for more nodes: the cluster is too small")
    wait_until(turnstile_is_free)


@pytest.mark.usefixtures("quick")
def test_one_job_starts_at_a_time_and_one_that_was_killed_holds_nobody_up(cluster: Cluster, lines: list[str]) -> None:
    holder = python(HELD, cluster)
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"

    def say(line: str) -> None:
        lines.append(line)
        holder.kill()

    admission.admit([NODE], wait=False, say=say)
    assert lines == ["Waiting for another run, which is just starting or waits for devices."]
    holder.communicate()


@pytest.mark.usefixtures("quick")
def test_memory_of_a_job_is_kept_until_it_ends(cluster: Cluster, lines: list[str]) -> None:
    """With its devices free and the turnstile left, as while a training without GPUs is under way."""
    needed = [{"CPU": 1.0}, {admission.MEMORY: 6.0 * 2**30}, {admission.MEMORY: 6.0 * 2**30}]
    program = HELD.replace('[{"CPU": 1.0}]', repr(needed)).replace('print("held', 'admission.leave(); print("held')
    first = python(program, cluster)
    try:
        assert first.stdout is not None
        assert first.stdout.readline() == "held\n"
        wait_until(turnstile_is_free)
        with pytest.raises(UserError, match=r"and 12 GiB of memory \(4 of 16 are free\)"):
            admission.admit(needed, wait=False, say=print)
        admission.admit([NODE], wait=False, say=lines.append)  # asks for none, as on GPUs
        turnstile.leave()
    finally:
        first.kill()
        first.communicate()
    admission.admit(needed, wait=True, say=lines.append)


@pytest.mark.usefixtures("quick")
def test_a_job_does_not_overtake_one_that_waits(cluster: Cluster) -> None:
    program = HELD.replace('[{"CPU": 1.0}], wait=False', '[{"CPU": 99.0}], wait=True').replace(
        "say=print", "say=lambda line: print(line, flush=True)"
    )
    waiting = python(program, cluster)
    try:
        assert waiting.stdout is not None
        assert waiting.stdout.readline().startswith("Waiting for more nodes")
        assert waiting.stdout.readline().startswith("Waiting for devices")  # it has the turnstile now
        with pytest.raises(UserError, match="another one waits for devices"):
            admission.admit([NODE], wait=False, say=print)
    finally:
        waiting.kill()
        waiting.communicate()
    wait_until(turnstile_is_free)


@pytest.mark.usefixtures("cluster", "quick")
def test_the_next_job_may_start_when_the_placement_groups_are_there(lines: list[str]) -> None:
    admission.admit([NODE], wait=False, say=lines.append)
    placement = admission.Placement([NODE])
    placement.check()
    assert not turnstile_is_free()
    group = placement_group([{"GPU": 1.0, "CPU": 1.0}] * GPUS, strategy="STRICT_PACK")
    ray.get(group.ready(), timeout=30)
    placement.check()
    wait_until(turnstile_is_free)
    remove_placement_group(group)


@pytest.mark.usefixtures("cluster")
def test_a_placement_group_is_not_waited_for_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    placement = admission.Placement([NODE])
    group = placement_group([{"GPU": 9.0}])
    placement.check()
    monkeypatch.setattr(admission, "PLACEMENT_TIMEOUT", -1.0)
    with pytest.raises(admission.DevicesTakenError, match="0 of 2 GPUs were placed"):
        placement.check()
    remove_placement_group(group)


# -------------------------------------------------------------------- a Ray of one's own


def test_a_local_ray_leaves_no_token_in_the_home_directory(tmp_path: Path) -> None:
    program = """
from gtpo_verl.config import compose_config
from gtpo_verl.integrations.launch import export_environment
export_environment(compose_config(["hardware=cpu", "+ray_kwargs.ray_init.address=local"]))
import ray
ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False)
print(ray.get(ray.remote(lambda: 7).remote()))
"""
    environment: dict[str, Any] = {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH")}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environment | {"HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout == "7\n", done.stderr
    assert not (tmp_path / ".ray" / "auth_token").exists()
