"""Obstacles in verl's Megatron engine: it refuses float32, seeds Megatron's tracker only on an accelerator, and reduces
a count of tokens inside the batch.

bfloat16 would hide in its rounding what is compared here. verl knows the name float32 in all that follows the check
(workers/config/engine.py:218).

The count is the end of the batch's offsets, a view, and is all-reduced in place (transformer_impl.py:856). ``.to`` a
GPU copies it first; on a CPU the batch would have more tokens than it has.
"""

from types import ModuleType
from typing import Any


def admit_float32(module: ModuleType) -> None:
    """Let ``megatron.dtype`` be float32."""
    config = module.McoreEngineConfig
    check = config.__post_init__

    def checked(self: Any) -> None:
        wanted = self.dtype
        if wanted == "float32":
            object.__setattr__(self, "dtype", "bfloat16")
        check(self)
        object.__setattr__(self, "dtype", wanted)

    config.__post_init__ = checked


def seed_tracker(module: ModuleType) -> None:
    """Seed Megatron's tracker too, without which no layer can be made."""
    seed_all = module.set_random_seed

    def set_random_seed(seed: int) -> None:
        from megatron.core import tensor_parallel

        seed_all(seed)
        tensor_parallel.model_parallel_cuda_manual_seed(seed)

    module.set_random_seed = set_random_seed


def copy_count(module: ModuleType) -> None:
    """Let the number of tokens that is all-reduced be a copy."""
    engine = module.MegatronEngine
    count = engine._routed_num_tokens
    engine._routed_num_tokens = lambda self, data: count(self, data).clone()
