"""Everything about one GPU that this project could not know without one: one file, one GPU, a quarter of an hour.

    python benchmarks/gpu_check.py                     # on the GPU if there is one, else on the CPU
    python benchmarks/gpu_check.py --without-vllm      # torch and Triton alone

With torch and Triton alone, half a minute: the kernels of the rollout's entropies and ranks against float64, in float32
and bfloat16, with 151,936 and 152,064 ids; their time against a plain read of the logits and against log-softmax; their
replay in a CUDA graph; GTPO's and GRPO-S's advantages against those of the CPU; the error that bfloat16 logits cost, as
a distribution. Where vLLM is installed it goes on: entropies of a tiny model against float64, throughput with and
without them, and two training steps of the quickstart.

Without a GPU the kernels run in Triton's interpreter on a few rows, which shows that this file works and times nothing.
Writes `gpu-check-DEVICE.json` into benchmarks/results, and exits with 1 if a check failed.
"""

import argparse
import importlib.util
import itertools
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from gtpo_verl.algorithms import GRPOSConfig, GTPOConfig, grpo_s_advantages, gtpo_advantages
from gtpo_verl.integrations.vllm import codec, kernels

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported, which the first kernel does

HERE = Path(__file__).parent
VOCABULARIES = (151_936, 152_064)  # Qwen2.5 up to 3B, and from 7B
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
ENTROPY_TOLERANCE = 1e-6  # nat
# nat in the mean, through vLLM; an H200 gave 0.001 and 0.028
ENGINE_TOLERANCE = {"float32": 0.01 if DEVICE == "cuda" else 1e-5, "bfloat16": 0.1}
ADVANTAGE_TOLERANCE = 1e-4
ROWS = 1024 if DEVICE == "cuda" else 4  # of the timed logits
SECONDS = 600  # of each part with vLLM: a first start of verl and vLLM took two and a half minutes on a GPU


def logits(rows: int, vocabulary: int, seed: int = 0) -> torch.Tensor:
    """(rows, vocabulary) float32 logits, from nearly certain to nearly uniform, a tenth of the ids masked in one."""
    generator = torch.Generator().manual_seed(seed)
    scale = torch.linspace(20, 0.5, rows)[:, None]
    x = scale * torch.randn(rows, vocabulary, generator=generator)
    x[-1, vocabulary - vocabulary // 10 :] = -torch.inf
    return x


def exact(x: torch.Tensor) -> torch.Tensor:
    """Entropies in float64, row by row."""
    return torch.cat([torch.special.entr(row.double().softmax(-1)).sum(-1, keepdim=True) for row in x])


# -------------------------------------------------------------------- torch and Triton


def accuracy() -> dict[str, Any]:
    """Largest error of the Triton kernel in nat, and ranks that differ, on rows that a sampler meets."""
    found = {}
    for vocabulary in VOCABULARIES:
        for name, dtype in DTYPES.items():
            x = logits(64 if DEVICE == "cuda" else 4, vocabulary).to(DEVICE, dtype)
            tokens = x.topk(5).indices[:, -1]
            truth, ranks = exact(x), (x >= x.gather(-1, tokens[:, None])).sum(-1)
            of_kernel, entropies = codec.unpack(kernels.rank_and_entropy(x, tokens).tolist())
            error = (torch.tensor(entropies, dtype=torch.float64) - truth.cpu()).abs().max().item()
            wrong = int((torch.tensor(of_kernel) != ranks.cpu()).sum())
            found[f"{vocabulary} {name}"] = {"error_nat": error, "wrong_ranks": wrong}
            require(error <= ENTROPY_TOLERANCE, f"{vocabulary} {name}: entropies off by {error:.1e} nat")
            require(wrong == 0, f"{vocabulary} {name}: {wrong} ranks are wrong")
    return found


def times() -> dict[str, Any]:
    """Milliseconds of the kernel and what it is compared with, in turn; medians of 20 rounds on a GPU."""
    require(DEVICE == "cuda", "", skip="the interpreter's times say nothing")
    found = {}
    for name, dtype in DTYPES.items():
        x = logits(ROWS, VOCABULARIES[0]).to(DEVICE, dtype)
        tokens = x.argmax(-1)
        calls: dict[str, Callable[[], torch.Tensor]] = {
            "read": lambda x=x: x.amax(-1),
            "rank_and_entropy": lambda x=x, tokens=tokens: kernels.rank_and_entropy(x, tokens),
            "log_softmax": lambda x=x: x.float().log_softmax(-1),
        }
        measured: dict[str, list[float]] = {call: [] for call in calls}
        for round_ in range(23):
            for label, call in calls.items():
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                call()
                end.record()
                end.synchronize()
                if round_ >= 3:
                    measured[label].append(start.elapsed_time(end))
        medians = {label: statistics.median(values) for label, values in measured.items()}
        ratio = medians["rank_and_entropy"] / medians["read"]
        found[name] = {"rows": ROWS, "ms": medians, "rank_and_entropy/read": ratio}
    return found


def cuda_graph() -> dict[str, Any]:
    """A captured kernel on other logits than those of the capture."""
    require(DEVICE == "cuda", "", skip="a CPU has no CUDA graphs")
    x, other = (logits(16, VOCABULARIES[0], seed).to(DEVICE) for seed in (0, 1))
    tokens = x.argmax(-1)
    kernels.rank_and_entropy(x, tokens)  # compiles outside the capture
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        words = kernels.rank_and_entropy(x, tokens)
    x.copy_(other)
    tokens.copy_(other.argmax(-1))
    graph.replay()
    torch.cuda.synchronize()
    _, entropies = codec.unpack(words.tolist())
    error = (torch.tensor(entropies, dtype=torch.float64) - exact(other).cpu()).abs().max().item()
    require(error <= ENTROPY_TOLERANCE, f"replayed entropies are off by {error:.1e} nat")
    return {"error_nat": error}


def advantages() -> dict[str, Any]:
    """Largest difference of GTPO's and GRPO-S's advantages between this device and the CPU in float64."""
    generator = torch.Generator().manual_seed(0)
    rows, length = 256, 512
    entropy = torch.empty(rows, length).exponential_(generator=generator)
    lengths = torch.randint(16, length + 1, (rows,), generator=generator)
    mask = (torch.arange(length) < lengths[:, None]).long()
    correct = torch.rand(rows, generator=generator) < 0.4
    group = torch.arange(rows) // 16
    found = {}
    for name, compute, config in (
        ("gtpo", gtpo_advantages, GTPOConfig()),
        ("grpo_s", grpo_s_advantages, GRPOSConfig()),
    ):
        truth = compute(entropy.double(), correct, mask, group, config).advantages
        here = compute(*(tensor.to(DEVICE) for tensor in (entropy, correct, mask, group)), config).advantages
        scale = truth.abs().max().item()
        found[name] = {"difference": (here.cpu().double() - truth).abs().max().item(), "largest": scale}
        require(found[name]["difference"] <= ADVANTAGE_TOLERANCE * max(scale, 1.0), f"{name}: {found[name]}")
    return found


def bfloat16_error() -> dict[str, Any]:
    """What rounding the logits to bfloat16 changes in the entropies: quantiles of the difference in nat, and relative.

    GTPO weighs a wrong token with 1/H, so that the relative error is what counts there.
    """
    x = logits(256 if DEVICE == "cuda" else 64, VOCABULARIES[0], seed=2).to(DEVICE)
    truth, rounded = exact(x), exact(x.to(torch.bfloat16))
    difference = (rounded - truth).abs()
    at = torch.tensor([0.5, 0.9, 0.99, 1.0], dtype=torch.float64, device=DEVICE)
    relative = difference / truth.clamp(min=1e-6)
    names = ("median", "p90", "p99", "largest")
    return {
        "nat": dict(zip(names, difference.quantile(at).tolist(), strict=True)),
        "relative": dict(zip(names, relative.quantile(at).tolist(), strict=True)),
    }


# -------------------------------------------------------------------- vLLM


def vllm_entropies() -> dict[str, Any]:
    """Entropies of a tiny model through vLLM against float64, in nat; on a GPU of both model runners, in both types,
    with CUDA graphs and asynchronous scheduling.
    """
    found, wrong = {}, []
    engines = itertools.product(("V1", "V2"), ENGINE_TOLERANCE) if DEVICE == "cuda" else [("V1", "float32")]
    sizes = f"rows=64, tokens=48, vocabulary={VOCABULARIES[0]}, eager=False" if DEVICE == "cuda" else "rows=4"
    for runner, dtype in engines:
        program = f"""
from gtpo_verl.integrations.probes import entropy_errors
errors = entropy_errors(dtype={dtype!r}, {sizes})
print(len(errors), errors.mean().item(), errors.quantile(0.99).item(), errors.max().item())"""
        printed = run([sys.executable, "-c", program], VLLM_USE_V2_MODEL_RUNNER=str(int(runner == "V2")))
        measured = dict(zip(("tokens", "mean", "p99", "largest"), map(float, printed.split()), strict=True))
        found[f"{runner} {dtype}"] = measured
        if measured["mean"] > ENGINE_TOLERANCE[dtype]:
            wrong.append(f"{runner} {dtype}")
    require(not wrong, f"{', '.join(wrong)}: {found}")
    return found


def vllm_throughput() -> dict[str, Any]:
    """benchmarks/bench_rollout_entropy.py: decoding with and without entropies, side by side."""
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "throughput.json"
        sizes = "--batch 256 --tokens 128" if DEVICE == "cuda" else "--batch 4 --tokens 8 --rounds 3"
        command = [str(HERE / "bench_rollout_entropy.py"), "--full-rounds", "1", *sizes.split()]
        run([sys.executable, *command, "--output", str(file)])
        found: dict[str, Any] = json.loads(file.read_text())
        return found


def training_step() -> dict[str, Any]:
    """Two steps of the quickstart with GTPO: Ray, the FSDP actor, vLLM, the weight sync and the report."""
    with tempfile.TemporaryDirectory() as directory:
        command = ["quickstart", "--arms", "gtpo", "--steps", "2", "--output", directory]
        if DEVICE == "cuda":
            command += ["hardware=gpu", "trainer.n_gpus_per_node=1"]
            if not importlib.util.find_spec("flash_attn"):
                command.append("actor_rollout_ref.model.override_config.attn_implementation=sdpa")
        run([sys.executable, "-m", "gtpo_verl.cli", *command])
        (file,) = Path(directory).rglob("metrics.jsonl")
        data = json.loads(file.read_text().splitlines()[-1])["data"]
        return {name: value for name, value in data.items() if name.startswith(("rollout_entropy/", "timing_s/"))}


def run(command: list[str], **variables: str) -> str:
    """The last line that a command prints."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | variables
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, env=environment)
    require(done.returncode == 0, (done.stderr.strip() or done.stdout.strip())[-500:])
    return (done.stdout.strip().splitlines() or [""])[-1]


# -------------------------------------------------------------------- the report


class NotRunError(Exception):
    """A check has no meaning here."""


def require(condition: bool, problem: str, skip: str = "") -> None:
    if condition:
        return
    raise NotRunError(skip) if skip else AssertionError(problem)


def outcome(check: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What a check found, or why it failed; the others run all the same."""
    started = time.monotonic()
    try:
        found: dict[str, Any] = {"ok": True, "found": check()}
    except NotRunError as reason:
        return {"ok": None, "not_run": str(reason)}
    except Exception as error:
        found = {"ok": False, "problem": f"{type(error).__name__}: {error}"[:1000]}
    return found | {"seconds": round(time.monotonic() - started, 1)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--without-vllm", action="store_true", help="torch and Triton alone")
    parser.add_argument("--output", type=Path, default=HERE / "results" / f"gpu-check-{DEVICE}.json")
    options = parser.parse_args()
    checks = [accuracy, times, cuda_graph, advantages, bfloat16_error]
    if not options.without_vllm and importlib.util.find_spec("vllm"):
        checks += [vllm_entropies, vllm_throughput, training_step]
    results = {}
    for check in checks:
        results[check.__name__] = outcome(check)
        print(f"{check.__name__}: {json.dumps(results[check.__name__])[:400]}", flush=True)
    report = {
        "device": torch.cuda.get_device_name() if DEVICE == "cuda" else platform.processor() or platform.machine(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "checks": results,
    }
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(report, indent=2) + "\n")
    print(options.output)
    return 1 if any(result["ok"] is False for result in results.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
