"""Changes an attribute of an object, a key of a configuration, or a context variable for the duration of a block."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

from omegaconf import DictConfig

T = TypeVar("T")


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


@contextmanager
def bound(variable: ContextVar[T], value: T) -> Iterator[None]:
    """Give a context variable a value inside the block."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)
