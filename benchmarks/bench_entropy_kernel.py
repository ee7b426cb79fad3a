"""The entropy of a row of logits: kernels of the rollout against a plain read of the logits and log-softmax in torch.

    python benchmarks/bench_entropy_kernel.py                  # on the GPU if there is one, else blocked torch on the
    CPU python benchmarks/bench_entropy_kernel.py --device cpu --rows 16

Runs alternate. `read` is the maximum of every row, the cheapest pass over the logits; `entropy` is what the rollout
computes, on a GPU together with the rank, and `rank in torch` what it computes without this project, though vLLM
compiles it (GPU); `torch` is log_softmax, exp, product and sum over the whole [rows, vocabulary]; `unshifted` is
ln Σ exp(x) − Σ p x, the formula of verl's actor. Peak memory is what a call allocates beyond its input. Errors are
against float64, also on nearly deterministic rows, where GTPO's weight of a token in a wrong answer, 1/H, is largest.
Writes
`entropy-kernel-DEVICE.json` and `.md` into benchmarks/results.
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


def entropy(x: torch.Tensor) -> torch.Tensor:
    """What the rollout computes: on a GPU a word for each row, with the rank of a token and the bits of the entropy."""
    if not x.is_cuda:
        return kernels.entropy(x)
    words = kernels.rank_and_entropy(x, torch.zeros(len(x), dtype=torch.int64, device=x.device))
    return words.view(torch.float32)[::2]  # the low half


def entropy_in_torch(x: torch.Tensor) -> torch.Tensor:
    """The plain implementation: three temporaries of the size of the logits."""
    log_probs = x.float().log_softmax(-1)
    return -(log_probs.exp() * log_probs).sum(-1)


def entropy_unshifted(x: torch.Tensor) -> torch.Tensor:
    """ln Σ exp(x) − Σ p x: two numbers of the size of the logits, whose difference is the entropy."""
    x = x.float()
    return x.logsumexp(-1) - (x.softmax(-1) * x).sum(-1)


# the three formulas, for their errors
FORMULAS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "entropy": entropy,
    "torch": entropy_in_torch,
    "unshifted": entropy_unshifted,
}


def exact(x: torch.Tensor) -> torch.Tensor:
    """The entropies in float64, row by row."""
    return torch.cat([torch.special.entr(row.double().softmax(-1)).sum(-1, keepdim=True) for row in x])


def errors_near_certainty(device: str) -> dict[str, Any]:
    """Relative errors in float32 on 64 nearly deterministic rows: one logit of 25 to 33 above 4 · randn."""
    generator = torch.Generator().manual_seed(1)
    x = 4 * torch.randn(64, VOCABULARY, generator=generator)
    x[:, 7] = torch.linspace(25, 33, 64)
    x = x.to(device)
    truth = exact(x)
    relative = {name: (formula(x).double() - truth).abs() / truth for name, formula in FORMULAS.items()}
    return {
        "entropies": [truth.min().item(), truth.max().item()],
        "mean": {name: error.mean().item() for name, error in relative.items()},
        "largest": {name: error.max().item() for name, error in relative.items()},
    }


def calls(x: torch.Tensor) -> dict[str, Call]:
    found: dict[str, Call] = {
        "read": lambda: x.amax(-1),
        "entropy": lambda: kernels.entropy(x),
        "torch": lambda: entropy_in_torch(x),
        "unshifted": lambda: entropy_unshifted(x),
    }
    if x.is_cuda:
        tokens = torch.randint(x.shape[1], (len(x),), device=x.device)

        def rank() -> torch.Tensor:
            return (x >= x.gather(1, tokens[:, None])).sum(-1)

        found |= {"entropy": lambda: kernels.rank_and_entropy(x, tokens), "rank in torch": rank}
    return found


def alternate(steps: dict[str, Call], runs: int, cuda: bool) -> dict[str, list[float]]:
    """Seconds of each call, in turn, after three warm-up rounds; on a GPU between two events, with a cold cache."""
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
    """Bytes that a call allocates; None on a CPU, whose allocator keeps no such count."""
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
    return {
        "rows": rows,
        "dtype": str(dtype).removeprefix("torch."),
        "microseconds": {name: 1e6 * value for name, value in medians.items()},
        "times a read": {name: value / medians["read"] for name, value in medians.items()},
        "gigabytes a second": {name: x.numel() * x.element_size() / value / 1e9 for name, value in medians.items()},
        "peak bytes": {name: peak(call, cuda) for name, call in steps.items()},
        "largest error, nat": (entropy(x).double() - exact(x)).abs().max().item(),
    }


def report(results: dict[str, Any]) -> str:
    machine = results["machine"]
    lines = [
        f"# Entropy kernels on {machine['device']}",
        "",
        f"Vocabulary {VOCABULARY:,}; median of {results['runs']} alternating runs; made by `make bench`.",
        f"{machine['software']}.",
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
    sharp = results["near certainty"]
    low, high = sharp["entropies"]
    lines += [
        *("", f"Largest error of `entropy` against float64: {worst:.1e} nat.", ""),
        f"On 64 rows in float32 whose entropy is {low:.0e} to {high:.0e} nat:",
        *("", "| formula | relative error, mean | largest |", "|---|---|---|"),
        *(f"| {name} | {sharp['mean'][name]:.1e} | {sharp['largest'][name]:.1e} |" for name in FORMULAS),
    ]
    return "\n".join([*lines, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=["cpu", "cuda"], default=default)
    parser.add_argument(
        "--rows", type=int, nargs="+", help="rows of logits (default: 16 on a CPU; 64 512 1024 on a GPU)"
    )
    parser.add_argument("--runs", type=int, default=30, help="alternating runs (default 30)")
    parser.add_argument("--out", type=Path, default=RESULTS, help="directory of the result")
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
        "near certainty": errors_near_certainty(options.device),
    }
    options.out.mkdir(parents=True, exist_ok=True)
    target = options.out / f"entropy-kernel-{options.device}"
    target.with_suffix(".json").write_text(json.dumps(results, indent=1) + "\n")
    target.with_suffix(".md").write_text(report(results))
    print(report(results))


if __name__ == "__main__":
    main()
