"""verl's extension of vLLM's workers, with what this project adds to the workers of the policy.

vLLM makes the class named by ``worker_extension_cls`` a base of its worker, so ``__new__`` runs in every worker process before
the model and its sampler exist. That needs only this module to be importable on every node; ``VLLM_PLUGINS`` has no say.
"""

from typing import Any

from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension
from vllm.platforms import current_platform

from gtpo_verl.integrations.vllm import cpu_weights, plugin


class PolicyWorkerExtension(vLLMColocateWorkerExtension):
    """Entropies if the server asked for them (``GTPO_VERL_ROLLOUT_ENTROPY=1``); reloadable weights on the CPU."""

    def __new__(cls, **kwargs: Any) -> "PolicyWorkerExtension":
        plugin.register()
        if current_platform.is_cpu():
            cpu_weights.keep_linear_weights()
        return super().__new__(cls, **kwargs)
