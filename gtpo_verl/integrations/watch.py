"""Interrupts a training that would hang after a rollout engine has died.

An engine that dies during a weight sync leaves the actor's worker in a blocking read without a timeout, and the trainer
waiting for that worker: no exception is raised anywhere, in any trainer mode.
"""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

# not used by Ray, which cancels and stops its workers with SIGINT and SIGTERM
SIGNAL = signal.SIGUSR1
INTERVAL = 10.0  # seconds


@contextmanager
def watched(check: Callable[[], None], interval: float = INTERVAL) -> Iterator[None]:
    """Call ``check`` in a thread every ``interval`` seconds; an exception in it ends the ``with`` block, even if hung.

    To be used in the main thread, the only one that can be interrupted in ``ray.get`` or a system call.

    Raises:
        Exception: what ``check`` raised.
    """
    found: list[Exception] = []
    ended = threading.Event()
    main = threading.get_ident()

    def watch() -> None:
        while not ended.wait(interval):
            try:
                check()
            except Exception as error:
                found.append(error)
                # repeated until the block has ended, because a callback may swallow the interruption
                signal.pthread_kill(main, SIGNAL)

    def interrupt(number: int, frame: FrameType | None) -> None:
        if not ended.is_set():
            raise KeyboardInterrupt  # the only exception of a signal handler that ray.get passes on

    before = signal.signal(SIGNAL, interrupt)
    thread = threading.Thread(target=watch, name="watch", daemon=True)
    thread.start()
    try:
        yield
    except BaseException as error:
        if found:
            raise found[0] from error
        raise
    finally:
        ended.set()
        thread.join()
        signal.signal(SIGNAL, before)
