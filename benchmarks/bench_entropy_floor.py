"""How much of GTPO's credit is rounding error: entropies in float32 and bfloat16 against float64, for floors from 1e-6
to 0.1 nat.

    python benchmarks/bench_entropy_floor.py

A wrong token weighs 1/H, and language models are certain of most tokens, so errors of H near 0 reach the advantages.
Next-token distributions over 151,936 ids (Qwen2.5's) with margins as language models have them, logits rounded to
bfloat16 as a model emits them; 4 groups of 16 responses of 64 tokens, half of them correct. Three sources of error,
each against float64 on the same logits:

    float32    verl's formula with chunking, as training computes entropies here
    bfloat16   verl's formula without chunking, on bfloat16 logits: under autocast on a CPU; on CUDA it is float32
    engines    another engine: the same model with independent rounding of every logit to bfloat16

Noise is the root mean square change of the advantages of wrong tokens, in units of their spread inside responses (1:
the credit is noise). Writes `entropy-floor.json` and `.md` into benchmarks/results.
"""

import argparse
import json
import warnings
from pathlib import Path

import torch
from rich.progress import track
from verl.utils.torch_functional import entropy_from_logits, entropy_from_logits_with_chunking

from gtpo_verl.algorithms import GRPOSConfig, GTPOConfig, grpo_s_advantages, gtpo_advantages

IDS, GROUPS, GROUP_SIZE, LENGTH = 151_936, 4, 16, 64
FLOORS = (1e-6, 1e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1)
CHUNK = 64  # tokens at once: 40 MB of logits in float32
RESULTS = Path(__file__).parent / "results"
SOURCES = ("float32", "bfloat16", "engines")


def draw_logits(tokens: int, generator: torch.Generator) -> torch.Tensor:
    """(tokens, IDS) bfloat16: a normal background, and two candidates above it, one of them up to 25 nats ahead."""
    logits = 3.0 * torch.randn(tokens, IDS, generator=generator)
    background = torch.logsumexp(logits, dim=1)
    lead = 10.0 + 5.0 * torch.randn(tokens, generator=generator)
    logits[:, 0] = background + lead
    logits[:, 1] = background + lead - 25.0 * torch.rand(tokens, generator=generator)
    return logits.bfloat16()


def exact_entropy(logits: torch.Tensor) -> torch.Tensor:
    """(tokens,) float64: -Σ p log p."""
    log_probs = torch.log_softmax(logits.double(), dim=1)
    return -(log_probs.exp() * log_probs).sum(dim=1)


def other_engine(logits: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """The logits with an error of up to half a unit in the last place of bfloat16 (8 bits) each."""
    exact = logits.float()
    unit = torch.exp2(torch.floor(torch.log2(exact.abs().clamp(min=1e-6))) - 7)
    return exact + unit * (torch.rand(exact.shape, generator=generator) - 0.5)


def draw_entropies() -> dict[str, torch.Tensor]:
    """{source: (rows, LENGTH) float64}, `exact` among them."""
    generator = torch.Generator().manual_seed(0)
    tokens = GROUPS * GROUP_SIZE * LENGTH
    parts: dict[str, list[torch.Tensor]] = {name: [] for name in ("exact", *SOURCES)}
    for _ in track(range(tokens // CHUNK), description="entropies"):
        logits = draw_logits(CHUNK, generator)
        parts["exact"].append(exact_entropy(logits))
        parts["float32"].append(entropy_from_logits_with_chunking(logits).double())
        parts["bfloat16"].append(entropy_from_logits(logits).double())
        parts["engines"].append(exact_entropy(other_engine(logits, generator)))
    return {name: torch.cat(part).view(-1, LENGTH) for name, part in parts.items()}


def measure(entropies: dict[str, torch.Tensor], floor: float) -> dict[str, dict[str, float]]:
    """{source: noise and change of GTPO's and GRPO-S's advantages} at one floor."""
    exact = entropies["exact"]
    mask = torch.ones(exact.shape, dtype=torch.bool)
    rows = torch.arange(len(exact))
    correct, group = rows % 2 == 0, rows // GROUP_SIZE

    def credit(entropy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        usable = entropy.clamp(min=0)  # bfloat16 goes far below zero, which training refuses
        token = gtpo_advantages(usable, correct, mask, group, GTPOConfig(entropy_floor=floor)).advantages
        sequence = grpo_s_advantages(usable, correct, mask, group, GRPOSConfig(entropy_floor=floor)).advantages
        return token[~correct], sequence[~correct][:, 0]

    token, sequence = credit(exact)
    found = {}
    for source in SOURCES:
        other_token, other_sequence = credit(entropies[source])
        change = other_token - token
        found[source] = {
            "gtpo_noise": (change.square().mean().sqrt() / token.std(dim=1).mean()).item(),
            "gtpo_largest_change": change.abs().max().item(),
            "grpo_s_noise": ((other_sequence - sequence).square().mean().sqrt() / sequence.std()).item(),
        }
    return found


def report(facts: dict, rows: list[dict]) -> str:
    shares = ", ".join(f"{facts[f'below_{floor}']:.0%} below {floor}" for floor in ("1e-2", "1e-4", "1e-6"))
    errors = "; ".join(f"{name} {facts['errors'][name][0]:.1e}, {facts['errors'][name][1]:.1e}" for name in SOURCES)
    heads = ("floor", "at the floor", *(f"GTPO, {name}" for name in SOURCES), "largest change, float32")
    heads += tuple(f"GRPO-S, {name}" for name in SOURCES)
    lines = [
        "# How much of the credit is rounding error",
        "",
        f"{facts['tokens']:,} tokens over {IDS:,} ids; `python benchmarks/bench_entropy_floor.py` explains",
        "the columns.",
        "",
        f"Entropies: median {facts['median']:.2g} nat, {shares}.",
        f"Errors in nats (median, 99th percentile): {errors}.",
        "",
        f"| {' | '.join(heads)} |",
        "|---" * len(heads) + "|",
    ]
    for row in rows:
        cells = [f"{row[source]['gtpo_noise']:.4f}" for source in SOURCES]
        cells.append(f"{row['float32']['gtpo_largest_change']:.1e}")
        cells += [f"{row[source]['grpo_s_noise']:.4f}" for source in SOURCES]
        lines.append(f"| {row['floor']:g} | {row['at_floor']:.0%} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    warnings.filterwarnings("ignore", message="(alpha1|beta1)")
    entropies = draw_entropies()
    exact = entropies["exact"].flatten()
    errors = {
        name: [(entropies[name].flatten() - exact).abs().quantile(share).item() for share in (0.5, 0.99)]
        for name in SOURCES
    }
    facts = {"tokens": len(exact), "median": exact.median().item(), "errors": errors} | {
        f"below_{floor:.0e}".replace("e-0", "e-"): (exact < floor).double().mean().item()
        for floor in (1e-2, 1e-4, 1e-6)
    }
    rows = [
        {"floor": floor, "at_floor": (exact <= floor).double().mean().item()} | measure(entropies, floor)
        for floor in FLOORS
    ]
    (RESULTS / "entropy-floor.json").write_text(json.dumps({"facts": facts, "rows": rows}, indent=2) + "\n")
    text = report(facts, rows)
    (RESULTS / "entropy-floor.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
