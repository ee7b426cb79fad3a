"""GTPO and GRPO-S (arXiv 2508.04349) as a plugin for verl: credit assignment by policy entropy.

This module imports nothing heavy: ``verl``, ``vllm`` and ``torch`` are loaded by the parts that need them.
"""

__version__ = "0.2.0"
