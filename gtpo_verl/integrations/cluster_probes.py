"""What ``gtpo-verl doctor --cluster`` asks the nodes of a running Ray cluster."""

import ctypes.util
import platform
import statistics
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import ray
import torch
import torch.distributed as dist
from ray.exceptions import GetTimeoutError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from gtpo_verl.errors import UserError
from gtpo_verl.integrations.probes import measure_entropies, save_probe_model
from gtpo_verl.versions import installed_version

PACKAGES = ("gtpo-verl", "verl", "vllm", "torch", "ray", "transformers", "TransferQueue")
RDMA = Path("/sys/class/infiniband")  # a directory for every InfiniBand or RoCE port that the kernel drives
TIMEOUT = 180.0  # seconds in which the ranks of an all-reduce have their devices and have measured
VLLM_TIMEOUT = 600.0  # seconds in which a vLLM worker has answered
ROUNDS = 5


@dataclass(frozen=True)
class NodeView:
    """What a worker finds on its node; ``rdma`` are ports that are up, ``model`` is empty where all can be read."""

    versions: dict[str, str]
    gpus: tuple[str, ...]
    driver: str
    rdma: tuple[str, ...]
    rdma_library: bool
    model: str

    def hardware(self) -> str:
        """GPUs, driver and RDMA in words.

        Raises:
            UserError: the model cannot be read here, or there are ports for RDMA and no library for them.
        """
        if self.model:
            raise UserError(f"{self.model}: the model must be readable under the same path on every node.")
        if self.rdma and not self.rdma_library:
            raise UserError(
                f"RDMA on {', '.join(self.rdma)} and no libibverbs, without which NCCL falls back to TCP: install "
                "libibverbs1, ibverbs-providers and librdmacm1 there."
            )
        gpus = f"{len(self.gpus)} × {self.gpus[0]}, driver {self.driver}" if self.gpus else "no NVIDIA GPU"
        return f"{gpus}; {'RDMA on ' + ', '.join(self.rdma) if self.rdma else 'no RDMA device: NCCL uses TCP'}"


def look(*models: str) -> NodeView:
    """Look at this node; a worker's function.

    Args:
        models: directories whose weights are tried.
    """
    gpus = _nvidia_smi("name")
    versions = {name: installed_version(name) or "missing" for name in PACKAGES}
    return NodeView(
        versions={"Python": platform.python_version(), **versions},
        gpus=tuple(gpus),
        driver=next(iter(_nvidia_smi("driver_version")), ""),
        rdma=tuple(_rdma_ports()),
        rdma_library=ctypes.util.find_library("ibverbs") is not None,
        model=next(filter(None, (_unreadable(Path(model)) for model in models)), ""),
    )


def _nvidia_smi(field: str) -> list[str]:
    """One value for each GPU of the machine; none where there is no driver."""
    try:
        done = subprocess.run(
            ["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader"], capture_output=True, text=True, timeout=60
        )
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return []
    return done.stdout.splitlines() if done.returncode == 0 else []


def _rdma_ports() -> list[str]:
    """Ports that are active, as ``mlx5_0/1``."""
    states = RDMA.glob("*/ports/*/state")
    return sorted(f"{state.parts[-4]}/{state.parts[-2]}" for state in states if "ACTIVE" in state.read_text())


def _unreadable(model: Path) -> str:
    """What keeps this node from reading a model's configuration and weights, or an empty string."""
    if not (model / "config.json").is_file():
        return f"{model} has no config.json"
    weights = sorted(model.glob("*.safetensors"))
    if not weights:
        return f"{model} has no *.safetensors"
    for file in (model / "config.json", *weights):
        try:
            with file.open("rb") as opened:
                opened.read(4096)
        except OSError as error:
            return f"{file}: {error.strerror}"
    return ""


def alike(views: Sequence[NodeView]) -> str:
    """What all nodes have in common.

    Raises:
        UserError: versions, drivers, GPUs or ports differ; with the values that were found.
    """
    rows = [
        view.versions | {"driver": view.driver, "GPUs": ", ".join(view.gpus), "RDMA": ", ".join(view.rdma)}
        for view in views
    ]
    values = {name: sorted({row[name] or "none" for row in rows}) for name in rows[0]}
    different = [f"{name} {' and '.join(found)}" for name, found in values.items() if len(found) > 1]
    if different:
        raise UserError(f"the nodes differ: {'; '.join(different)}.")
    return f"{len(views)} alike: " + ", ".join(f"{name} {version}" for name, version in views[0].versions.items())


# -------------------------------------------------------------------- all-reduce


@dataclass(frozen=True)
class Bandwidth:
    """Bus bandwidth of an all-reduce, as NCCL's tests define it: what each link carries, whatever the ranks."""

    backend: str
    ranks: int
    bytes: int
    seconds: float

    @property
    def gigabytes_per_second(self) -> float:
        return 2 * (self.ranks - 1) / self.ranks * self.bytes / self.seconds / 1e9

    def __str__(self) -> str:
        return f"{self.gigabytes_per_second:.2f} GB/s over {self.backend}, {self.ranks} ranks, {self.bytes >> 20} MiB"


class Rank:
    """One rank of an all-reduce; a Ray actor."""

    def open(self) -> tuple[str, int]:
        """Open the store at which the ranks meet; returns its address."""
        address = ray.util.get_node_ip_address().strip("[]")
        self._store = dist.TCPStore(address, 0, is_master=True, wait_for_workers=False)
        return address, self._store.port

    def seconds(self, address: tuple[str, int], rank: int, ranks: int, backend: str, size: int) -> float:
        """Median seconds of an all-reduce of ``size`` bytes.

        Raises:
            UserError: the sum is wrong.
        """
        limit = timedelta(seconds=TIMEOUT)
        store = self._store if rank == 0 else dist.TCPStore(*address, is_master=False, timeout=limit)
        dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=limit)
        device = "cuda" if backend == "nccl" else "cpu"
        try:
            tensor = torch.empty(size // 4, device=device)
            times = []
            for _ in range(1 + ROUNDS):  # the first one opens the connections
                tensor.fill_(1.0)
                dist.barrier()
                started = time.monotonic()
                dist.all_reduce(tensor)
                if device == "cuda":
                    torch.cuda.synchronize()
                times.append(time.monotonic() - started)
            if not bool((tensor == ranks).all()):
                raise UserError(f"an all-reduce of ones over {ranks} ranks was not {ranks}: the network is broken.")
            return statistics.median(times[1:])
        finally:
            dist.destroy_process_group()


def measure_all_reduce(gpus: dict[str, int]) -> Bandwidth:
    """Measure an all-reduce over the whole cluster: NCCL with a rank for every GPU, or gloo with one for every node.

    Args:
        gpus: {node id: number of NVIDIA GPUs}.

    Raises:
        UserError: the devices are taken, the ranks do not reach each other, or the sum is wrong.
    """
    on_gpus = any(gpus.values())
    places = [node for node, count in gpus.items() for _ in range(count if on_gpus else 1)]
    backend, size = ("nccl", 1 << 30) if on_gpus else ("gloo", 64 << 20)
    actor = ray.remote(num_cpus=0, num_gpus=int(on_gpus), max_restarts=0)(Rank)
    ranks: list[Any] = [
        actor.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote() for node in places
    ]
    try:
        address = ray.get(ranks[0].open.remote(), timeout=TIMEOUT)
        answers = [one.seconds.remote(address, i, len(ranks), backend, size) for i, one in enumerate(ranks)]
        return Bandwidth(backend, len(ranks), size, max(ray.get(answers, timeout=TIMEOUT)))
    except GetTimeoutError as error:
        raise UserError(
            f"{len(ranks)} ranks did not meet over {backend} within {TIMEOUT:.0f} s: are the devices free, and "
            f"{'NCCL' if on_gpus else 'GLOO'}_SOCKET_IFNAME right?"
        ) from error
    finally:
        for one in ranks:
            ray.kill(one)


# -------------------------------------------------------------------- vLLM


def measure_vllm(tensor_parallel: int) -> str:
    """Entropies of one vLLM worker somewhere in the cluster, compared with float64.

    Raises:
        UserError: there are none, or wrong ones, or no devices are free.
    """
    devices = tensor_parallel if "GPU" in ray.cluster_resources() else 0
    task: Any = ray.remote(num_cpus=1, num_gpus=devices, max_retries=0)(_entropies)
    try:
        return str(ray.get(task.remote(tensor_parallel), timeout=VLLM_TIMEOUT))
    except GetTimeoutError as error:
        raise UserError(f"no vLLM worker answered within {VLLM_TIMEOUT:.0f} s: are {devices} GPUs free?") from error


def _entropies(tensor_parallel: int) -> str:
    with tempfile.TemporaryDirectory() as directory:
        save_probe_model(Path(directory), tensor_parallel=tensor_parallel)
        return measure_entropies(directory, tensor_parallel=tensor_parallel)
