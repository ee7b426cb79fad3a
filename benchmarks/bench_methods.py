"""Time of every method's advantages a valid token, on one CPU core: `advantage_ns` of the registry.

    python benchmarks/bench_methods.py                       # all methods
    python benchmarks/bench_methods.py --methods grpo,fork20

64 groups of 16 responses of 64 to 4,096 tokens, half of them correct, in float32. verl's `grpo` estimator and all
methods take turns, so that other load on the machine affects them alike; the median of the rounds, in CPU time, counts.
Methods that train with an estimator of verl's (`kl_cov` and so on) are timed by their own function. Writes
`methods-cpu.json` and `.md` into benchmarks/results.
"""

import argparse
import json
import statistics
import time
import warnings
from functools import partial
from pathlib import Path

import numpy as np
import torch
from rich.progress import track
from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage

from gtpo_verl.algorithms import Batch, algorithm, algorithms

RESULTS = Path(__file__).parent / "results"
GROUPS, RESPONSES, LONGEST = 64, 16, 4096
VERL = "verl's grpo"


def batch() -> Batch:
    draw = torch.Generator().manual_seed(0)
    rows = GROUPS * RESPONSES
    lengths = torch.randint(64, LONGEST + 1, (rows,), generator=draw)
    mask = torch.arange(LONGEST) < lengths[:, None]
    entropy = torch.rand(mask.shape, generator=draw) ** 4 * 3 * mask
    log_probs = -(torch.rand(mask.shape, generator=draw) ** 3) * 4 * mask
    correct = torch.rand(rows, generator=draw) < 0.5
    rewards = correct.float() * 2 - 1
    group = torch.arange(GROUPS).repeat_interleave(RESPONSES)
    return Batch(mask, group, correct, entropy, rewards, log_probs, seed=1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", default="", help="names, separated by commas (default: all)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # settings that a method warns of
    names = options.methods.split(",") if options.methods else list(algorithms())
    given = batch()
    tokens = int(given.response_mask.sum())
    at_last_token = given.rewards[:, None] * torch.nn.functional.one_hot(given.response_mask.sum(1) - 1, LONGEST)
    index = np.array([str(ident) for ident in given.group.tolist()], dtype=object)
    steps = {VERL: lambda: compute_grpo_outcome_advantage(at_last_token, given.response_mask, index)}
    steps |= {name: partial(algorithm(name).advantages, given) for name in names}
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for number in track(range(options.rounds + 1), "rounds"):
        for name, step in steps.items():
            started = time.process_time()
            step()
            if number:  # the first warms up
                seconds[name].append(time.process_time() - started)
    found = {
        name: {
            "measured": round(statistics.median(values) / tokens * 1e9, 1),
            "range": [round(each / tokens * 1e9, 1) for each in (min(values), max(values))],
            "times_verl": round(statistics.median(values) / statistics.median(seconds[VERL]), 1),
            "advantage_ns": algorithm(name).advantage_ns if name != VERL else None,
        }
        for name, values in seconds.items()
    }
    lines = [
        "# CPU time of the advantages, nanoseconds a valid token, with one thread",
        "",
        (
            f"benchmarks/bench_methods.py, {tokens:,} valid tokens in {GROUPS * RESPONSES:,} responses, "
            f"{options.rounds} rounds."
        ),
        "",
        "| method | median | range | times verl's | `advantage_ns` in the registry |",
        "|---|---|---|---|---|",
        *(
            f"| `{name}` | {each['measured']:.0f} | {each['range'][0]:.0f} to {each['range'][1]:.0f} | "
            f"{each['times_verl']:.1f} | {each['advantage_ns'] or ''} |"
            for name, each in found.items()
        ),
    ]
    print("\n".join(lines))
    if not options.methods:
        (options.out / "methods-cpu.json").write_text(json.dumps(found, indent=1) + "\n")
        (options.out / "methods-cpu.md").write_text("\n".join([*lines, ""]))


if __name__ == "__main__":
    main()
