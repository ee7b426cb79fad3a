"""The verifier processes: a parent that has imported the rule, and one forked child per channel, replaced when it dies.

Answers can be hostile: one integer power holds the GIL for hours. So each sample is verified in a child under limits of
the kernel: a timer whose signal ends it whatever it executes, and a limit on its address space. The parent only forks
and waits, so a new child is ready within milliseconds, and reports on the channel why a child has died.

No process is left behind: a child ends when its channel is closed, as the kernel does when the process at the other end
dies; a busy child is ended by its timer; the parent ends with its last child.

``pool`` runs it as ``python -m gtpo_verl.verifiers.server SETTINGS CHANNEL...``; a channel is a file descriptor, a
message is JSON.
"""

import contextlib
import ctypes
import importlib
import json
import os
import resource
import signal
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

Judge = Callable[[str, str], tuple[bool, str]]

PR_SET_PDEATHSIG = 1  # linux/prctl.h
LONGEST = 512  # characters of an extracted answer that are returned

# Exit codes of a child that ended regularly; any other is due to its sample.
CHANNEL_CLOSED = 100
RETIRED = 101


@dataclass(frozen=True)
class Settings:
    """The rule, as a module with a function ``judge``, its options, and the limits per sample."""

    module: str
    options: dict[str, Any]
    timeout: float  # seconds
    memory_mb: int  # MiB that a sample may allocate


def main() -> None:
    """Import the rule, report on the first channel, and serve until the channels are closed."""
    settings = Settings(**json.loads(sys.argv[1]))
    channels = [Connection(int(number)) for number in sys.argv[2:]]
    try:
        rule = importlib.import_module(settings.module)
    except ImportError as error:
        send(channels[0], {"broken": f"{type(error).__name__}: {error}"})
        return

    def judge(response: str, truth: str) -> tuple[bool, str]:
        return rule.judge(response, truth, **settings.options)

    if hasattr(rule, "warm_up"):
        rule.warm_up()
    send(channels[0], {"ready": True})
    libc = ctypes.CDLL(None)  # loaded here, so that a child finds it loaded
    children: dict[int, Connection] = {}
    for channel in channels:
        children[fork(channel, judge, settings, libc)] = channel
    while children:
        pid, status = os.wait()
        channel, code = children.pop(pid), os.waitstatus_to_exitcode(status)
        if code == CHANNEL_CLOSED:
            continue
        if code != RETIRED:
            with contextlib.suppress(OSError):  # where the other end is closed, the new child notices and ends
                send(channel, cause(code))
        children[fork(channel, judge, settings, libc)] = channel


def cause(code: int) -> dict[str, str]:
    """Why a child ended, by its exit code."""
    if code == -signal.SIGALRM:
        return {"failure": "timeout", "detail": ""}
    if code >= 0:
        return {"failure": "crash", "detail": f"the process ended with exit code {code}"}
    hint = " (by the kernel when memory runs out)" if code == -signal.SIGKILL else ""
    return {"failure": "crash", "detail": f"killed by {signal.Signals(-code).name}{hint}"}


def fork(channel: Connection, judge: Judge, settings: Settings, libc: ctypes.CDLL) -> int:
    """Start a child that serves ``channel``; returns its process id."""
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    code = 1  # of a child that fails outside a sample
    try:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(CHANNEL_CLOSED)
        # When memory runs out, the kernel should end this process and not the trainer. Some sandboxes lack the file.
        with contextlib.suppress(OSError):
            Path("/proc/self/oom_score_adj").write_text("1000")
        code = work(channel, judge, settings)
    except (EOFError, ConnectionError):  # the caller has closed the channel, or has gone
        code = CHANNEL_CLOSED
    except Exception:
        traceback.print_exc()
    finally:
        os._exit(code)


def work(channel: Connection, judge: Judge, settings: Settings) -> int:
    """Serve until memory has grown too much; returns the exit code. Raises EOFError: the channel is closed."""
    allowed = settings.memory_mb * 2**20
    start = address_space()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # ends the process without running Python code
    while address_space() <= start + allowed // 2:
        request = json.loads(channel.recv_bytes())
        resource.setrlimit(resource.RLIMIT_AS, (address_space() + allowed, resource.RLIM_INFINITY))
        signal.setitimer(signal.ITIMER_REAL, settings.timeout)
        reply = answer(judge, request["response"], request["truth"])
        signal.setitimer(signal.ITIMER_REAL, 0)
        send(channel, reply)
    return RETIRED


def answer(judge: Judge, response: str, truth: str) -> dict[str, Any]:
    """The reply to one request: a verdict, or the reason for none."""
    try:
        right, pred = judge(response, truth)
    except MemoryError:
        return {"failure": "memory", "detail": ""}
    except Exception as error:
        return {"failure": "error", "detail": f"{type(error).__name__}: {str(error)[:LONGEST]}"}
    # verl writes it to a dump in UTF-8, which has no lone surrogates.
    return {"right": bool(right), "pred": pred[:LONGEST].encode("utf-8", "replace").decode("utf-8")}


def address_space() -> int:
    """The size of this process's address space in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def send(channel: Connection, message: dict[str, Any]) -> None:
    channel.send_bytes(json.dumps(message).encode())


if __name__ == "__main__":
    main()
