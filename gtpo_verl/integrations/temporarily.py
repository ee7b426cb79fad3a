"""Changes an attribute of an object, or a key of a configuration, for the duration of a block."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from omegaconf import DictConfig


@contextmanager
def temporarily(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Set ``owner.name`` inside the block, and restore it afterwards, also when the block fails.

    For what verl reads from its configuration, or calls on its objects, and has no argument for.
    """
    inherited = not isinstance(owner, DictConfig) and name not in vars(owner)  # a method of the class, for instance
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if inherited:
            delattr(owner, name)
        else:
            setattr(owner, name, before)
