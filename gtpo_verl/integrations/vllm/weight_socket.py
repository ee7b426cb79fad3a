"""A socket for each run, by which the policy's weights reach vLLM.

verl names it after Ray's job number, which is 1 in every Ray that a run starts for itself: two such runs on one machine
could load each other's weights. So the sender adds the port of its Ray's head and tells the receiving workers.
"""

from collections.abc import Mapping
from typing import Any

import ray
from verl.workers.rollout.vllm_rollout.vllm_rollout import ServerAdapter

from gtpo_verl.errors import UserError
from gtpo_verl.integrations.vllm import OWN_SOCKET


def with_port(handle: str, port: str) -> str:
    """verl's name of a socket with the port of a Ray in it; raises a UserError for a name of another form."""
    run, replica, rank = handle.rpartition("-replica-")
    if not replica:
        raise UserError(f"verl names the socket of vLLM's weights {handle}, which gtpo_verl does not know.")
    return f"{run}-{port}{replica}{rank}"


class NamedSocketAdapter(ServerAdapter):
    """verl's weight sync to vLLM; where ``rollout.custom`` says that the workers are ours, over a socket of the run."""

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        custom: Mapping[str, Any] = self.config.custom or {}
        self._port: str | None = None
        if custom.get(OWN_SOCKET):
            self._port = ray.get_runtime_context().gcs_address.rpartition(":")[2]
            self.zmq_handle = with_port(self.zmq_handle, self._port)

    async def update_weights(self, *args: Any, **kwargs: Any) -> Any:
        if self._port:
            await self._execute_method("name_weight_socket", args=(self._port,))
        return await super().update_weights(*args, **kwargs)
