"""A socket for each run, by which the policy's weights reach vLLM.

verl names it after Ray's job number. Jobs of one Ray have different numbers, but every Ray that a run starts for itself begins at 1: two
such runs on one machine would share the name, and while both send weights one could wait for ever or load the other's. Here both ends
add Ray's session to it, which is another for each.
"""

import hashlib
import os
from typing import Any

import ray
from verl.workers.rollout.vllm_rollout.vllm_rollout import ServerAdapter

from gtpo_verl.integrations.vllm.wiring import OWN_SOCKET

# Set by verl's server for its workers, which put it into the name.
_ENV = "VERL_RAY_JOB_ID"


def run_name() -> str:
    """This run among all on this machine, the same in every process of its Ray: short, as the path of a socket must be."""
    context = ray.get_runtime_context()
    session = hashlib.sha256(context.get_session_name().encode()).hexdigest()[:8]
    return f"{context.get_job_id()}-{session}"


def name_for_workers() -> None:
    """Name the receiving end: in the process of the server, before its workers are started."""
    os.environ[_ENV] = run_name()


class PolicyServerAdapter(ServerAdapter):
    """verl's sender of weights; with ``rollout.custom.gtpo_verl_own_socket`` its socket is named like the receiving end."""

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        if (self.config.custom or {}).get(OWN_SOCKET):
            job = ray.get_runtime_context().get_job_id()
            assert f"-{job}-" in self.zmq_handle
            self.zmq_handle = self.zmq_handle.replace(f"-{job}-", f"-{run_name()}-")
