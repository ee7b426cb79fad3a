"""GRPO steps on an embedded task in plain torch: the package's advantages, without verl, Ray and vLLM.

24 prompts of 8 responses a step, one update at the quickstart's learning rate, with the published settings.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from gtpo_verl.algorithms import Batch, algorithm
from gtpo_verl.algorithms.losses import token_loss
from gtpo_verl.tasks import EmbeddedTask
from gtpo_verl.tasks.model import EOS_ID, PAD_ID, sample

PROMPTS, SAMPLES, LEARNING_RATE = 24, 8, 3e-4
VALIDATION_SAMPLES = 4


@dataclass(frozen=True)
class Responses:
    """Sampled responses. tokens: (B, P + T), each prompt with its response, padded on the right. mask: (B, P + T), what
    was sampled. correct: (B,) the verdicts.
    """

    tokens: torch.Tensor
    mask: torch.Tensor
    correct: torch.Tensor


def respond(
    embedded: EmbeddedTask, model: Any, tokenizer: Any, rows: Sequence[Any], samples: int, seed: int
) -> Responses:
    """`samples` responses to each row, in order."""
    rows = [row for row in rows for _ in range(samples)]
    prompts = [row["prompt"][0]["content"] for row in rows]
    sampled = sample(model.eval(), tokenizer, prompts, embedded.max_response_length, seed)
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
    return Responses(tokens, mask, torch.tensor([verdict["acc"] == 1 for verdict in verdicts]))


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


def accuracy(embedded: EmbeddedTask, model: Any, tokenizer: Any, rows: Sequence[Any]) -> float:
    """The share of correct responses to validation problems."""
    return respond(embedded, model, tokenizer, rows, VALIDATION_SAMPLES, seed=1).correct.double().mean().item()


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
