"""Obstacle: Megatron's tracker of random states goes past ``torch.cuda``'s public functions to CUDA's generators.

The CPU has one generator, so the tracker switches between states of that one. Megatron warns when a state of the CPU
changes while one of the GPU is in use; here they are the same, and the warning says nothing.
"""

import logging
from types import ModuleType

import torch


def change_tracker(module: ModuleType) -> None:
    """Let the tracker in megatron.core.tensor_parallel.random switch the CPU's generator."""
    module._get_cuda_rng_state = lambda device="cuda", clone=False, graph_safe=False: torch.get_rng_state()
    module._set_cuda_rng_state = lambda new_state, device=-1, graph_safe=False: torch.set_rng_state(new_state)
    logging.getLogger(module.__name__).setLevel(logging.ERROR)
