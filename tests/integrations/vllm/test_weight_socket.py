"""Both ends of the socket by which weights reach vLLM bear the same name, which has this run's Ray in it."""

from types import SimpleNamespace

import pytest
import ray
from verl.workers.config import RolloutConfig
from verl.workers.rollout.base import get_rollout_class
from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension

from gtpo_verl.integrations.vllm import weight_socket
from gtpo_verl.integrations.vllm.wiring import OWN_SOCKET

WORKER = SimpleNamespace(local_rank=0, model_runner=SimpleNamespace(vllm_config=None))


@pytest.fixture
def session(monkeypatch):
    """Name Ray's session; the job is the first of it, as in every Ray that a run starts for itself."""

    def session(name):
        context = SimpleNamespace(get_job_id=lambda: "01000000", get_session_name=lambda: name)
        monkeypatch.setattr(ray, "get_runtime_context", lambda: context)

    for name, value in {"RANK": "0", "RAY_LOCAL_WORLD_SIZE": "1", "VERL_REPLICA_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("VERL_RAY_JOB_ID", "01000000")  # what verl's own server sets
    return session


def sender(custom):
    config = RolloutConfig(name="vllm", custom=custom)
    return get_rollout_class("vllm")(config=config, model_config=None, device_mesh=None, replica_rank=0).zmq_handle


def test_both_ends_have_the_name_of_the_run(session):
    handles = set()
    for name in ("session_2026-01-01_00-00-00_000000_1", "session_2026-01-01_00-00-00_000000_2"):
        session(name)
        weight_socket.name_for_workers()
        handle = sender({OWN_SOCKET: True, "mine": 1})
        assert handle == vLLMColocateWorkerExtension._get_zmq_handle(WORKER)
        assert len(handle.removeprefix("ipc://")) < 80  # a socket's path is at most 107
        handles.add(handle)
    assert len(handles) == 2


@pytest.mark.parametrize("custom", [None, {}, {"mine": 1}])
def test_without_rollout_entropies_it_is_verls_own(session, custom):
    session("session_2026-01-01_00-00-00_000000_1")
    assert sender(custom) == vLLMColocateWorkerExtension._get_zmq_handle(WORKER)
    assert sender(custom).endswith("zmq-01000000-replica-0-rank-0.sock")
