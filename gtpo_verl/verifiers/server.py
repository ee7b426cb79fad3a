"""The verifier processes: a parent that has imported the rule, and one forked child per channel, replaced when it dies.

Answers can be hostile: 9^9^9, a thousand nested roots, or an input on which SymPy does not terminate. A thread cannot
be stopped, and one integer power holds the GIL for hours, so each sample is verified in a child under limits that the
kernel enforces:

- time: a timer whose signal ends the child, whatever it executes;
- memory: a limit on its address space;
- a crash affects the child only.

The parent has imported Math-Verify, has one thread, and only forks and waits, so a new child is ready within
milliseconds and shares the parent's memory. The parent reports on the channel why a child has died.

No process is left behind. A child ends when its channel is closed, which the kernel does when the process at the other
end dies; a busy child is ended by its timer; the parent ends with its last child.

``pool`` runs it as ``python -m gtpo_verl.verifiers.server SETTINGS``. A channel is a socket, a message one line of
JSON.
"""

import contextlib
import ctypes
import importlib
import json
import os
import resource
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

Judge = Callable[[str, str], tuple[bool, str]]

LINUX = sys.platform == "linux"
PR_SET_PDEATHSIG = 1  # linux/prctl.h
LONGEST = 512  # characters of an extracted answer that are returned

# Exit codes of a child that ended regularly; any other is due to its sample.
CHANNEL_CLOSED = 100
RETIRED = 101


@dataclass(frozen=True)
class Settings:
    """The rule, as a module with a function ``judge``, its options, and the limits per sample."""

    module: str
    options: dict[str, Any] = field(default_factory=dict)
    timeout: float = 10.0  # seconds
    memory_mb: int = 1024  # MiB that a sample may allocate
    channels: tuple[int, ...] = ()  # file descriptors

    def dump(self) -> str:
        return json.dumps(asdict(self))


def main() -> None:
    """Import the rule, report on the first channel, and serve until the channels are closed."""
    settings = Settings(**json.loads(sys.argv[1]))
    channels = [socket.socket(fileno=number) for number in settings.channels]
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
    children: dict[int, socket.socket] = {}
    for channel in channels:
        children[fork(channel, judge, settings, libc)] = channel
    while children:
        pid, status = os.wait()
        channel, code = children.pop(pid), os.waitstatus_to_exitcode(status)
        if code == CHANNEL_CLOSED:
            continue
        if code != RETIRED:
            # Where the other end is closed, the new child notices and ends.
            with contextlib.suppress(OSError):
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


def fork(channel: socket.socket, judge: Judge, settings: Settings, libc: ctypes.CDLL) -> int:
    """Start a child that serves ``channel``; returns its process id."""
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    code = 1  # of a child that fails outside a sample
    try:
        if LINUX:
            libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != parent:
                os._exit(CHANNEL_CLOSED)
            # When memory runs out, the kernel should end this process and not the trainer. Some sandboxes lack the
            # file.
            with contextlib.suppress(OSError):
                Path("/proc/self/oom_score_adj").write_text("1000")
        code = work(channel, judge, settings)
    except ConnectionError:  # the caller has gone between a request and its reply
        code = CHANNEL_CLOSED
    except Exception:
        traceback.print_exc()
    finally:
        os._exit(code)


def work(channel: socket.socket, judge: Judge, settings: Settings) -> int:
    """Serve until the channel is closed, or until memory has grown too much; returns the exit code."""
    allowed = settings.memory_mb * 2**20
    start = address_space()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # ends the process without running Python code
    for line in channel.makefile("rb"):
        request = json.loads(line)
        if LINUX:
            resource.setrlimit(resource.RLIMIT_AS, (address_space() + allowed, resource.RLIM_INFINITY))
        signal.setitimer(signal.ITIMER_REAL, settings.timeout)
        reply = answer(judge, request["response"], request["truth"])
        signal.setitimer(signal.ITIMER_REAL, 0)
        send(channel, reply)
        if address_space() > start + allowed // 2:
            return RETIRED
    return CHANNEL_CLOSED


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
    """The size of this process's address space in bytes; 0 where the system does not report it."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() if LINUX else 0


def send(channel: socket.socket, message: dict[str, Any]) -> None:
    """Send a message as one line of JSON in ASCII."""
    channel.sendall(json.dumps(message).encode("ascii") + b"\n")


if __name__ == "__main__":
    main()
