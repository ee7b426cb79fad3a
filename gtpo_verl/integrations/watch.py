"""Interrupts a program that waits for something which will never come.

A rollout engine that dies while it receives weights leaves the actor's worker in a blocking read without a time limit, and the
trainer waiting for that worker: no exception is raised anywhere, in any trainer mode.
"""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

# Ray's workers leave this one alone; SIGINT and SIGTERM are how Ray cancels and stops them.
SIGNAL = signal.SIGUSR1
INTERVAL = 10.0  # seconds


@contextmanager
def watched(check: Callable[[], None], interval: float = INTERVAL) -> Iterator[None]:
    """Call ``check`` in a thread every ``interval`` seconds; what it raises ends the ``with`` block, whatever that waits for.

    Only in a process's main thread: no other can be interrupted in ``ray.get`` or a system call.

    Raises:
        Exception: what ``check`` raised, in the thread that entered the block.
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
                # again each time, until the block has ended: an interruption can be lost in somebody's callback
                signal.pthread_kill(main, SIGNAL)

    def interrupt(number: int, frame: FrameType | None) -> None:
        if not ended.is_set():
            raise KeyboardInterrupt  # the one exception that ray.get lets through from a signal handler

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
