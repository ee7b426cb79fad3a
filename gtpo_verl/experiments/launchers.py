"""Where the runs of a sweep run: in processes of this machine, or as jobs of a Ray cluster."""

import ctypes
import os
import re
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from omegaconf import DictConfig

from gtpo_verl.errors import UserError, reason_in
from gtpo_verl.experiments.handover import HandOver
from gtpo_verl.experiments.package import carried_files
from gtpo_verl.experiments.request import in_job
from gtpo_verl.planning.memory import GIB, known_host_memory, machine_memory, total_of
from gtpo_verl.runs.directory import STOP_FILE
from gtpo_verl.runs.terminal import LOG_FILE

if TYPE_CHECKING:
    from gtpo_verl.experiments.jobs import Jobs  # it needs Ray

TRAIN = (sys.executable, "-m", "gtpo_verl.train")
CPU_CORES = 1  # of a training on a CPU, by rank: alone on two cores it leaves half of them idle
CPU_MEMORY = 7 * GIB  # of a training on a CPU, by rank, at least
# A Ray of its own for each run, also on a machine where a cluster is running.
OWN_RAY = "++ray_kwargs.ray_init.address=local"
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_libc = ctypes.CDLL(None)  # loaded before a process forks, not after


class Launcher(Protocol):
    """Starts attempts at runs. An attempt is known by its run directory and its number."""

    capacity: int  # runs at once
    cluster: str | None  # dashboard of the Ray cluster that remembers the runs when this process is killed

    def start(self, run_dir: Path, attempt: int, overrides: Sequence[str]) -> bool:
        """Start an attempt; False if it is known to have been started before."""

    def is_running(self, run_dir: Path, attempt: int) -> bool:
        """Whether the attempt was started and has not ended."""

    def stop(self, run_dir: Path, attempt: int, *, at_once: bool) -> None:
        """Ask for a stop after the step, with a checkpoint; called again and again until the attempt has ended."""

    def reason(self, run_dir: Path, attempt: int) -> str:
        """Why an attempt ended, in one line."""

    def close(self) -> None:
        """End what must not outlive this process."""


class LocalLauncher:
    """Runs as child processes, each in a session of its own, so that Ctrl-C reaches them only when passed on.

    When this process is killed, they are asked to stop. What they print is appended to their `train.log`. ``slots``:
    environment variables for each of the runs at once, which give every run its own GPUs.
    """

    def __init__(self, slots: Sequence[Mapping[str, str]], *, program: Sequence[str] = TRAIN) -> None:
        self.capacity = len(slots)
        self.cluster: str | None = None
        self._free = list(slots)
        self._program = program
        self._processes: dict[Path, tuple[subprocess.Popen[bytes], Mapping[str, str]]] = {}
        self._asked: dict[Path, int] = {}  # how often each was asked to stop

    def start(self, run_dir: Path, attempt: int, overrides: Sequence[str]) -> bool:
        slot = self._free[0]
        run_dir.mkdir(parents=True, exist_ok=True)
        with (run_dir / LOG_FILE).open("a") as log:
            process = subprocess.Popen(
                [*self._program, *overrides, OWN_RAY],
                env={**os.environ, **slot},
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                preexec_fn=_stop_with_parent,
            )
        self._free.remove(slot)  # only now: a start that fails, as for lack of memory, is repeated
        self._processes[run_dir] = process, slot
        return True

    def is_running(self, run_dir: Path, attempt: int) -> bool:
        if run_dir not in self._processes:
            return False
        if self._processes[run_dir][0].poll() is None:
            return True
        self._free.append(self._processes.pop(run_dir)[1])
        self._asked.pop(run_dir, None)
        return False

    def stop(self, run_dir: Path, attempt: int, *, at_once: bool) -> None:
        asked = self._asked.get(run_dir, 0)
        if run_dir not in self._processes:  # of a sweep that was killed
            (run_dir / STOP_FILE).touch()
        elif asked < (2 if at_once else 1):  # one signal a call: two at the same moment would be one
            if not (asked or at_once) and (run_dir / STOP_FILE).exists():
                return  # it is stopping and would take a signal for "at once"; one that starts removes the file
            self._asked[run_dir] = asked + 1
            self._processes[run_dir][0].send_signal(signal.SIGINT)

    def reason(self, run_dir: Path, attempt: int) -> str:
        with (run_dir / LOG_FILE).open(errors="replace") as log:
            return reason_in(deque(log, maxlen=200)) or "it printed nothing."

    def close(self) -> None:
        for process, _ in self._processes.values():
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def _stop_with_parent() -> None:
    """In a child: ask the kernel for SIGINT when the parent dies."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGINT)


class RayLauncher:
    """Runs as jobs of a Ray cluster, which go on when this process is killed.

    The id of a job is made of run directory and attempt, so that the cluster itself refuses to run one twice.
    """

    def __init__(self, jobs: "Jobs", capacity: int) -> None:
        self.capacity = capacity
        self.cluster: str | None = jobs.address
        self._jobs = jobs

    def start(self, run_dir: Path, attempt: int, overrides: Sequence[str]) -> bool:
        found = tuple(in_job(overrides, Path.cwd()))
        task = HandOver(action="train", run_dir=str(run_dir), overrides=found, wait=True)
        return self._jobs.submit(task, job_id(run_dir, attempt), Path.cwd(), carried_files(Path.cwd()))

    def is_running(self, run_dir: Path, attempt: int) -> bool:
        return self._jobs.status(job_id(run_dir, attempt)) in ("PENDING", "RUNNING")

    def stop(self, run_dir: Path, attempt: int, *, at_once: bool) -> None:
        if at_once or self._jobs.status(job_id(run_dir, attempt)) == "PENDING":
            self._jobs.stop(job_id(run_dir, attempt), grace=0)
        elif run_dir.is_dir():  # again and again, since a training that starts removes the file of an earlier stop
            (run_dir / STOP_FILE).touch()

    def reason(self, run_dir: Path, attempt: int) -> str:
        job = self._jobs.info(job_id(run_dir, attempt))
        return "the job is unknown to the cluster." if job is None else job.reason

    def close(self) -> None:
        """The cluster keeps its jobs."""


def job_id(run_dir: Path, attempt: int) -> str:
    """The id of the Ray job of an attempt at a run: the run's name, a digest of its directory, the attempt."""
    name = re.sub(r"[^\w.-]+", "-", run_dir.name)[:80]
    return f"{name}-{blake2b(str(run_dir).encode(), digest_size=5).hexdigest()}-{attempt}"


# -------------------------------------------------------------------- how many at once


def gpus_of(config: DictConfig) -> int:
    """The GPUs of a run, those of the rollout's own servers and of a guide's included; on a CPU its ranks."""
    from gtpo_verl.integrations.standalone import guide_of  # imports torch

    rollout, trainer = config.actor_rollout_ref.rollout, config.trainer
    servers = rollout.nnodes * rollout.n_gpus_per_node if trainer.v1.trainer_mode == "separate_async" else 0
    return int(trainer.nnodes * trainer.n_gpus_per_node + servers + guide_of(config).devices)


def local_slots(configs: Sequence[DictConfig], parallel: int | None) -> list[dict[str, str]]:
    """Slots for as many runs as fit on this machine, or ``parallel``, each with its own GPUs. UserError: none fits."""
    needed = max(gpus_of(config) for config in configs)
    if all(config.trainer.device == "cpu" for config in configs):
        known = [total_of(parts) for parts in map(known_host_memory, configs) if parts]
        _, free = machine_memory()
        memory = int(free / max([*known, CPU_MEMORY * needed]))
        cores = len(os.sched_getaffinity(0)) // (CPU_CORES * needed)
        return [{} for _ in range(parallel or max(1, min(memory, cores)))]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        import torch

        visible = ",".join(map(str, range(torch.cuda.device_count())))
    gpus = list(filter(None, visible.split(",")))
    fitting = len(gpus) // needed
    count = parallel or max(1, fitting)
    if count > fitting:
        raise UserError(
            f"--local: {count} run{'s' * (count > 1)} of {needed} GPUs do not fit on this machine, which has "
            f"{len(gpus)}. Without --local the runs are jobs of a Ray cluster."
        )
    return [{"CUDA_VISIBLE_DEVICES": ",".join(gpus[i * needed : (i + 1) * needed])} for i in range(count)]


def cluster_slots(configs: Sequence[DictConfig], dashboard: str) -> int:
    """How many runs fit on a Ray cluster at once, by its GPUs, which on CPUs are logical; at least 1."""
    from ray.util.state import list_nodes

    nodes = list_nodes(address=dashboard, filters=[("state", "=", "ALIVE")])
    gpus = sum((node.resources_total or {}).get("GPU", 0) for node in nodes)
    return max(1, int(gpus // max(gpus_of(config) for config in configs)))
