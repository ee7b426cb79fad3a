"""Something that is done in a thread while this one goes on."""

import threading
from collections.abc import Callable
from typing import Any


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
