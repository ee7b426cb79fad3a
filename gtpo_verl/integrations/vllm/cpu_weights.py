"""Keeps the weights of vLLM's linear layers reloadable on the CPU, where a trainer sends new weights to vLLM.

After loading, vLLM packs each linear weight for oneDNN (or for the SGL kernel, or for zentorch) and drops the original.
The next ``load_weights`` finds an empty parameter without a loader: "'Parameter' object has no attribute
'weight_loader'". With both packings switched off, vLLM falls back to ``torch.nn.functional.linear`` on the weight
itself.
"""

from gtpo_verl.errors import UserError
from gtpo_verl.versions import VLLM_ON_CPU


def keep_linear_weights() -> None:
    """Make vLLM leave linear weights unpacked, in this process and before its model is loaded.

    Raises:
        UserError: this vLLM packs weights in a way that cannot be switched off here; the version is named.
    """
    import vllm
    from vllm import _custom_ops
    from vllm.model_executor.layers import utils
    from vllm.platforms import current_platform

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
