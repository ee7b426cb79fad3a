"""Locks on directories: one training per run directory, one process that prepares a data directory.

The lock itself is flock, which the kernel releases when a process dies. On a shared file system flock may work within
one host only, or outlive a host that dies. So the owner also records its host, process id and a heartbeat beside the
lock file, and an owner on another host counts as dead when its heartbeat is older than ``LEASE``.
"""

import errno
import os
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import psutil
from filelock import FileLock, Timeout

from gtpo_verl.errors import UserError
from gtpo_verl.files import read_json, reading, write_json
from gtpo_verl.runs.directory import STOP_FILE

LOCK_FILE = "LOCK"
OWNER_FILE = f"{LOCK_FILE}.json"
HEARTBEAT = 30.0  # seconds between two heartbeats
LEASE = 300.0  # seconds without a heartbeat after which an owner on another host is dead; clocks must agree to a minute
GRACE = 600.0  # seconds that a training which was asked to stop may take for its step and checkpoint
SETTLE = 1.0  # seconds in which another host that takes over the same lock shows
POLL = 0.5  # seconds
WITHOUT_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)


@dataclass(frozen=True)
class Owner:
    """Who holds a lock; ``heartbeat`` in seconds of Unix time."""

    host: str
    pid: int
    heartbeat: float
    token: str
    namespace: str = ""  # of the process id: a container's own ids mean nothing outside it

    @property
    def is_remote(self) -> bool:
        return self.host != socket.gethostname()

    @property
    def age(self) -> float:
        """Seconds since the last heartbeat."""
        return time.time() - self.heartbeat

    @property
    def is_dead(self) -> bool:
        elsewhere = self.is_remote or self.namespace not in ("", _namespace())
        return self.age > LEASE or not (elsewhere or psutil.pid_exists(self.pid))

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


def _namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def live_owner(directory: Path) -> Owner | None:
    """Who has locked a directory, as the record says, without touching the lock; None where nobody alive has."""
    owner = _recorded(directory / OWNER_FILE)
    return None if owner is None or owner.is_dead else owner


def _recorded(record: Path) -> Owner | None:
    with reading(record):
        values = read_json(record)
        if not values:
            return None
        owner = Owner(**values)
        if not 0 < owner.pid < 2**31:
            raise ValueError(f"pid is {owner.pid}")
        return replace(owner, heartbeat=float(owner.heartbeat))


def is_of_lock(file: Path) -> bool:
    """Whether a file belongs to the lock of its directory, as one does that a process which was killed left behind."""
    return file.name.removeprefix(".").startswith(LOCK_FILE)


class LockedError(Exception):
    """The lock is held. ``owner`` is None where a process has taken it and not yet recorded itself."""

    def __init__(self, owner: Owner | None) -> None:
        super().__init__(str(owner or "a process that is just starting"))
        self.owner = owner


class DirectoryLock:
    """A lock with an owner that other hosts can read.

    Args:
        file: the lock file, made if need be; ``FILE.json`` beside it holds the owner.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        self.owner_file = file.with_name(f"{file.name}.json")
        # whichever thread ends the block releases it
        self._flock = FileLock(file, thread_local=False, fallback_to_soft=False)
        self._token = uuid.uuid4().hex  # different for every acquisition
        self._released = threading.Event()
        self._heart = threading.Thread(target=self._beat, name="lock-heartbeat", daemon=True)

    def acquire(self) -> None:
        """Take the lock, without waiting. LockedError: somebody holds it."""
        locked, former = self._try_flock(), self.owner()
        # whom flock does not tell of: on another host, or where there are no locks
        other = former if former is not None and (former.is_remote or locked is None) else None
        dead = other is not None and other.is_dead
        if dead and locked is False:
            self.file.unlink(missing_ok=True)  # a new file has a new lock
            locked = self._try_flock()
        if locked is False:
            raise LockedError(self.owner())
        if other and not dead:  # flock works within one host here, or not at all
            self._flock.release()
            raise LockedError(other)
        self._record()
        if other:
            age = f"no heartbeat for {other.age:.0f} s"
            print(f"Taking over {self.file} from {other}: {age}.", file=sys.stderr, flush=True)
            time.sleep(SETTLE)
            if not self._is_ours():  # of two hosts that take over at once the last to record itself wins
                self._flock.release()
                raise LockedError(self.owner())
        self._heart.start()

    def owner(self) -> Owner | None:
        """The owner as recorded, None where there is none."""
        return _recorded(self.owner_file)

    def release(self) -> None:
        """Give the lock up."""
        self._released.set()
        self._heart.join()
        if self._is_ours():
            self.owner_file.unlink()
        self._flock.release()

    def _try_flock(self) -> bool | None:
        """Whether the file is locked now; None where the file system has no locks and only the record protects."""
        self.file.parent.mkdir(parents=True, exist_ok=True)
        self.file.touch()  # where it cannot be made, filelock would take it for held
        try:
            self._flock.acquire(timeout=0)
        except Timeout:
            return False
        except OSError as error:
            if error.errno not in WITHOUT_LOCKS:
                raise
            return None
        return True

    def _record(self) -> None:
        owner = Owner(socket.gethostname(), os.getpid(), time.time(), self._token, _namespace())
        write_json(self.owner_file, asdict(owner))

    def _is_ours(self) -> bool:
        owner = self.owner()
        return owner is not None and owner.token == self._token

    def _beat(self) -> None:
        while not self._released.wait(HEARTBEAT):
            try:
                if not self._is_ours():
                    print(f"warning: {self.file} was taken over by {self.owner()}", file=sys.stderr, flush=True)
                    return
                self._record()
            except (OSError, UserError) as error:  # a shared file system that is away for a moment, or half a file
                print(f"warning: no heartbeat for {self.file}: {error}", file=sys.stderr, flush=True)


@contextmanager
def training_lock(run_dir: Path) -> Iterator[None]:
    """Keep other trainings out of a run directory; one that is already stopping there has a grace period.

    Raises:
        UserError: another training writes to it.
    """
    lock, stop = DirectoryLock(run_dir / LOCK_FILE), run_dir / STOP_FILE
    deadline = time.monotonic() + GRACE
    seen: float | None = None  # the first heartbeat of an owner on another host

    def wait(error: LockedError) -> str:
        nonlocal seen
        if stop.exists() and time.monotonic() <= deadline:
            return f"Waiting for {error}, which is stopping in {run_dir}."
        owner = error.owner
        if owner is not None and owner.is_remote and seen in (None, owner.heartbeat):
            seen = owner.heartbeat
            return (
                f"Waiting to see whether {error} lives: its last heartbeat was {owner.age:.0f} s ago, and after "
                f"{LEASE:.0f} s it is taken for dead."
            )
        raise UserError(
            f"another training writes to {run_dir}: {error}. Stop it with Ctrl-C, or with `touch {stop}` from "
            "elsewhere, or choose another trainer.run_dir."
        ) from None

    with _held(lock, wait, lambda line: print(line, file=sys.stderr, flush=True)):
        yield


@contextmanager
def sweep_lock(directory: Path) -> Iterator[None]:
    """Be the only process that schedules the runs in a directory. UserError: another one does."""
    remedy = f"Ctrl-C there stops it, or `touch {directory / STOP_FILE}` from elsewhere."
    with _alone(directory / LOCK_FILE, f"trains the runs in {directory}", remedy):
        yield


@contextmanager
def results_lock(file: Path) -> Iterator[None]:
    """Be the only process that samples into the results beside this lock file. UserError: another one does."""
    with _alone(file, f"samples into {file.parent}", "Choose another --output."):
        yield


@contextmanager
def _alone(file: Path, does: str, remedy: str) -> Iterator[None]:
    """Hold the lock, without waiting. UserError: another process has it, with what that one does and the remedy."""

    def refuse(error: LockedError) -> str:
        raise UserError(f"another process {does}: {error}. {remedy}") from error

    with _held(DirectoryLock(file), refuse, print):
        yield


def ask_to_stop(run_dir: Path) -> bool:
    """Ask the training in a run directory to stop after its step, by the file ``STOP``; False if none runs there."""
    if live_owner(run_dir) is None:
        return False
    (run_dir / STOP_FILE).touch()
    return True


@contextmanager
def preparing(directory: Path, announce: Callable[[str], object]) -> Iterator[None]:
    """Be the only process that prepares ``directory``; waits for another one that does, which ``announce`` names.

    The directory may be replaced while the lock is held: the lock file ``.NAME.lock`` lies beside it.
    """
    lock = DirectoryLock(directory.parent / f".{directory.name}.lock")
    with _held(lock, lambda error: f"{error} is preparing {directory}; waiting for it", announce):
        yield


@contextmanager
def _held(lock: DirectoryLock, wait: Callable[[LockedError], str], announce: Callable[[str], object]) -> Iterator[None]:
    """Hold ``lock``. ``wait`` is called after a failed attempt and may raise; its first line is announced."""
    announced = False
    while True:
        try:
            lock.acquire()
            break
        except LockedError as error:
            line = wait(error)
            if not announced:
                announce(line)
            announced = True
            time.sleep(POLL)
    try:
        yield
    finally:
        lock.release()
