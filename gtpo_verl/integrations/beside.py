"""Something that is done in a thread while this one goes on, or in this process where Ray would start one."""

import threading
from collections.abc import Callable
from typing import Any

import ray


class Beside:
    """Calls a function in a thread. Unlike an executor's, the thread is not waited for when the process must end."""

    def __init__(self, function: Callable[..., object], *arguments: Any) -> None:
        self._error: BaseException | None = None

        def call() -> None:
            try:
                function(*arguments)
            except BaseException as error:
                self._error = error

        self._thread = threading.Thread(target=call, daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Wait for its end.

        Raises:
            BaseException: what the function raised.
        """
        self._thread.join()
        if self._error is not None:
            raise self._error


class Here:
    """A function that is called as a Ray task or an actor's method would be, and runs in this process at once."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def options(self, **_: Any) -> "Here":
        return self

    def remote(self, *arguments: Any, **named: Any) -> Any:
        return ray.put(self._function(*arguments, **named))
