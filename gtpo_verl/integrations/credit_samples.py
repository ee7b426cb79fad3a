"""A few responses with the advantage of every token, kept for the report. Needs torch, not verl."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

MOST_TOKENS = 1000  # of a response; a sample of a step is then some 50 kB


def contrasting_pair(groups: Sequence[str], correct: torch.Tensor, mask: torch.Tensor) -> list[int]:
    """The first correct and the first wrong response of the first group that has both; empty without such a group.

    Args:
        groups: B names, the prompt of each response.
        correct: (B,) bool.
        mask: (B, T) bool; a padding row has no token.
    """
    first: dict[str, dict[bool, int]] = {}
    for row, group in enumerate(groups):
        if mask[row].any():
            first.setdefault(group, {}).setdefault(bool(correct[row]), row)
    return next(([rows[True], rows[False]] for rows in first.values() if len(rows) == 2), [])


def credit_sample(
    decode: Callable[[list[int]], str],
    prompt: torch.Tensor,
    response: torch.Tensor,
    correct: bool,
    advantages: torch.Tensor,
    entropies: torch.Tensor,
    mask: torch.Tensor,
) -> dict[str, Any]:
    """One response for ``credit_samples.jsonl``: its tokens as text, with their advantages and entropies in nats.

    Tokens that the policy did not generate, such as a tool's answer, are left out, and those behind `MOST_TOKENS`.

    Args:
        decode: the tokenizer's.
        prompt: (P,) token ids.
        response: (T_i,) token ids.
        correct: its verdict.
        advantages, entropies: (T,) float, T at least T_i.
        mask: (T,) bool, tokens of the policy.
    """
    own = mask.nonzero().flatten()
    kept = own[:MOST_TOKENS]
    return {
        "prompt": decode(prompt.tolist()),
        "correct": correct,
        "length": len(own),
        "tokens": [decode([token]) for token in response[kept].tolist()],
        "advantages": [round(value, 5) for value in advantages[kept].tolist()],
        "entropies": [round(value, 5) for value in entropies[kept].tolist()],
    }
