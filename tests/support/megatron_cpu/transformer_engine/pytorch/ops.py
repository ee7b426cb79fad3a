"""Fused operations, of which there are none; Megatron-Core has two of them in annotations."""

from transformer_engine.pytorch.not_here import NotHere


class Sequential(NotHere):
    """A fused MLP."""


class FusibleOperation(NotHere):
    """A part of it."""
