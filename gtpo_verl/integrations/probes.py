"""What ``gtpo-verl doctor`` asks a process, the nodes of a Ray cluster, the network between them and a vLLM worker."""

import ctypes.util
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import ray
import torch
import torch.distributed as dist
from ray.exceptions import GetTimeoutError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from gtpo_verl.errors import UserError
from gtpo_verl.runs.provenance import nvidia_smi
from gtpo_verl.versions import installed_version

PACKAGES = ("gtpo-verl", "verl", "vllm", "torch", "ray", "transformers", "TransferQueue")
RDMA = Path("/sys/class/infiniband")  # a directory for every InfiniBand or RoCE port that the kernel drives
ENTROPY_TOLERANCE = 1e-4  # nat, in float32 on a CPU
GPU_TOLERANCE = 3e-2  # nat: the float32 logits of vLLM's GPU kernels are less exact; 7e-3 was seen on an H200
TIMEOUT = 180.0  # seconds in which the ranks of an all-reduce have their devices and have measured
VLLM_TIMEOUT = 600.0  # seconds in which a vLLM worker has answered
ROUNDS = 5


def registered() -> str:
    """The names that the plugin has registered with verl in this process; raises a UserError where one is missing."""
    import verl  # noqa: F401  (loads the plugin)

    from gtpo_verl.integrations import plugin

    return ", ".join(plugin.check_registered())


# -------------------------------------------------------------------- nodes


HARDWARE = ("driver", "GPUs", "RDMA")


@dataclass(frozen=True)
class NodeView:
    """What a worker finds on its node: what all nodes should have alike, its hardware in words, and what is wrong."""

    common: dict[str, str]
    gpus: int
    hardware: str
    problem: str


def look(*models: str) -> NodeView:
    """Look at this node, and at these directories of models; a worker's function."""
    gpus, driver = nvidia_smi("name"), next(iter(nvidia_smi("driver_version")), "")
    states = RDMA.glob("*/ports/*/state")
    ports = sorted(f"{state.parts[-4]}/{state.parts[-2]}" for state in states if "ACTIVE" in state.read_text())
    problems = [*map(unreadable, models)]
    if ports and ctypes.util.find_library("ibverbs") is None:
        problems.append(
            f"RDMA on {', '.join(ports)} and no libibverbs, without which NCCL falls back to TCP: install libibverbs1, "
            "ibverbs-providers and librdmacm1 there."
        )
    return NodeView(
        common={"Python": platform.python_version()}
        | {name: installed_version(name) or "missing" for name in PACKAGES}
        | dict(zip(HARDWARE, (driver, ", ".join(gpus), ", ".join(ports)), strict=True)),
        gpus=len(gpus),
        hardware=(f"{len(gpus)} × {gpus[0]}, driver {driver}" if gpus else "no NVIDIA GPU")
        + (f"; RDMA on {', '.join(ports)}" if ports else "; no RDMA device: NCCL uses TCP"),
        problem=next(filter(None, problems), ""),
    )


def unreadable(model: str) -> str:
    """What keeps this node from reading a model's configuration and weights, or an empty string."""
    directory = Path(model)
    try:
        for patterns in (("config.json",), ("*.safetensors", "*.bin")):
            files = sorted(file for pattern in patterns for file in directory.glob(pattern))
            if not files:
                raise OSError(0, f"{directory} has no {' or '.join(patterns)}")
            for file in files:
                with file.open("rb") as opened:
                    opened.read(4096)
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        return f"{where}{error.strerror}: the model must be readable under the same path on every node."
    return ""


def alike(views: Sequence[NodeView]) -> str:
    """The versions that all nodes have.

    Raises UserError: versions differ, or drivers, GPUs or ports of nodes with GPUs; with the values that were found.
    """
    rows, with_gpus = [view.common for view in views], [view.common for view in views if view.gpus]
    values = {
        name: sorted({row[name] or "none" for row in (with_gpus if name in HARDWARE else rows)}) for name in rows[0]
    }
    different = [f"{name} {' and '.join(found)}" for name, found in values.items() if len(found) > 1]
    if different:
        raise UserError(f"the nodes differ: {'; '.join(different)}.")
    return f"{len(views)} alike: " + ", ".join(f"{name} {rows[0][name]}" for name in ("Python", *PACKAGES))


# -------------------------------------------------------------------- all-reduce


class Rank:
    """One rank of an all-reduce; a Ray actor."""

    def open(self) -> tuple[str, int]:
        """Open the store at which the ranks meet; returns its address."""
        address = ray.util.get_node_ip_address().strip("[]")
        self._store = dist.TCPStore(address, 0, is_master=True, wait_for_workers=False)
        return address, self._store.port

    def seconds(self, address: tuple[str, int], rank: int, ranks: int, backend: str, size: int) -> float:
        """Median seconds of an all-reduce of ``size`` bytes.

        Raises UserError: the sum is wrong.
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


def bus_bandwidth(ranks: int, size: int, seconds: float) -> float:
    """GB/s of an all-reduce of ``size`` bytes as NCCL's tests define it: what each link carries, whatever the ranks."""
    return 2 * (ranks - 1) / ranks * size / seconds / 1e9


def measure_all_reduce(gpus: dict[str, int]) -> str:
    """Measure an all-reduce over the whole cluster: NCCL with a rank for every GPU, or gloo with one for every node.

    gpus: {node id: number of NVIDIA GPUs}.
    Raises UserError: the devices are taken, the ranks do not reach each other, or the sum is wrong.
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
        rate = bus_bandwidth(len(ranks), size, max(ray.get(answers, timeout=TIMEOUT)))
    except GetTimeoutError as error:
        raise UserError(
            f"{len(ranks)} ranks did not meet over {backend} within {TIMEOUT:.0f} s: are the devices free, and "
            f"{'NCCL' if on_gpus else 'GLOO'}_SOCKET_IFNAME right?"
        ) from error
    finally:
        for one in ranks:
            ray.kill(one)
    return f"{rate:.2f} GB/s over {backend}, {len(ranks)} ranks, {size >> 20} MiB"


# -------------------------------------------------------------------- vLLM


def measure_vllm(tensor_parallel: int = 1) -> str:
    """`measure_entropies` in a worker somewhere in the cluster; raises a UserError also where no devices are free."""
    devices = tensor_parallel if "GPU" in ray.cluster_resources() else 0
    task: Any = ray.remote(num_cpus=1, num_gpus=devices, max_retries=0)(measure_entropies)
    try:
        return str(ray.get(task.remote(tensor_parallel), timeout=VLLM_TIMEOUT))
    except GetTimeoutError as error:
        raise UserError(f"no vLLM worker answered within {VLLM_TIMEOUT:.0f} s: are {devices} GPUs free?") from error


def measure_entropies(tensor_parallel: int = 1) -> str:
    """Compare the entropies that vLLM returns for a few tokens of a tiny model with those of transformers in float64.

    Raises UserError: there are no entropies, or wrong ones.
    """
    errors = entropy_errors(tensor_parallel=tensor_parallel)
    error = errors.max().item()
    if error > (GPU_TOLERANCE if torch.cuda.is_available() else ENTROPY_TOLERANCE):
        raise UserError(
            f"entropies from vLLM are off by {error:.1e} nat: report this with the output of `gtpo-verl doctor`."
        )
    return f"entropies of {len(errors)} tokens, {error:.0e} nat from float64"


def entropy_errors(
    *,
    tensor_parallel: int = 1,
    dtype: Literal["float32", "bfloat16"] = "float32",
    rows: int = 1,
    tokens: int = 16,
    vocabulary: int = 256,
    eager: bool = True,
) -> torch.Tensor:
    """Sample `rows` sequences of `tokens` from a tiny model with vLLM, and return the differences in nat, (rows ·
    tokens,) float64, between the entropies it returns and those of transformers in float64. In bfloat16 most of a
    difference is the model's arithmetic. eager: without CUDA graphs.

    Raises UserError: vLLM returned no entropies.
    """
    os.environ["GTPO_VERL_ROLLOUT_ENTROPY"] = "1"
    import verl  # noqa: F401  (loads the plugin)
    from transformers import AutoModelForCausalLM
    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt

    from gtpo_verl.integrations.vllm import WORKER_EXTENSION
    from gtpo_verl.integrations.vllm.codec import completion_entropies

    with tempfile.TemporaryDirectory() as directory:
        _save_model(directory, vocabulary, tensor_parallel)
        engine = LLM(
            model=directory,
            skip_tokenizer_init=True,
            dtype=dtype,
            max_model_len=64,
            max_num_seqs=rows,  # vLLM reserves several times the logits of so many
            enforce_eager=eager,
            logprobs_mode="processed_logprobs",
            worker_extension_cls=WORKER_EXTENSION,
            gpu_memory_utilization=0.1,
            tensor_parallel_size=tensor_parallel,
        )
        model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float64)
    prompts = [[5 + row, 6, 7] for row in range(rows)]
    sampling = SamplingParams(temperature=0.8, max_tokens=tokens, logprobs=0, ignore_eos=True, detokenize=False)
    outputs = engine.generate([TokensPrompt(prompt_token_ids=prompt) for prompt in prompts], sampling)
    errors = []
    for prompt, output in zip(prompts, outputs, strict=True):
        completion = output.outputs[0]
        measured = torch.tensor(completion_entropies(completion.token_ids, completion.logprobs)).double()
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *completion.token_ids]])).logits[0, len(prompt) - 1 : -1] / 0.8
        errors.append((measured - torch.distributions.Categorical(logits=logits).entropy()).abs())
    return torch.cat(errors)


def _save_model(directory: str, vocabulary: int, tensor_parallel: int) -> None:
    """Save a small random Qwen2 that GPUs can share, with entropies well below the maximum."""
    from gtpo_verl.tasks.model import build_model

    heads = 4 * tensor_parallel
    shape = {"num_attention_heads": heads, "num_key_value_heads": heads // 2, "hidden_size": 32 * heads}
    model = build_model(vocabulary_size=vocabulary, seed=0, **shape)
    with torch.no_grad():
        model.lm_head.weight.mul_(15)
    model.save_pretrained(directory)
