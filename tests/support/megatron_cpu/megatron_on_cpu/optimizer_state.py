"""Obstacle: the distributed optimizer loads its states by writing into float32 parameters, which autograd refuses.

It copies into views of leaves that require gradients (distrib_optimizer.py:940). Under bfloat16 they are copies in
float32 that require none, so this path of Megatron's is taken by float32 models alone.
"""

from types import ModuleType

import torch


def load_without_gradients(module: ModuleType) -> None:
    """Load optimizer states under ``no_grad``."""
    optimizer = module.DistributedOptimizer
    for name in ("_set_main_param_and_optimizer_states", "load_state_dict"):
        setattr(optimizer, name, torch.no_grad()(getattr(optimizer, name)))
