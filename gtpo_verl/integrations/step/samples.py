"""Responses with the advantage of every token: a pair of them for the report, and whole batches for analysis."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import transfer_queue as tq
from omegaconf import DictConfig

from gtpo_verl.files import append_json_line
from gtpo_verl.integrations.entropy_source import entropy_source
from gtpo_verl.integrations.step.columns import Step
from gtpo_verl.integrations.transfer_queue import uid_of
from gtpo_verl.runs.directory import SAMPLES_FILE

MOST_TOKENS = 1000  # of a response; a sample of a step is then some 50 kB


class CreditFiles:
    """Keeps responses with their advantages.

    Args:
        config: of the run.
        updates: of a step (``parameter_sync_step``).
    """

    def __init__(self, config: DictConfig, updates: int) -> None:
        self._run_dir = Path(config.trainer.run_dir)
        self._dump_every = config.trainer.credit_dump_freq
        self._sample_every = config.trainer.test_freq
        self._updates = updates
        source = entropy_source(config)
        self._entropies = source.column
        self._columns = ["old_log_probs", "responses", *source.rollout_columns]
        if config.actor_rollout_ref.rollout.calculate_log_probs:
            self._columns.append("rollout_log_probs")

    def keep(self, step: Step, number: int, update: int, tokenizer: Any, *, last: bool) -> None:
        """Write the batch every ``trainer.credit_dump_freq`` steps, and two responses in steps that validate.

        Args:
            step: the responses of an update, with their advantages.
            number: of the training step.
            update: its number in the step, from 0.
            tokenizer: of the policy.
            last: whether the training ends with this step.
        """
        if self._dump_every > 0 and number % self._dump_every == 0:
            self._dump(step, f"{number}" + (f"-{update}" if self._updates > 1 else ""))
        if self._sample_every > 0 and (number % self._sample_every == 0 or last):
            self._keep_samples(step, number, tokenizer.decode)

    def _dump(self, step: Step, name: str) -> None:
        """Write all that the update depends on to ``credit/<name>.pt``, (B, T) each, with verl's rows of padding."""
        directory = self._run_dir / "credit"
        directory.mkdir(exist_ok=True)
        columns = dict(zip(self._columns, step.fetch(*self._columns), strict=True))
        advantages, rewards, entropies = step.fetch("advantages", "rm_scores", self._entropies)
        columns |= {"advantages": advantages, "rewards": rewards, "response_mask": step.mask}
        columns["entropy"] = torch.where(step.mask, entropies, 0.0)
        torch.save(
            {
                "keys": list(step.batch.keys),
                "prompts": _prompts(step, step.batch.keys),
                "correct": step.of_batch(step.correct),
            }
            | {name: step.padded(column) for name, column in columns.items()},
            directory / f"{name}.pt",
        )

    def _keep_samples(self, step: Step, number: int, decode: Callable[[list[int]], str]) -> None:
        """Append a correct and a wrong response of one prompt to ``credit_samples.jsonl``."""
        pair = contrasting_pair([uid_of(key) for key in step.keys], step.correct, ~step.of_guide)
        if not pair:
            return
        prompts = _prompts(step, [step.keys[row] for row in pair])
        columns = (*step.fetch("responses", "advantages", self._entropies), step.mask)
        responses, advantages, entropies, masks = (step.rows(column) for column in columns)
        samples = [
            credit_sample(
                decode,
                prompt,
                responses[row],
                bool(step.correct[row]),
                advantages[row],
                entropies[row],
                masks[row],
            )
            for row, prompt in zip(pair, prompts, strict=True)
        ]
        append_json_line(self._run_dir / SAMPLES_FILE, {"step": number, "samples": samples})


def _prompts(step: Step, keys: list[str]) -> list[torch.Tensor]:
    data = tq.kv_batch_get(keys=keys, partition_id=step.batch.partition_id, select_fields=["prompts"])
    return [row.clone() for row in data["prompts"].unbind()]


def contrasting_pair(groups: Sequence[str], correct: torch.Tensor, own: torch.Tensor) -> list[int]:
    """The first correct and the first wrong response of the first group that has both; empty without such a group.

    Args:
        groups: R names, the prompt of each response.
        correct: (R,) bool.
        own: (R,) bool, responses of the policy.
    """
    first: dict[str, dict[bool, int]] = {}
    for row, group in enumerate(groups):
        if own[row]:
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
        advantages, entropies: (T_i,) float.
        mask: (T_i,) bool, tokens of the policy.
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
