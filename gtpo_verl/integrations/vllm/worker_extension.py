"""verl's extension of vLLM's workers, with what this project adds to the workers of the policy.

vLLM makes the class named by ``worker_extension_cls`` a base of its worker, so ``__new__`` runs in every worker process
before the model and its sampler exist, on every node and whatever ``VLLM_PLUGINS`` is.
"""

from typing import Any

from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension
from vllm.platforms import current_platform

from gtpo_verl.errors import UserError
from gtpo_verl.integrations.vllm import plugin
from gtpo_verl.integrations.vllm.weight_socket import with_port
from gtpo_verl.versions import VLLM_ON_CPU


class PolicyWorkerExtension(vLLMColocateWorkerExtension):
    """Entropies where ``GTPO_VERL_ROLLOUT_ENTROPY=1``, reloadable weights on the CPU, and the socket of the run."""

    _ray_port: str | None = None

    def __new__(cls, **kwargs: Any) -> "PolicyWorkerExtension":
        plugin.register()
        if current_platform.is_cpu():
            keep_linear_weights()
        return super().__new__(cls, **kwargs)

    def name_weight_socket(self, port: str) -> None:
        """Wait for the next weights at the socket with this port in its name; the sender calls it."""
        self._ray_port = port

    def _get_zmq_handle(self) -> str:
        handle = super()._get_zmq_handle()
        return with_port(handle, self._ray_port) if self._ray_port else handle


def keep_linear_weights() -> None:
    """Make vLLM leave linear weights unpacked, in this process and before its model is loaded.

    On a CPU it packs each of them for oneDNN, for the SGL kernel or for zentorch, drops the original, and the next
    ``load_weights`` fails. Without packing it multiplies by the weight itself.

    Raises UserError: this vLLM packs weights in a way that cannot be switched off here; the version is named.
    """
    import vllm
    from vllm import _custom_ops
    from vllm.model_executor.layers import utils

    if getattr(current_platform, "is_zen_cpu", lambda: False)():
        raise UserError("zentorch packs linear weights and drops them, so they cannot be updated: uninstall zentorch.")
    for owner, name in ((_custom_ops, "_supports_onednn"), (utils, "check_cpu_sgl_kernel")):
        if not hasattr(owner, name):
            raise UserError(
                f"vLLM {vllm.__version__} on the CPU has no {owner.__name__}.{name}: weights could not be updated. Use "
                f"vLLM {VLLM_ON_CPU}."
            )
    _custom_ops._supports_onednn = False
    utils.check_cpu_sgl_kernel = lambda n, k, dtype: False
