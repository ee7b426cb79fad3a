"""Stands in for NVIDIA's Transformer Engine in tests on a CPU: the same names and interfaces, computed by torch.

Megatron-Core's layers of Transformer Engine inherit from these classes and pass them what they pass to the real ones;
conversion by Megatron-Bridge, sharded checkpoints and the distributed optimizer build on those layers. What is here is
what a dense model of the GPT kind needs: linear layers with tensor and sequence parallelism, RMSNorm, causal attention
with grouped queries over padded and packed sequences with context parallelism, and Adam. All else raises
``NotImplementedError`` when it is used, or cannot be imported, where Megatron-Core then has a way of its own.

Nothing here says anything about the kernels of the real one.
"""

from transformer_engine import common, pytorch

__all__ = ["common", "pytorch"]
__version__ = "2.10.0"  # the first that Megatron-Bridge 0.3.1 asks for; Megatron-Core chooses its ways by it
