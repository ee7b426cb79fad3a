"""See ``transformer_engine``."""

from transformer_engine.common import recipe

__all__ = ["recipe"]
