"""A pool of verifier processes that returns a verdict for every sample.

A sample on which the verifier hangs, crashes or runs out of memory is wrong, with the reason in its verdict, and does
not affect the samples after it.
"""

import contextlib
import json
import logging
import math
import os
import queue
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import asdict
from multiprocessing import Pipe
from pathlib import Path
from typing import Any, TypedDict

from gtpo_verl.errors import UserError
from gtpo_verl.verifiers import RULES
from gtpo_verl.verifiers.server import Settings

logger = logging.getLogger(__name__)

TAIL = 16_384  # characters at the end of a response that are verified
START_TIMEOUT = 300.0  # seconds; the start takes one or two, and longer on a busy machine
GRACE = 5.0  # seconds after the kernel's timer, after which the processes are considered stuck


class Verdict(TypedDict):
    """What verl gets for every response: ``score``, DAPO's ±1, ``acc``, 1.0 for a right answer and 0.0 otherwise,
    ``pred``, the extracted answer, and ``verifier_failure``, empty, or in ``FAILURES`` where the rule gave no verdict.
    """

    score: float
    acc: float
    pred: str
    verifier_failure: str


def verdict(right: bool, pred: str, failure: str = "") -> Verdict:
    return {"score": 1.0 if right else -1.0, "acc": float(right), "pred": pred, "verifier_failure": failure}


def tail(response: str, limit: int = TAIL) -> str:
    """The last ``limit`` characters of a response, from the first start of a line in their first half, where there is
    one: a cut within a line could separate the delimiters of a formula.
    """
    if len(response) <= limit:
        return response
    end = response[-limit:]
    line = end.find("\n", 0, limit // 2)
    return end[line + 1 :]


class VerifierPool:
    """Verifies responses by one rule in separate processes, started on first use. Thread-safe.

    rule: a name in ``RULES``, or the full name of a module with ``judge(response, truth, **options) -> (right, pred)``.
    options: keyword arguments of the rule. workers: samples verified at the same time, each in a process. timeout:
    wall-clock seconds per sample. memory_mb: MiB that a sample may allocate. max_chars: characters at the end of a
    response that are verified; see ``tail``. Raises UserError: a setting is out of range.
    """

    def __init__(
        self,
        rule: str,
        options: Mapping[str, Any] | None = None,
        *,
        workers: int = 2,
        timeout: float = 10.0,
        memory_mb: int = 1024,
        max_chars: int = TAIL,
    ) -> None:
        for name, value, least in (("workers", workers, 1), ("memory_mb", memory_mb, 64), ("max_chars", max_chars, 1)):
            if value < least:
                raise UserError(f"verifier: {name}={value} must be at least {least}.")
        if not 0 < timeout < math.inf:
            raise UserError(f"verifier: timeout={timeout} must be a number of seconds above 0.")
        self.rule = rule
        self.timeout = timeout
        self.max_chars = max_chars
        self.counts: Counter[str] = Counter()  # "samples", and each failure by its name
        self._settings = Settings(
            f"gtpo_verl.verifiers.{rule}" if rule in RULES else rule, dict(options or {}), timeout, memory_mb
        )
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix=f"verifier-{rule}")
        self._idle: queue.SimpleQueue[int] = queue.SimpleQueue()
        for number in range(workers):
            self._idle.put(number)
        self._workers = workers
        self._lock = threading.Lock()
        self._server: _Server | None = None
        self._closed = False

    def submit(self, response: str, truth: str) -> "Future[Verdict]":
        """Verify a response in the background; the future raises a UserError where the verifier does not start."""
        return self._threads.submit(self._judge, tail(response, self.max_chars), truth)

    def judge(self, response: str, truth: str) -> Verdict:
        """Verify a response and wait for its verdict; see :meth:`submit`."""
        return self.submit(response, truth).result()

    def close(self) -> None:
        """Stop the processes; waiting samples are dropped."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            self._closed = True
            server, self._server = self._server, None
        if server is not None:
            server.kill()  # wakes the threads waiting for a reply
        self._threads.shutdown()

    def __enter__(self) -> "VerifierPool":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _judge(self, response: str, truth: str) -> Verdict:
        request = json.dumps({"response": response, "truth": truth}).encode()
        channel = self._idle.get()
        try:
            reply = self._ask(channel, request)
        finally:
            self._idle.put(channel)
        failure = reply.get("failure", "")
        self._count(failure, reply.get("detail", ""))
        return verdict(reply["right"], reply["pred"]) if not failure else verdict(False, "", failure)

    def _ask(self, channel: int, request: bytes) -> dict[str, Any]:
        reply: dict[str, Any] = {}
        # once more where all processes died together: another sample has most likely caused it
        for _ in range(2):
            with self._lock:
                if self._closed:
                    raise CancelledError("the pool was closed")
                if self._server is None:
                    self._server = _Server(self._settings, self._workers)
                server = self._server
            reply = server.ask(channel, request, self.timeout + GRACE)
            if "server" not in reply:
                return reply
            with self._lock:
                if self._server is server:
                    server.kill()
                    self._server = None
            if reply["failure"] == "timeout":
                break
        return reply

    def _count(self, failure: str, detail: str) -> None:
        with self._lock:
            self.counts["samples"] += 1
            if not failure:
                return
            self.counts[failure] += 1
            times = self.counts[failure]
            samples = self.counts["samples"]
        if times & (times - 1):
            return  # only the 1st, 2nd, 4th, 8th ... is logged, so that a bad data set does not fill the disk
        what = f"no verdict within {self.timeout:g} s" if failure == "timeout" else failure
        what += f", {detail}" if detail else ""
        counted = f"{times} of {samples} samples so far"
        logger.warning("verifier %s: %s; the sample counts as wrong (%s)", self.rule, what, counted)


class _Server:
    """One run of ``gtpo_verl.verifiers.server`` and the channels to its children. Raises UserError: it does not start,
    or the rule's package is not there.
    """

    def __init__(self, settings: Settings, workers: int) -> None:
        pairs = [Pipe() for _ in range(workers)]
        self.channels = [ours for ours, _ in pairs]
        numbers = [theirs.fileno() for _, theirs in pairs]
        root = str(Path(__file__).parents[2])
        path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
        # -P: files in the working directory must not shadow modules. Own session: Ctrl-C is handled by the caller.
        command = [sys.executable, "-P", "-m", "gtpo_verl.verifiers.server"]
        self.process = subprocess.Popen(
            [*command, json.dumps(asdict(settings)), *map(str, numbers)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=numbers,
            env=os.environ | {"PYTHONPATH": path},
            start_new_session=True,
        )
        for _, theirs in pairs:
            theirs.close()
        first = self._receive(0, START_TIMEOUT)
        if "ready" in first:
            return
        if first.get("failure") == "crash":  # its channels are closed, so it is about to end
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(GRACE)
        self.kill()
        if "broken" in first:
            raise UserError(
                f"the verifier does not start: {first['broken']}; reinstall gtpo_verl with its requirements."
            )
        raise UserError(
            f"the verifier did not start: exit code {self.process.returncode} (-9: killed, for it gave no reply within "
            f"{START_TIMEOUT:.0f} s). See its output above."
        )

    def ask(self, number: int, request: bytes, seconds: float) -> dict[str, Any]:
        """Send a request and wait for its reply; the key ``server`` in it says that the processes are gone or stuck."""
        channel = self.channels[number]
        with contextlib.suppress(EOFError, OSError):  # which the reply will tell
            while channel.poll():
                channel.recv_bytes()  # a message about a child that died while idle is not the reply
            channel.send_bytes(request)
        return self._receive(number, seconds)

    def _receive(self, number: int, seconds: float) -> dict[str, Any]:
        channel = self.channels[number]
        try:
            if channel.poll(seconds):
                reply: dict[str, Any] = json.loads(channel.recv_bytes())
                return reply
        except (EOFError, OSError):
            return {"server": True, "failure": "crash", "detail": "the verifier is gone"}
        return {"server": True, "failure": "timeout", "detail": "the kernel's timer did not end it"}

    def kill(self) -> None:
        """End all processes of this server, which closes its channels."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
