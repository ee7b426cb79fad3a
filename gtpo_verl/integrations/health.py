"""Whether the processes of a run live.

An engine that dies during a weight sync leaves the actor's worker, and the trainer waiting for it, in a blocking read.
So a thread asks the processes, and interrupts the trainer (`watched`).
"""

import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, OutOfMemoryError, RayActorError

# not used by Ray, which cancels and stops its workers with SIGINT and SIGTERM
SIGNAL = signal.SIGUSR1
INTERVAL = 10.0  # seconds between two checks
ANSWER_TIMEOUT = 10.0  # seconds


@contextmanager
def watched(check: Callable[[], None], interval: float = INTERVAL) -> Iterator[None]:
    """Call ``check`` in a thread every ``interval`` seconds; an exception in it ends the ``with`` block, even if hung.

    To be used in the main thread, the only one that can be interrupted in ``ray.get`` or a system call. Raises what
    ``check`` raised.
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


def ended_actors(asked: Mapping[str, Any]) -> list[str]:
    """Which actors have ended, and why: ``NAME: REASON`` of each; one that is too busy to answer has not.

    asked: by name of an actor, the reference to its answer; a string is a reason to take it for ended.
    """
    answers = list(asked.values())
    answered, _ = ray.wait(answers, num_returns=len(answers), timeout=ANSWER_TIMEOUT) if answers else ([], [])
    found = []
    for name, answer in asked.items():
        if answer not in answered:
            continue
        try:
            why = ray.get(answer)
        except ActorUnavailableError:  # a network fault, or a node that Ray has not given up yet
            continue
        except RayActorError as error:
            if "creation task" in str(error):  # it never lived, and whoever made it gets the reason
                continue
            why = "its Ray actor has ended"
        except OutOfMemoryError:
            why = "Ray ended it because the machine's memory ran out"
        if isinstance(why, str):
            found.append(f"{name}: {why}")
    return found


def dead_servers(servers: Sequence[Any]) -> list[str]:
    """Ask rollout servers (Ray actors of ``vLLMHttpServer``) for their engines; returns a reason per dead one."""

    def engine_end(server: Any) -> str | None:
        engine = getattr(server, "engine", None)  # only a replica's first node has one
        return "its engine's process has ended" if engine is not None and engine.errored else None

    return ended_actors(
        {f"server {number}": server.__ray_call__.remote(engine_end) for number, server in enumerate(servers)}
    )
