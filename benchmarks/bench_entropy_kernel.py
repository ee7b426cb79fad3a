"""The entropy of a row of logits: the kernels of the rollout against a plain read of the logits and against log-softmax in torch.

    python benchmarks/bench_entropy_kernel.py                  # on the GPU if there is one, else blocked torch on the CPU
    python benchmarks/bench_entropy_kernel.py --device cpu --rows 16

Runs alternate. `read` is the maximum of every row, the cheapest pass over the logits there is; `entropy` is what vLLM's V1 runner calls;
`rank` and `rank and entropy` are what its V2 runner launches without and with this project (GPU); `torch` is log_softmax, exp, product and
sum over the whole [rows, vocabulary]. Peak memory is what a call allocates beyond its input. Errors are against float64.
Writes `entropy-kernel-DEVICE.json` and `.md` into benchmarks/results.
"""

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from gtpo_verl.integrations.vllm import kernels

RESULTS = Path(__file__).parent / "results"
VOCABULARY = 151_936
GOAL = 1.3  # times a plain read, on a GPU

Call = Callable[[], torch.Tensor]


def entropy_in_torch(x: torch.Tensor) -> torch.Tensor:
    """What one would write: three temporaries of the size of the logits."""
    log_probs = x.float().log_softmax(-1)
    return -(log_probs.exp() * log_probs).sum(-1)


def calls(x: torch.Tensor) -> dict[str, Call]:
    found: dict[str, Call] = {
        "read": lambda: x.amax(-1),
        "entropy": lambda: kernels.entropy(x),
        "torch": lambda: entropy_in_torch(x),
    }
    if x.is_cuda:
        tokens = torch.randint(x.shape[1], (len(x),), device=x.device)
        words = torch.empty(len(x), dtype=torch.int64, device=x.device)

        def fused() -> torch.Tensor:
            kernels.RankAndEntropyKernel()[(len(x),)](words, x, x.stride(0), tokens, x.shape[1], BLOCK_SIZE=8192)
            return words

        def rank() -> torch.Tensor:
            return (x >= x.gather(1, tokens[:, None])).sum(-1)

        found |= {"rank and entropy": fused, "rank in torch": rank}
    return found


def alternate(steps: dict[str, Call], runs: int, cuda: bool) -> dict[str, list[float]]:
    """Seconds of each call, in turns, after three rounds to warm up; on a GPU between two events, with the cache cold."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    flush = torch.empty(256 * 2**20, dtype=torch.int8, device="cuda") if cuda else None
    for number in range(runs + 3):
        for name, call in steps.items():
            if flush is not None:
                flush.zero_()  # logits come from a matrix product, not from the cache of the last call
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                call()
                end.record()
                end.synchronize()
                taken = start.elapsed_time(end) / 1000
            else:
                begun = time.perf_counter()
                call()
                taken = time.perf_counter() - begun
            if number >= 3:
                seconds[name].append(taken)
    return seconds


def peak(call: Call, cuda: bool) -> int | None:
    """Bytes a call allocates beyond what was there; None on the CPU, whose allocator does not tell."""
    if not cuda:
        return None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def measure(rows: int, dtype: torch.dtype, runs: int, device: str) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    x = (4 * torch.randn(rows, VOCABULARY, generator=generator)).to(dtype).to(device)
    steps = calls(x)
    cuda = device == "cuda"
    seconds = alternate(steps, runs, cuda)
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    exact = torch.cat([torch.special.entr(row.double().softmax(-1)).sum(-1, keepdim=True) for row in x])
    return {
        "rows": rows,
        "dtype": str(dtype).removeprefix("torch."),
        "microseconds": {name: 1e6 * value for name, value in medians.items()},
        "times a read": {name: value / medians["read"] for name, value in medians.items()},
        "gigabytes a second": {name: x.numel() * x.element_size() / value / 1e9 for name, value in medians.items()},
        "peak bytes": {name: peak(call, cuda) for name, call in steps.items()},
        "largest error, nat": (kernels.entropy(x).double() - exact).abs().max().item(),
    }


def report(results: dict[str, Any]) -> str:
    machine = results["machine"]
    lines = [
        f"# Entropy kernels on {machine['device']}",
        "",
        f"Vocabulary {VOCABULARY:,}; median of {results['runs']} alternating runs; made by `make bench`. {machine['software']}.",
        f"Goal on a GPU: `entropy` at most {GOAL} times a plain read.",
        "",
        "| rows, type | call | µs | times a read | GB/s | MiB beyond the input |",
        "|---|---|---|---|---|---|",
    ]
    for case in results["cases"]:
        for name, value in case["microseconds"].items():
            extra = case["peak bytes"][name]
            lines.append(
                f"| {case['rows']}, {case['dtype']} | {name} | {value:,.1f} | {case['times a read'][name]:.2f} | "
                f"{case['gigabytes a second'][name]:,.1f} | {'' if extra is None else f'{extra / 2**20:,.1f}'} |"
            )
    worst = max(case["largest error, nat"] for case in results["cases"])
    return "\n".join([*lines, "", f"Largest error against float64: {worst:.1e} nat.", ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=["cpu", "cuda"], default=default)
    parser.add_argument(
        "--rows", type=int, nargs="+", help="rows of logits (default: 16 on a CPU; 64 512 1024 on a GPU)"
    )
    parser.add_argument("--runs", type=int, default=30, help="alternating runs (default 30)")
    parser.add_argument("--out", type=Path, default=RESULTS, help="where the result goes")
    options = parser.parse_args()
    rows = options.rows or ([64, 512, 1024] if options.device == "cuda" else [16])
    name = torch.cuda.get_device_name() if options.device == "cuda" else f"CPU, {os.cpu_count()} cores"
    software = f"Python {platform.python_version()}, torch {torch.__version__}"
    results: dict[str, Any] = {
        "machine": {"device": name, "software": software, "threads": torch.get_num_threads()},
        "runs": options.runs,
        "cases": [
            measure(count, dtype, options.runs, options.device)
            for count in rows
            for dtype in (torch.float32, torch.bfloat16)
        ],
    }
    options.out.mkdir(parents=True, exist_ok=True)
    target = options.out / f"entropy-kernel-{options.device}"
    target.with_suffix(".json").write_text(json.dumps(results, indent=1) + "\n")
    target.with_suffix(".md").write_text(report(results))
    print(report(results))


if __name__ == "__main__":
    main()
