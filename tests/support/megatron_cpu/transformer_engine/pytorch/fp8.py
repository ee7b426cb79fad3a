"""FP8, which is off."""

import contextlib
from typing import Any


class FP8GlobalStateManager:
    """Asked by activation checkpointing."""

    @staticmethod
    def is_fp8_enabled() -> bool:
        return False

    @staticmethod
    def get_fp8_recipe() -> None:
        return None


@contextlib.contextmanager
def fp8_autocast(enabled: bool = True, **_: Any) -> Any:
    """A context in which nothing is different.

    Raises:
        NotImplementedError: FP8 is to be used.
    """
    if enabled:
        raise NotImplementedError("FP8 is not in the stand-in for Transformer Engine")
    yield
