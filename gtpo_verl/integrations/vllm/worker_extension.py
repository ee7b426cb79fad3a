"""verl's extension of vLLM's workers, with what this project adds to the workers of the policy.

vLLM makes the class named by ``worker_extension_cls`` a base of its worker, so ``__new__`` runs in every worker process
before the model and its sampler exist. It is enough that this module is importable on every node, whatever
``VLLM_PLUGINS`` is.
"""

from typing import Any

from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension
from vllm.platforms import current_platform

from gtpo_verl.integrations.vllm import cpu_weights, plugin
from gtpo_verl.integrations.vllm.weight_socket import with_token


class PolicyWorkerExtension(vLLMColocateWorkerExtension):
    """Entropies where ``GTPO_VERL_ROLLOUT_ENTROPY=1``, reloadable weights on the CPU, and the socket of the run."""

    _socket_token: str | None = None

    def __new__(cls, **kwargs: Any) -> "PolicyWorkerExtension":
        plugin.register()
        if current_platform.is_cpu():
            cpu_weights.keep_linear_weights()
        return super().__new__(cls, **kwargs)

    def name_weight_socket(self, token: str) -> None:
        """Wait for the next weights at the socket with this token; the sender calls it."""
        self._socket_token = token

    def _get_zmq_handle(self) -> str:
        handle = super()._get_zmq_handle()
        return with_token(handle, self._socket_token) if self._socket_token else handle
