"""A socket for each run, by which the policy's weights reach vLLM.

verl names it after Ray's job number, which is 1 in every Ray that a run starts for itself: two such runs on one machine
could load each other's weights. So the sender adds the run's token (drawn in ``wiring``) and tells the receiving
workers.
"""

from collections.abc import Mapping
from typing import Any

from verl.workers.rollout.vllm_rollout.vllm_rollout import ServerAdapter

from gtpo_verl.errors import UserError
from gtpo_verl.integrations.vllm import SOCKET_TOKEN


def with_token(handle: str, token: str) -> str:
    """verl's name of a socket with the token of a run in it; raises a UserError for a name of another form."""
    run, replica, rank = handle.rpartition("-replica-")
    if not replica:
        raise UserError(f"verl names the socket of vLLM's weights {handle}, which gtpo_verl does not know.")
    return f"{run}-{token}{replica}{rank}"


class NamedSocketAdapter(ServerAdapter):
    """verl's weight sync to vLLM; where ``rollout.custom`` has a token, over a socket whose name contains it."""

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        custom: Mapping[str, str] = self.config.custom or {}
        self._token = custom.get(SOCKET_TOKEN)
        if self._token:
            self.zmq_handle = with_token(self.zmq_handle, self._token)

    async def update_weights(self, *args: Any, **kwargs: Any) -> Any:
        if self._token:
            await self._execute_method("name_weight_socket", args=(self._token,))
        return await super().update_weights(*args, **kwargs)
