"""Waiting for what another process does."""

import time
from collections.abc import Callable


def wait_until(condition: Callable[[], bool], seconds: float = 60, every: float = 0.05) -> None:
    """Ask for the condition every so many seconds, and fail where it does not come true in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(every)
