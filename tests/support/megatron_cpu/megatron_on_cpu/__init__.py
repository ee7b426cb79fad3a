"""Megatron-Core, Megatron-Bridge and verl's Megatron engine on a machine without a GPU, for tests.

Each was written for CUDA and says so in places that no setting reaches. This package changes those places, and no
others, when the module they are in is imported; a module of its own for each obstacle says what it is:

- ``cuda_names``: CUDA by name, in torch's functions and in Megatron's sources
- ``random_state``: random numbers of a device
- ``gloo``: the process groups' library misreads tensors that are not contiguous
- ``optimizer_state``: float32 optimizer states do not load
- ``verl_engine``: verl admits no float32, seeds nothing without an accelerator, and counts tokens in place
- ``preflight``: this project refuses to train with Megatron on a CPU

``transformer_engine/``, beside this package, stands in for NVIDIA's Transformer Engine.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Sequence
from types import ModuleType

Change = Callable[[ModuleType], None]


def _use_cpu(core: ModuleType) -> None:
    from megatron_on_cpu import cuda_names, gloo

    cuda_names.install()
    gloo.install()


def _random_state(module: ModuleType) -> None:
    from megatron_on_cpu import random_state

    random_state.change_tracker(module)


def _seed(module: ModuleType) -> None:
    from megatron_on_cpu import verl_engine

    verl_engine.seed_tracker(module)


def _float32(module: ModuleType) -> None:
    from megatron_on_cpu import verl_engine

    verl_engine.admit_float32(module)


def _count(module: ModuleType) -> None:
    from megatron_on_cpu import verl_engine

    verl_engine.copy_count(module)


def _loading(module: ModuleType) -> None:
    from megatron_on_cpu import optimizer_state

    optimizer_state.load_without_gradients(module)


def _preflight(module: ModuleType) -> None:
    from megatron_on_cpu import preflight

    preflight.admit_cpu(module)


# What happens to a module before its own code runs, and after.
BEFORE: dict[str, Change] = {"megatron.core": _use_cpu}
AFTER: dict[str, Change] = {
    "gtpo_verl.preflight": _preflight,
    "megatron.core.optimizer.distrib_optimizer": _loading,
    "megatron.core.tensor_parallel.random": _random_state,
    "verl.workers.config.engine": _float32,
    "verl.workers.engine.megatron.transformer_impl": _count,
    "verl.workers.engine.megatron.utils": _seed,
}


class Changer(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the modules to be changed as Python would have, and changes them before anyone gets hold of them."""

    def __init__(self) -> None:
        self.loaders: dict[str, importlib.abc.Loader] = {}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in BEFORE.keys() | AFTER.keys() or fullname in self.loaders:
            return None
        self.loaders[fullname] = NotImplemented  # the search below comes here again
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        self.loaders[fullname] = spec.loader
        spec.loader = self
        return spec

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self.loaders[spec.name].create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        BEFORE.get(module.__name__, _nothing)(module)
        self.loaders[module.__name__].exec_module(module)
        AFTER.get(module.__name__, _nothing)(module)


def _nothing(module: ModuleType) -> None:
    pass


def install() -> None:
    """From now on change modules as they are imported."""
    sys.meta_path.insert(0, Changer())
