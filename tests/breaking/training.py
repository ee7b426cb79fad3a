"""A training as a command with all the processes that it starts, which can be found by kind and killed."""

import contextlib
import fcntl
import os
import pty
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import termios
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from gtpo_verl.errors import UserError
from gtpo_verl.files import read_json
from gtpo_verl.runs.directory import PHASE_FILE
from gtpo_verl.runs.state import status_of

# by what the title of the process holds
KINDS = {
    "trainer": "ray::TaskRunner",
    "FSDP worker": "ray::WorkerDict",
    "vLLM server": "LLMHttpServer",
    "vLLM engine": "VLLM::EngineCore",
    "agent loop": "AgentLoopWorker",
    "reward worker": "RewardLoopWorker",
    "queue controller": "ray::TransferQueueController",
    "queue storage": "ray::SimpleStorageUnit",
    "node daemon": "raylet/raylet",
    "cluster head": "gcs_server",
    "node agent": "ray::DashboardAgent",
    "environment agent": "ray::RuntimeEnvAgent",
}
DRIVER, CLUSTER = "driver", "whole cluster"
PHASES = {
    "starting": ("starting",),
    "generating": ("generating",),
    "updating": ("computing old log-probs", "updating the actor"),
    "saving": ("saving a checkpoint",),
    "sending weights": ("sending weights to the engines",),
}
SCAN = 1.0  # seconds between looks at the processes
LOOK = 0.1  # seconds between looks at the phase
CLOSE_LOOK = 0.003  # the same, before a kill
# Seconds after its end in which all processes of a training must have gone: after SIGKILL two of Ray's agents try to
# reach its head for a minute.
GONE_WITHIN = 120.0


class Phase(NamedTuple):
    """What the trainer began to do, and when; seconds since the command was started."""

    at: float
    step: int
    name: str

    @property
    def state(self) -> str:
        return next((state for state, names in PHASES.items() if self.name in names), self.name)


@dataclass
class Ended:
    """How a command ended.

    code: its exit code; None where it was still running at the limit and was killed. errors, warnings: its lines of
    either kind. seconds: since what was done to it, or its start. left: processes of it that were there `GONE_WITHIN`
    seconds later. traceback: whether its terminal showed a stack trace.
    """

    code: int | None
    errors: list[str]
    warnings: list[str]
    seconds: float
    left: list[str] = field(default_factory=list)
    traceback: bool = False

    def one_line(self) -> str:
        """What is wrong with the way in which the command reported an error, or nothing."""
        if self.code is None:
            return "it was still running at the limit"
        if self.code in (0, -signal.SIGKILL):
            return f"exit code {self.code}, and an error was expected"
        if len(self.errors) != 1 or self.traceback:
            return f"{len(self.errors)} lines of error" + ", with a stack trace" * self.traceback
        return ""


@contextlib.contextmanager
def turn(lock: Path | None) -> Iterator[None]:
    """Hold a file's lock, where other people's trainings on this machine hold it too."""
    if lock is None:
        yield
        return
    with lock.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


class Attempt:
    """A command that trains, with a directory of its own for Ray's files.

    Args:
        run_dir: of the training.
        overrides: of the command, without the run directory.
        user: id of the user that it runs as; None for this one.
        terminal: whether it runs in the foreground of a terminal, which `hang_up` closes.
    """

    def __init__(
        self, run_dir: Path, overrides: Sequence[str], *, user: int | None = None, terminal: bool = False
    ) -> None:
        self.run_dir = run_dir
        self.phases: list[Phase] = []
        self.seen: dict[str, float] = {}  # when a kind of process was first there
        self._terminal = run_dir.with_name(f"{run_dir.name}.terminal")
        self._terminal.parent.mkdir(parents=True, exist_ok=True)
        self._said_before = self._terminal.stat().st_size if self._terminal.exists() else 0
        self.ray_files = Path(tempfile.mkdtemp(prefix="chaos-"))  # short: Ray's sockets lie in it
        self.ray_files.chmod(0o777)
        command = [sys.executable, "-m", "gtpo_verl.train", *overrides, f"trainer.run_dir={run_dir}"]
        self._began = time.time()
        self._started = self.touched = time.monotonic()
        environment = os.environ | {"RAY_TMPDIR": str(self.ray_files), "PYTHONUNBUFFERED": "1"}
        options: dict[str, Any] = {"cwd": run_dir.parent, "start_new_session": True, "user": user, "env": environment}
        options["preexec_fn"] = lambda: _as_from_a_shell(terminal)
        self._hung_up = threading.Event()
        if terminal:
            screen, keyboard = pty.openpty()
            self.process = psutil.Popen(command, stdin=keyboard, stdout=keyboard, stderr=keyboard, **options)
            os.close(keyboard)
            self._copying = threading.Thread(target=self._copy_screen, args=(screen,), daemon=True)
            self._copying.start()
        else:
            with self._terminal.open("ab") as file:
                self.process = psutil.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, **options
                )
        self._all: dict[int, psutil.Process] = {self.process.pid: self.process}
        self._titles: dict[int, str] = {}
        self._scanned = 0.0
        self._version: object = None

    # ------------------------------------------------------------ looking

    @property
    def age(self) -> float:
        """Seconds since it was started."""
        return time.monotonic() - self._started

    @property
    def phase(self) -> Phase | None:
        """What the trainer does; None before it says so."""
        return self.phases[-1] if self.phases else None

    def look(self, *, scan: bool = True) -> None:
        """Read the phase; where it is time, look for processes."""
        file = self.run_dir / PHASE_FILE
        with contextlib.suppress(OSError, ValueError):
            version = file.stat().st_ino, file.stat().st_mtime_ns
            if version != self._version:
                content = read_json(file)
                if content["since"] >= self._began:
                    self.phases.append(Phase(self.age, content["step"], content["phase"]))
                self._version = version
        if scan and time.monotonic() - self._scanned > SCAN:
            self._scan()

    def _scan(self) -> None:
        running = {process.pid: process for process in psutil.process_iter(["ppid"])}
        parents = {process.pid for process in self._living()}  # not those whose number somebody else has by now
        while parents:
            parents = {pid for pid, process in running.items() if process.info["ppid"] in parents} - self._all.keys()
            self._all |= {pid: running[pid] for pid in parents}
        for pid, process in self._all.items():
            with contextlib.suppress(psutil.Error):
                self._titles[pid] = " ".join(process.cmdline()) or self._titles.get(pid, "")
        for kind in KINDS:
            if kind not in self.seen and self.of_kind(kind):
                self.seen[kind] = self.age
        self._scanned = time.monotonic()

    def of_kind(self, kind: str) -> list[psutil.Process]:
        """Its processes of a kind that live, as of the last look."""
        if kind == DRIVER:
            return [self.process]
        if kind == CLUSTER:
            return list(self._all.values())
        found = [process for pid, process in self._all.items() if KINDS[kind] in self._titles.get(pid, "")]
        return [process for process in found if _lives(process)]

    def wait(self, until: Callable[["Attempt"], bool], limit: float, *, closely: bool = False) -> bool:
        """Look until something holds; False where the command has ended, or the limit (seconds) is over, before.

        Looking closely, it does not look for processes.
        """
        every = CLOSE_LOOK if closely else LOOK
        deadline = time.monotonic() + limit
        while time.monotonic() < deadline:
            self.look(scan=not closely)
            if until(self):
                return True
            if self.process.poll() is not None:
                return False
            time.sleep(every)
        return False

    # ------------------------------------------------------------ doing

    def send(self, kind: str, number: signal.Signals = signal.SIGKILL) -> None:
        """Send a signal to one process of a kind, or to all of the cluster at once."""
        targets = self.of_kind(kind)
        for target in targets if kind == CLUSTER else targets[:1]:
            with contextlib.suppress(psutil.NoSuchProcess):
                target.send_signal(number)
        self.touched = time.monotonic()

    def hang_up(self) -> None:
        """Close its terminal: the kernel sends SIGHUP, and whatever it shows afterwards is an error (EIO)."""
        self._hung_up.set()
        self._copying.join()
        self.touched = time.monotonic()

    def _copy_screen(self, screen: int) -> None:
        with contextlib.suppress(OSError), self._terminal.open("ab", buffering=0) as file:
            while not self._hung_up.is_set():
                if select.select([screen], [], [], 0.02)[0]:
                    file.write(os.read(screen, 65536).replace(b"\r\n", b"\n"))
        os.close(screen)

    def end(self, limit: float) -> Ended:
        """Wait for its end; at the limit (seconds) it is killed. Nothing of it is left afterwards."""
        self.wait(lambda attempt: False, limit)
        code = self.process.poll()
        seconds = time.monotonic() - self.touched
        if code is None:
            self.kill()
        return Ended(
            code, self._lines("error: "), self._lines("warning: "), round(seconds, 1), self._left(code), self._traced()
        )

    def _left(self, code: int | None) -> list[str]:
        """Titles of the processes that outlive the command for `GONE_WITHIN` seconds; they are killed."""
        deadline = time.monotonic() + (GONE_WITHIN if code is not None else 0)
        while self._living() and time.monotonic() < deadline:
            time.sleep(0.5)
            self._scan()
        left = [self._titles.get(process.pid, "?")[:60].strip() for process in self._living()]
        self.kill()
        return left if code is not None else []

    def _living(self) -> list[psutil.Process]:
        return [process for process in self._all.values() if _lives(process)]

    def kill(self) -> None:
        """Kill all that is left of it and remove Ray's files."""
        self._scan()
        for process in self._all.values():
            with contextlib.suppress(psutil.Error):
                process.kill()
        self._scan()  # what a process made just before it was killed
        for process in self._living():
            with contextlib.suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(list(self._all.values()), timeout=10)
        self.process.poll()
        shutil.rmtree(self.ray_files, ignore_errors=True)

    def said(self) -> str:
        """What it showed on its terminal."""
        with self._terminal.open("rb") as terminal:
            terminal.seek(self._said_before)
            return terminal.read().decode("utf-8", "replace")

    def _lines(self, start: str) -> list[str]:
        return [line.removeprefix(start) for line in self.said().splitlines() if line.startswith(start)]

    def _traced(self) -> bool:
        return "Traceback (most recent call last)" in self.said()


def _as_from_a_shell(terminal: bool) -> None:
    """In a process that is being started: hear SIGHUP also under nohup; take the standard input as its terminal."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    if terminal:
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def _lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def status_line(run_dir: Path) -> str:
    """What `gtpo-verl status` says of a run: its state, and why."""
    try:
        status = status_of(run_dir)
    except UserError as error:
        return f"no record: {error}"
    return f"{status.state}: {status.why}"
