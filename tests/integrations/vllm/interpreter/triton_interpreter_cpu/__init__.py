"""A Triton backend in name only; see the README beside this package."""

from typing import Any


def refuse(*args: Any, **kwargs: Any) -> Any:
    raise NotImplementedError(
        "this backend exists for Triton's interpreter and compiles nothing: set TRITON_INTERPRET=1"
    )


def concrete(base: type, **methods: Any) -> type:
    """``base`` with every abstract method refusing, except those given."""
    abstract = getattr(base, "__abstractmethods__", frozenset())
    return type("Interpreter" + base.__name__, (base,), dict.fromkeys(abstract, refuse) | methods)
