"""A socket for each run, by which the policy's weights reach vLLM.

verl names it after Ray's job number. Jobs of one Ray have different numbers, but every Ray that a run starts for itself
begins at 1: two such runs on one machine would share the name, and while both send weights one could hang or load the
other's. Here the sender adds the run's token (``wiring.enable_rollout_entropy`` draws it) and tells the receiving
workers before it sends, so that both ends use the same name.
"""

from collections.abc import Mapping
from typing import Any

from verl.workers.rollout.vllm_rollout.vllm_rollout import ServerAdapter

from gtpo_verl.errors import UserError
from gtpo_verl.integrations.vllm.names import SOCKET_TOKEN


def with_token(handle: str, token: str) -> str:
    """verl's name of a socket with the token of a run in it.

    Raises:
        UserError: the name is not of the form that verl 0.9.1 gives.
    """
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
