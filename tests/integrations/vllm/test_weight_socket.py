"""Both ends of the socket by which weights reach vLLM bear the same name, which is another for each run."""

import asyncio
from types import SimpleNamespace

import pytest
import ray
from verl.workers.config import RolloutConfig
from verl.workers.rollout.vllm_rollout.vllm_rollout import ServerAdapter

from gtpo_verl.errors import UserError
from gtpo_verl.integrations.vllm import OWN_SOCKET
from gtpo_verl.integrations.vllm.weight_socket import NamedSocketAdapter, with_port
from gtpo_verl.integrations.vllm.worker_extension import PolicyWorkerExtension


class Worker(PolicyWorkerExtension):
    """What vLLM's worker has of the extension."""

    local_rank = 0
    model_runner = SimpleNamespace(vllm_config=None)

    def __new__(cls):
        return object.__new__(cls)


@pytest.fixture
def connect(monkeypatch):
    """A sender of weights and the worker that its server would reach; Ray's job is the first, as in every Ray of one's
    own.
    """
    context = SimpleNamespace(get_job_id=lambda: "01000000", gcs_address="127.0.0.1:6379")
    monkeypatch.setattr(ray, "get_runtime_context", lambda: context)
    for name, value in {"RANK": "0", "RAY_LOCAL_WORLD_SIZE": "1", "VERL_REPLICA_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("VERL_RAY_JOB_ID", "01000000")  # by verl's server
    updated = []

    async def update_weights(self, weights, **kwargs):
        updated.append((weights, kwargs, worker._get_zmq_handle()))

    async def collective_rpc(method, timeout, args, kwargs):
        getattr(worker, method)(*args, **(kwargs or {}))

    worker = Worker()
    monkeypatch.setattr(ServerAdapter, "update_weights", update_weights)

    def connect(custom):
        config = RolloutConfig(name="vllm", custom=custom)
        sender = NamedSocketAdapter(config=config, model_config=None, device_mesh=None, replica_rank=0)
        sender.server_handle = SimpleNamespace(collective_rpc=SimpleNamespace(remote=collective_rpc))
        asyncio.run(sender.update_weights("weights", global_steps=3))
        ((weights, kwargs, listening),) = updated
        updated.clear()
        assert (weights, kwargs) == ("weights", {"global_steps": 3})
        return sender.zmq_handle, listening

    return connect


def test_the_port_of_the_runs_ray_is_in_both_names_before_weights_are_sent(connect):
    named = connect({OWN_SOCKET: True, "mine": 1})
    assert named == ("ipc:///tmp/rl-colocate-zmq-01000000-6379-replica-0-rank-0.sock",) * 2


@pytest.mark.parametrize("custom", [None, {}, {"mine": 1}])
def test_with_workers_that_are_not_ours_both_are_verls(connect, custom):
    assert connect(custom) == ("ipc:///tmp/rl-colocate-zmq-01000000-replica-0-rank-0.sock",) * 2


def test_another_form_of_the_name_is_refused():
    with pytest.raises(UserError, match="ipc:///tmp/weights"):
        with_port("ipc:///tmp/weights", "6379")
