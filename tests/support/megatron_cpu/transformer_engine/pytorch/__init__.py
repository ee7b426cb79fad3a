"""See ``transformer_engine``."""

from transformer_engine.pytorch import distributed, fp8, not_here, ops, router, tensor
from transformer_engine.pytorch.dot_product_attention import DotProductAttention
from transformer_engine.pytorch.linear import LayerNormLinear, Linear
from transformer_engine.pytorch.norm import RMSNorm

__all__ = [
    "DotProductAttention",
    "GroupedLinear",
    "LayerNorm",
    "LayerNormLinear",
    "Linear",
    "RMSNorm",
    "distributed",
    "fp8",
    "ops",
    "router",
    "tensor",
]


class GroupedLinear(not_here.NotHere):
    """Of experts."""


class LayerNorm(not_here.NotHere):
    """Qwen and Llama have RMSNorm."""
