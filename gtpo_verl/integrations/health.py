"""Whether the processes of a run live, and how long it waits for them.

Nothing of this raises an exception by itself. verl treats a request that failed because its engine died like any failed
request, and submits another one; an engine that dies during a weight sync leaves the actor's worker in a blocking read,
and the trainer waiting for that worker; verl's buffers poll TransferQueue without a limit, and its other calls of other
processes have none either. So a thread asks the processes, and interrupts the trainer (`watched`); waits for rollouts
have a limit (`BoundedWait`), and so has each phase of a step (`PhaseLimit`).
"""

import logging
import signal
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import ActorUnavailableError, OutOfMemoryError, RayActorError

from gtpo_verl.errors import StepGivenUpError, UserError

if TYPE_CHECKING:  # every process that imports verl has this module, and few the trainer's
    from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer

logger = logging.getLogger(__name__)

# not used by Ray, which cancels and stops its workers with SIGINT and SIGTERM
SIGNAL = signal.SIGUSR1
INTERVAL = 10.0  # seconds between two checks
ANSWER_TIMEOUT = 10.0  # seconds
STOP_PATIENCE = 60.0  # seconds without a response after which a request to stop gives the step up
NOT_POLLED = 60.0  # seconds between two polls of one wait at most: what is longer was no waiting
SAID_AT = (1 / 16, 1 / 4, 1 / 2)  # of the limit: when it is said what is waited for

# -------------------------------------------------------------------- processes


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


def ended_actors(asked: Mapping[str, Any]) -> dict[str, str]:
    """Which actors have ended, and why.

    Args:
        asked: by name of an actor, the reference to its answer; a string is a reason to take it for ended. An actor
            that is too busy to answer has not ended.

    Returns:
        A reason for each actor that has ended, by name.
    """
    answers = list(asked.values())
    answered, _ = ray.wait(answers, num_returns=len(answers), timeout=ANSWER_TIMEOUT) if answers else ([], [])
    found = {}
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
            found[name] = why
    return found


def dead_servers(servers: Sequence[Any]) -> list[str]:
    """Ask rollout servers (Ray actors of ``vLLMHttpServer``) for their engines; returns a reason per dead one."""
    asked = {f"server {number}": server.__ray_call__.remote(_engine_end) for number, server in enumerate(servers)}
    return [f"{name}: {why}" for name, why in ended_actors(asked).items()]


def _engine_end(server: Any) -> str | None:
    engine = getattr(server, "engine", None)  # only a replica's first node has one
    return "its engine's process has ended" if engine is not None and engine.errored else None


# -------------------------------------------------------------------- limits of time


class BoundedWait:
    """Takes the place of a buffer's ``_wait_for_next_poll``; every change in TransferQueue starts the time again.

    Args:
        buffer: verl's, of any mode.
        limit: seconds without a response or an ended group after which the run ends; None for no limit.
        stopping: whether the run was asked to stop.
        polled: called at every poll.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        buffer: "ReplayBuffer",
        limit: float | None,
        stopping: Callable[[], bool],
        polled: Callable[[], object] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._buffer = buffer
        self._limit = limit
        self._stopping = stopping
        self._told = polled
        self._clock = clock
        self._wait = buffer._wait_for_next_poll
        self._seen: Hashable = None
        self._since = self._polled = clock()
        self._said = 0

    def __call__(self, partition_id: str, last_debug_time: float) -> float:
        """Wait for the next poll.

        Raises:
            UserError: nothing has changed for the limit, and what is waited for.
            StepGivenUpError: the run was asked to stop, and nothing has changed for `STOP_PATIENCE`.
        """
        self._told()
        now = self._clock()
        seen = partition_id, self._ended(partition_id), len(self._buffer.partitions[partition_id])
        if seen != self._seen or now - self._polled > NOT_POLLED:
            self._seen, self._since, self._said = seen, now, 0
        self._polled = now
        self._check(partition_id, now - self._since)
        return self._wait(partition_id, last_debug_time)

    def _ended(self, partition_id: str) -> tuple[int, int]:
        buffer = self._buffer
        return len(buffer.finished_keys[partition_id]), len(buffer.failure_keys[partition_id])

    def _check(self, partition_id: str, quiet: float) -> None:
        if quiet > STOP_PATIENCE and self._stopping():
            raise StepGivenUpError(
                f"{self._waits_for(partition_id)} for {quiet:.0f} s, and the run was asked to stop: the step was given "
                "up."
            )
        if self._limit is None:
            return
        if quiet > self._limit:
            raise UserError(
                f"{self._waits_for(partition_id)} for {quiet:.0f} s, the limit of guards.stall_timeout: a reward "
                "function or a tool that never returns, an engine that hangs, or a longer generation than expected "
                "(then raise the limit). The same command resumes from the last checkpoint."
            )
        if self._said < len(SAID_AT) and quiet > SAID_AT[self._said] * self._limit:
            self._said += 1
            logger.warning("%s for %.0f s.", self._waits_for(partition_id), quiet)

    def _waits_for(self, partition_id: str) -> str:
        buffer: Any = self._buffer
        running = sorted(buffer.running_keys[partition_id] | buffer.pending_keys[partition_id])
        named = ", ".join(running[:3]) + (", ..." if len(running) > 3 else "")
        what = "validation" if partition_id == "val" else "training"
        return f"waiting for {len(running)} groups of the {what} ({named}): no response has arrived"


def bound_wait(
    buffer: "ReplayBuffer", limit: float | None, stopping: Callable[[], bool], polled: Callable[[], object]
) -> BoundedWait:
    """Let a buffer wait no longer than ``limit`` seconds for the next response."""
    wait = BoundedWait(buffer, limit, stopping, polled)
    vars(buffer)["_wait_for_next_poll"] = wait
    return wait


class PhaseLimit:
    """How long the trainer may be in one phase; every poll for rollouts starts the time again.

    Args:
        limit: seconds; None for no limit.
        clock: seconds, monotonic.
    """

    def __init__(self, limit: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit = limit
        self._clock = clock
        self._phase, self._since = "starting", clock()

    def begin(self, phase: str) -> None:
        """Start the time of a phase."""
        self._phase, self._since = phase, self._clock()

    def polled(self) -> None:
        """Start the time again."""
        self._since = self._clock()

    def check(self) -> None:
        """Check the phase; to be called by another thread.

        Raises:
            UserError: it lasts longer than the limit.
        """
        lasts = self._clock() - self._since
        if self._limit is not None and lasts > self._limit:
            raise UserError(
                f"{self._phase} for {lasts:.0f} s, the limit of guards.phase_timeout: a process, the network or a file "
                "system hangs, or it takes longer than expected (then raise the limit). The same command resumes from "
                "the last checkpoint."
            )
