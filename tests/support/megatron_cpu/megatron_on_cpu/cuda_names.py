"""Obstacle: Megatron asks for its tensors ``device="cuda"``, ``.cuda()`` and ``torch.cuda.current_device()`` by name.

Here "cuda" means the CPU: in torch's factories, in ``Tensor.to``, ``.cuda`` and ``.pin_memory``, and in those functions
of ``torch.cuda`` that Megatron calls. torch's own list of factories is asked for before any is replaced: it is kept for
``with torch.device("meta")``, in which transformers makes a model, and knows them by identity. Replaced first, they
would not be in it, and the weights that are then loaded would silently be others.

Megatron's distributed optimizer asks a parameter for its ``type()`` and takes ``torch.cuda.FloatTensor`` alone
(distrib_optimizer.py:420), so that is what it is told.
"""

import contextlib
import functools
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils import _device

MEMORY = 1 << 34  # bytes of the "device", for who wants to know


def install() -> None:
    """Let "cuda" mean the CPU in this process."""
    for factory in _device._device_constructors():
        if getattr(torch, factory.__name__, None) is factory:
            setattr(torch, factory.__name__, _on_cpu(factory))
    torch.Tensor.to = _to_cpu(torch.Tensor.to)
    torch.Tensor.cuda = torch.Tensor.pin_memory = _itself
    torch.Tensor.type = _cuda_type(torch.Tensor.type)
    for name, value in _CUDA.items():
        setattr(torch.cuda, name, value)


def _cpu(device: Any) -> Any:
    """The device that is meant: an index is one of CUDA's."""
    if isinstance(device, int) and not isinstance(device, bool):
        return torch.device("cpu")
    if isinstance(device, str | torch.device) and torch.device(device).type == "cuda":
        return torch.device("cpu")
    return device


def _on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(factory)
    def make(*args: Any, **kwargs: Any) -> torch.Tensor:
        if "device" in kwargs:
            kwargs["device"] = _cpu(kwargs["device"])
        if "pin_memory" in kwargs:
            kwargs["pin_memory"] = False
        return factory(*args, **kwargs)

    return make


def _to_cpu(to: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(to)
    def move(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if "device" in kwargs:
            kwargs["device"] = _cpu(kwargs["device"])
        return to(self, *(_cpu(arg) for arg in args[:1]), *args[1:], **kwargs)

    return move


def _itself(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    return self


def _cuda_type(type_: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(type_)
    def answer(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        found = type_(self, *args, **kwargs)
        asked_by = sys._getframe(1).f_globals.get("__name__", "")
        if isinstance(found, str) and asked_by.startswith("megatron.core"):
            return found.replace("torch.", "torch.cuda.", 1)
        return found

    return answer


class _InOrder:
    """A stream or an event of a device that does everything in order."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args, **kwargs: None

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: Any) -> float:
        return 0.0


def _constant(value: Any) -> Callable[..., Any]:
    """A function of its own for every name: torch._dynamo refuses one object under two."""
    return lambda *args, **kwargs: value


_CUDA: dict[str, Any] = {
    **{name: _constant(None) for name in ("set_device", "synchronize", "empty_cache", "ipc_collect")},
    **{name: _constant(None) for name in ("reset_peak_memory_stats", "reset_max_memory_allocated")},
    **{name: _constant(0) for name in ("memory_allocated", "memory_reserved", "device_count")},
    **{name: _constant(0) for name in ("max_memory_allocated", "max_memory_reserved")},
    "current_device": _constant("cpu"),
    "get_device_name": _constant("cpu"),
    "get_device_capability": _constant((0, 0)),
    "get_device_properties": _constant(SimpleNamespace(name="cpu", major=0, minor=0, total_memory=MEMORY)),
    "mem_get_info": _constant((MEMORY, MEMORY)),
    "memory_stats": _constant({}),
    "is_current_stream_capturing": _constant(False),
    "Stream": type("Stream", (_InOrder,), {}),
    "Event": type("Event", (_InOrder,), {}),
    "current_stream": lambda *args, **kwargs: _InOrder(),
    "default_stream": lambda *args, **kwargs: _InOrder(),
    "stream": lambda *args, **kwargs: contextlib.nullcontext(),
    "device": lambda *args, **kwargs: contextlib.nullcontext(),
    # the CPU's generator is the device's: random_state.py
    "get_rng_state": lambda *args, **kwargs: torch.get_rng_state(),
    "set_rng_state": lambda state, *args, **kwargs: torch.set_rng_state(state),
    "manual_seed": lambda seed: torch.default_generator.manual_seed(seed),
    "manual_seed_all": lambda seed: torch.default_generator.manual_seed(seed),
}
