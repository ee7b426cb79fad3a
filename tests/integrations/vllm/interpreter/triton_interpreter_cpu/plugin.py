"""vLLM's samplers take ``log1p`` from libdevice, which the interpreter answers with None."""

import importlib
import os
from types import SimpleNamespace


def register() -> None:
    if os.environ.get("TRITON_INTERPRET") != "1":
        return
    from vllm.triton_utils import tl

    for name in ("vllm.v1.worker.gpu.sample.gumbel", "vllm.v1.worker.gpu.spec_decode.rejection_sampler_utils"):
        module = importlib.import_module(name)
        if hasattr(module, "tldevice"):  # 0.24 knows it in the first module only
            module.tldevice = SimpleNamespace(log1p=lambda x: tl.log(1.0 + x))
