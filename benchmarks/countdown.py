"""Whether an embedded task has forks and can be learnt: its model before training, and GRPO steps in plain torch.

    python benchmarks/countdown.py [--task sums] [--methods dapo,gtpo] [--steps 60] [--seeds 1]

Prepares the task, then samples and trains without verl, Ray and vLLM: 24 prompts of 8 responses a step, one update at
the quickstart's learning rate, advantages from `gtpo_verl.algorithms` with the published settings. Reports the shares
of tokens whose entropy is above 0.5 and below 0.01 nat, the spread of GTPO's rewards of correct tokens, and before and
after the training the accuracy on validation problems and the share of wrong answers that break a rule, where the
verifier tells. Writes `TASK.json` and `.md` into benchmarks/results; a method and seed that is there is not repeated.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pyarrow import parquet
from transformers import AutoModelForCausalLM, AutoTokenizer

from gtpo_verl.algorithms import Batch, algorithm
from gtpo_verl.algorithms.losses import token_loss
from gtpo_verl.runs.statistics import cluster_standard_error
from gtpo_verl.tasks import EmbeddedTask, task
from gtpo_verl.tasks.model import EOS_ID, PAD_ID, sample_tokens
from gtpo_verl.tasks.prepare import prepare_task

RESULTS = Path(__file__).parent / "results"
PROMPTS, SAMPLES, LEARNING_RATE = 24, 8, 3e-4
VALIDATION_SAMPLES = 4
STATISTICS_PROMPTS = 96  # of the training problems, for entropies and rewards before the training


@dataclass(frozen=True)
class Responses:
    """Sampled responses. tokens: (B, P + T), each prompt with its response, padded on the right. mask: (B, P + T), what
    was sampled. correct, legal: (B,) the verdicts.
    """

    tokens: torch.Tensor
    mask: torch.Tensor
    correct: torch.Tensor
    legal: torch.Tensor


def respond(
    embedded: EmbeddedTask, model: Any, tokenizer: Any, rows: Sequence[Any], samples: int, seed: int
) -> Responses:
    """`samples` responses to each row, in order."""
    rows = [row for row in rows for _ in range(samples)]
    prompts = [row["prompt"][0]["content"] for row in rows]
    sampled = sample_tokens(model.eval(), tokenizer, prompts, embedded.max_response_length, seed)
    encoded = [tokenizer(prompt).input_ids for prompt in prompts]
    width = max(map(len, encoded)) + embedded.max_response_length
    tokens = torch.full((len(rows), width), PAD_ID)
    mask = torch.zeros(len(rows), width, dtype=torch.bool)
    verdicts = []
    for index, (row, prompt, response) in enumerate(zip(rows, encoded, sampled, strict=True)):
        kept = response[: response.index(EOS_ID) + 1] if EOS_ID in response else response
        tokens[index, : len(prompt) + len(kept)] = torch.tensor(prompt + kept)
        mask[index, len(prompt) : len(prompt) + len(kept)] = True
        text = tokenizer.decode(kept, skip_special_tokens=True)
        verdicts.append(embedded.compute_score(row["data_source"], text, row["reward_model"]["ground_truth"]))
    return Responses(
        tokens,
        mask,
        torch.tensor([verdict["acc"] == 1 for verdict in verdicts]),
        torch.tensor([verdict.get("legal", 1.0) == 1 for verdict in verdicts]),
    )


def read(model: Any, responses: Responses) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-probabilities and entropies of the sampled tokens, and their mask, (B, T) with responses from column 0."""
    logits = model(input_ids=responses.tokens[:, :-1]).logits.log_softmax(-1)
    log_probs = logits.gather(-1, responses.tokens[:, 1:, None])[..., 0]
    entropy = -(logits.exp() * logits).sum(-1)
    mask = responses.mask[:, 1:]
    first = mask.to(torch.int8).argmax(1, keepdim=True)
    place = (torch.arange(mask.shape[1]) + first).clamp(max=mask.shape[1] - 1)
    mask = torch.arange(mask.shape[1]) < mask.sum(1, keepdim=True)
    return log_probs.gather(1, place), entropy.gather(1, place), mask


def batch_of(responses: Responses, log_probs: torch.Tensor, entropy: torch.Tensor, mask: torch.Tensor) -> Batch:
    return Batch(
        response_mask=mask,
        group=torch.arange(len(mask)) // SAMPLES,
        correct=responses.correct,
        entropy=entropy.detach(),
        rewards=responses.correct * 2.0 - 1,
        old_log_probs=log_probs.detach(),
    )


def validate(embedded: EmbeddedTask, model: Any, tokenizer: Any, rows: Sequence[Any]) -> dict[str, float]:
    found = respond(embedded, model, tokenizer, rows, VALIDATION_SAMPLES, seed=1)
    means = found.correct.double().reshape(len(rows), -1).mean(1).numpy()
    clusters = [row["extra_info"]["cluster"] for row in rows]
    return {
        "accuracy": float(means.mean()),
        "standard_error": cluster_standard_error(means, clusters),
        "illegal": (~found.legal).double().mean().item(),
    }


def forks(embedded: EmbeddedTask, model: Any, tokenizer: Any, rows: Sequence[Any]) -> dict[str, float]:
    """Where the model is unsure before the training, and what GTPO makes of it."""
    found = respond(embedded, model, tokenizer, rows[:STATISTICS_PROMPTS], SAMPLES, seed=2)
    with torch.no_grad():
        log_probs, entropy, mask = read(model, found)
    gtpo = algorithm("gtpo")
    metrics = gtpo.advantages(batch_of(found, log_probs, entropy, mask)).metrics
    return {
        "above 0.5 nat": (entropy[mask] > 0.5).double().mean().item(),
        "below 0.01 nat": (entropy[mask] < 0.01).double().mean().item(),
        "entropy": entropy[mask].mean().item(),
        "shaped_correct_std": metrics["shaped_correct_std"],
        "tokens": mask.sum(1).double().mean().item(),
    }


def train(
    embedded: EmbeddedTask, model: Any, tokenizer: Any, rows: Sequence[Any], method: str, steps: int, seed: int
) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    order = np.random.default_rng(seed)
    for step in range(steps):
        chosen = [rows[index] for index in order.choice(len(rows), PROMPTS, replace=False)]
        responses = respond(embedded, model, tokenizer, chosen, SAMPLES, seed=1000 * (seed + 1) + step)
        log_probs, entropy, mask = read(model.train(), responses)
        batch = batch_of(responses, log_probs, entropy, mask)
        advantages = algorithm(method).advantages(batch).advantages
        losses, _ = token_loss(log_probs, log_probs.detach(), advantages, mask)
        optimizer.zero_grad()
        (losses.sum() / mask.sum()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        print(f"{method} seed {seed} step {step + 1}/{steps}: {responses.correct.double().mean():.3f}", flush=True)


def percent(figures: dict[str, float], key: str) -> str:
    return f"{figures[key]:.1%}"


def report(result: dict[str, Any]) -> str:
    start, before = result["forks"], result["before"]
    wrong = {
        name: figures["illegal"] / max(1 - figures["accuracy"], 1e-9) for name, figures in {"before": before}.items()
    }
    lines = [
        f"# The embedded task `{result['task']}` before and after GRPO steps in plain torch",
        "",
        (
            f"benchmarks/countdown.py: {PROMPTS} prompts of {SAMPLES} responses a step, one update, learning rate "
            f"{LEARNING_RATE:g}; validation on {result['validation prompts']} problems, {VALIDATION_SAMPLES} samples "
            "each."
        ),
        "",
        "| before the training | |",
        "|---|---|",
        f"| accuracy | {percent(before, 'accuracy')} ± {1.96 * before['standard_error']:.1%} |",
        f"| responses that break a rule | {percent(before, 'illegal')}, {wrong['before']:.0%} of the wrong ones |",
        f"| tokens with more than 0.5 nat | {percent(start, 'above 0.5 nat')} |",
        f"| tokens with less than 0.01 nat | {percent(start, 'below 0.01 nat')} |",
        f"| standard deviation of GTPO's rewards of correct tokens | {start['shaped_correct_std']:.4f} |",
        f"| tokens a response | {start['tokens']:.1f} |",
        "",
        "| method | steps | seed | accuracy | gain | responses that break a rule | of the wrong ones |",
        "|---|---|---|---|---|---|---|",
    ]
    for run in result["runs"]:
        after = run["after"]
        broken = after["illegal"] / max(1 - after["accuracy"], 1e-9)
        lines.append(
            f"| {run['method']} | {run['steps']} | {run['seed']} | {percent(after, 'accuracy')} ± "
            f"{1.96 * after['standard_error']:.1%} | {100 * (after['accuracy'] - before['accuracy']):+.1f} points | "
            f"{percent(after, 'illegal')} | {broken:.0%} |"
        )
    return "\n".join([*lines, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", default="countdown")
    parser.add_argument("--methods", default="dapo,gtpo")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--directory", type=Path, default=Path("outputs"), help="where the task is prepared")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    embedded = task(options.task)
    prepared = prepare_task(embedded, embedded.directory(options.directory))
    tokenizer = AutoTokenizer.from_pretrained(prepared.model_path)
    rows, validation = (parquet.read_table(file).to_pylist() for file in (prepared.train_file, prepared.val_file))

    def fresh() -> Any:
        return AutoModelForCausalLM.from_pretrained(prepared.model_path, dtype=torch.float32)

    file = options.out / f"{options.task}.json"
    result: dict[str, Any] = json.loads(file.read_text()) if file.is_file() else {}
    if result.get("key") != prepared.manifest["key"]:
        result = {
            "task": embedded.name,
            "key": prepared.manifest["key"],
            "validation prompts": len(validation),
            "forks": forks(embedded, fresh(), tokenizer, rows),
            "before": validate(embedded, fresh(), tokenizer, validation),
            "runs": [],
        }
    for seed in range(options.seeds):
        for method in options.methods.split(","):
            what = {"method": method, "steps": options.steps, "seed": seed}
            if any(what.items() <= run.items() for run in result["runs"]):
                continue
            model = fresh()
            train(embedded, model, tokenizer, rows, method, options.steps, seed)
            result["runs"].append(what | {"after": validate(embedded, model, tokenizer, validation)})
            file.write_text(json.dumps(result, indent=1) + "\n")
            file.with_suffix(".md").write_text(report(result))
    print(report(result))


if __name__ == "__main__":
    main()
