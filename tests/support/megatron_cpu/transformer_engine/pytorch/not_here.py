"""What Megatron-Core imports, inherits from or names in annotations, and a dense model does not use."""

from typing import Any


class NotHere:
    """Raises ``NotImplementedError`` when an instance is made."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError(f"{type(self).__name__} is not in the stand-in for Transformer Engine")
