"""Megatron-Core, Megatron-Bridge and verl's Megatron engine on a machine without a GPU, for tests.

Each was written for CUDA and says so in places that no setting reaches. This package changes those places, and no
others, when the module they are in is imported; a module of its own for each obstacle says what it is:

- ``cuda_names``: CUDA by name, in torch's functions and in Megatron's sources
- ``random_state``: random numbers of a device
- ``gloo``: the process groups' library misreads tensors that are not contiguous
- ``optimizer_state``: float32 optimizer states do not load
- ``verl_engine``: verl admits no float32, seeds nothing without an accelerator, and counts tokens in place
- ``rules``: this project refuses to train with Megatron on a CPU

``transformer_engine/``, beside this package, stands in for NVIDIA's Transformer Engine.
"""

from types import ModuleType

import import_hooks
from import_hooks import Change


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


def _rules(module: ModuleType) -> None:
    from megatron_on_cpu import rules

    rules.admit_cpu(module)


# What happens to a module before its own code runs, and after.
BEFORE: dict[str, Change] = {"megatron.core": _use_cpu}
AFTER: dict[str, Change] = {
    "gtpo_verl.rules.rollout": _rules,
    "megatron.core.optimizer.distrib_optimizer": _loading,
    "megatron.core.tensor_parallel.random": _random_state,
    "verl.workers.config.engine": _float32,
    "verl.workers.engine.megatron.transformer_impl": _count,
    "verl.workers.engine.megatron.utils": _seed,
}


def install() -> None:
    """From now on change modules as they are imported."""
    import_hooks.install(after=AFTER, before=BEFORE)
