"""A ``cpu`` platform for verl, so that the whole stack runs on a machine without an accelerator.

It is only ever chosen by name (``VERL_PLATFORM=cpu``), because a CPU-only Ray actor on a GPU cluster must keep verl's
own choice.
"""

import contextlib
import functools
import os
import types
from collections.abc import Callable
from typing import Any

import psutil
import torch
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry
from verl.utils import torch_functional
from verl.utils.distributed import initialize_global_process_group_ray


def _always(value: Any) -> Any:
    """A method that returns this; None where a GPU waits, frees memory or is chosen."""
    return lambda *_, **__: value


class _CpuDeviceModule(types.ModuleType):
    """``torch.cpu`` with the memory and random-number calls that verl makes on every device module."""

    def __init__(self) -> None:
        super().__init__("torch.cpu")

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)

    current_device = _always(0)
    get_device_name = _always("cpu")
    empty_cache = ipc_collect = reset_peak_memory_stats = set_per_process_memory_fraction = _always(None)
    get_rng_state = staticmethod(lambda device=None: torch.get_rng_state())
    set_rng_state = staticmethod(lambda state, device=None: torch.set_rng_state(state))
    manual_seed = manual_seed_all = staticmethod(torch.manual_seed)

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        memory = psutil.virtual_memory()
        return memory.available, memory.total

    # A CPU has no allocator of torch's to ask: the resident set is what the process really holds.
    def memory_allocated(self, device: Any = None) -> int:
        return psutil.Process().memory_info().rss

    memory_reserved = max_memory_allocated = max_memory_reserved = memory_allocated


@PlatformRegistry.register(platform="cpu")
class CpuPlatform(PlatformBase):
    """The CPU as a verl platform; verl's "GPUs" become logical resources of Ray."""

    device_name = "cpu"
    vendor_name = "cpu"
    device_module = _CpuDeviceModule()

    def is_available(self) -> bool:
        return os.environ.get("VERL_PLATFORM", "").strip().lower() == "cpu"

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    manual_seed_all = manual_seed
    set_device = synchronize = empty_cache = set_allocator_settings = _always(None)
    profiler_start = profiler_stop = cudart = _always(None)
    current_device = _always("cpu")  # verl passes it to `.to()`, where an index would mean a CUDA device
    device_count = _always(1)
    get_device_capability = _always((None, None))
    communication_backend_name = _always("gloo")
    visible_devices_envvar = _always("CUDA_VISIBLE_DEVICES")
    nvtx_range = _always(contextlib.nullcontext())
    ray_resource_name = _always("GPU")
    ray_noset_envvars = _always([])
    is_ipc_supported = _always(False)


class CpuWorkerMixin:
    """What an actor's worker of verl's does differently on a CPU."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # before verl opens the process group: it would ask for ``cpu:gloo,cpu:gloo``, a duplicate that torch refuses
        initialize_global_process_group_ray(backend="cpu:gloo")
        from gtpo_verl.integrations import cpu_engine  # noqa: F401  registers the engine; imports verl's, for workers alone

        functions: Any = torch_functional
        functions.logprobs_from_logits_v2 = together(functions.logprobs_from_logits_v2)
        super().__init__(*args, **kwargs)

    @property
    def copy_handler(self) -> Callable[[Any], Any]:
        """verl's ``copy_handler`` (separate_async), which on a CPU does not copy: ``.cpu()`` returns the same weights.

        Without a copy the old log-probs of a step's later updates would be those of the new policy.
        """
        save = super().copy_handler  # type: ignore[misc]

        def copied(module: torch.nn.Module) -> tuple[dict[str, tuple[torch.Tensor, Any]], Any]:
            shards, spec = save(module)
            return {name: (shard.clone(), placed) for name, (shard, placed) in shards.items()}, spec

        return copied


def together(stock: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """verl's log-probs of labels, for all tokens of a packed batch at once: ``stock`` goes row by row along the first
    axis, where an engine without padding has tokens, thousands of operations of microseconds.
    """

    @functools.wraps(stock)
    def log_probs(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        if logits.dim() == 2:
            return stock(logits[None], labels[None])[0]
        return stock(logits, labels)

    return log_probs


def for_cpu(worker: type) -> type:
    """Return ``worker``, a class of verl's, as it runs on a CPU."""
    return type(f"Cpu{worker.__name__}", (CpuWorkerMixin, worker), {"__module__": worker.__module__})
