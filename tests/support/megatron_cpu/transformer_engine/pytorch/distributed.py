"""Activation checkpointing, whose phases matter to FP8 alone, and a tracker of random states that is not used."""

import contextlib
from typing import Any

from transformer_engine.pytorch.not_here import NotHere


class CudaRNGStatesTracker(NotHere):
    """Megatron-Core has its own, and inherits from this when it is imported."""


def activation_recompute_forward(*args: Any, **kwargs: Any) -> contextlib.AbstractContextManager[None]:
    """A context in which nothing is different."""
    return contextlib.nullcontext()
