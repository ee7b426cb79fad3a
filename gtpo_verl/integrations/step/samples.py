"""Responses with the advantage of every token: pairs of them for the report, and whole batches for analysis."""

import hashlib
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
from gtpo_verl.integrations.vllm.names import ENTROPIES, VERSIONS
from gtpo_verl.runs.directory import SAMPLES_FILE

MOST_TOKENS = 1000  # of a response, which is then some 30 kB
PAIRS = 4  # of a step


class CreditFiles:
    """Keeps responses with their advantages; ``updates``: of a step (``parameter_sync_step``)."""

    def __init__(self, config: DictConfig, updates: int) -> None:
        self._run_dir = Path(config.trainer.run_dir)
        self._dump_every = config.trainer.credit_dump_freq
        self._sample_every = config.trainer.test_freq
        self._updates = updates
        source = entropy_source(config)
        self._entropies = source.column
        self._columns = ["old_log_probs", "responses"]
        if source.from_rollout:
            self._columns += [ENTROPIES, VERSIONS]
        if config.actor_rollout_ref.rollout.calculate_log_probs:
            self._columns.append("rollout_log_probs")

    def keep(self, step: Step, number: int, update: int, tokenizer: Any, *, last: bool) -> None:
        """Write the batch every ``trainer.credit_dump_freq`` steps, and pairs of responses in steps that validate.

        number: of the training step, of which this is update ``update`` (from 0). last: whether the training ends here.
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
        rows = {
            "keys": list(step.batch.keys),
            "prompts": _prompts(step, step.batch.keys),
            "correct": step.of_batch(step.correct),
        }
        padded = {name: step.padded(column) for name, column in columns.items()}
        torch.save(rows | padded, directory / f"{name}.pt")

    def _keep_samples(self, step: Step, number: int, decode: Callable[[list[int]], str]) -> None:
        """Append a correct and a wrong response of each of up to `PAIRS` prompts to ``credit_samples.jsonl``."""
        groups = [uid_of(key) for key in step.keys]
        first = dict(zip(reversed(groups), reversed(step.keys), strict=True))
        prompts = {
            uid: decode(ids.tolist()) for uid, ids in zip(first, _prompts(step, list(first.values())), strict=True)
        }
        pairs = contrasting_pairs(groups, [prompts[uid] for uid in groups], step.correct, ~step.of_guide)[:PAIRS]
        if not pairs:
            return
        columns = (*step.fetch("responses", "advantages", self._entropies), step.mask)
        responses, advantages, entropies, masks = (step.rows(column) for column in columns)
        samples = []
        for row in (row for pair in pairs for row in pair):
            group = step.correct[[other == groups[row] for other in groups]]
            sample = credit_sample(decode, responses[row], advantages[row], entropies[row], masks[row])
            verdict = {"correct": bool(step.correct[row]), "group": [int(group.sum()), int((~group).sum())]}
            samples.append({"prompt": prompts[groups[row]], **verdict, **sample})
        append_json_line(self._run_dir / SAMPLES_FILE, {"step": number, "samples": samples})


def _prompts(step: Step, keys: list[str]) -> list[torch.Tensor]:
    data = tq.kv_batch_get(keys=keys, partition_id=step.batch.partition_id, select_fields=["prompts"])
    return [row.clone() for row in data["prompts"].unbind()]


def contrasting_pairs(
    groups: Sequence[str], prompts: Sequence[str], correct: torch.Tensor, own: torch.Tensor
) -> list[tuple[int, int]]:
    """The first correct and the first wrong response of each group that has both, the groups for a report first.

    These have two of each verdict: a response alone with its verdict has the same credit on every token, whatever its
    entropies. Otherwise the order follows from the prompts, so that runs keep the same.
    groups: R names, the group of each response. prompts: R texts. correct, own: (R,) bool, the latter the policy's.
    """
    rows: dict[str, dict[bool, list[int]]] = {}
    for row, group in enumerate(groups):
        if own[row]:
            rows.setdefault(group, {True: [], False: []})[bool(correct[row])].append(row)
    found = {
        (of[True][0], of[False][0]): min(len(of[True]), len(of[False])) for of in rows.values() if all(of.values())
    }
    digest = {pair: hashlib.sha256(prompts[pair[0]].encode()).hexdigest() for pair in found}
    return sorted(found, key=lambda pair: (found[pair] < 2, digest[pair]))


def credit_sample(
    decode: Callable[[list[int]], str],
    response: torch.Tensor,
    advantages: torch.Tensor,
    entropies: torch.Tensor,
    mask: torch.Tensor,
) -> dict[str, Any]:
    """One response, (T_i,) each, for ``credit_samples.jsonl``: its tokens as text, with advantages and entropies.

    Tokens that the policy did not generate, such as a tool's answer, are left out, and those behind `MOST_TOKENS`.
    """
    own = mask.nonzero().flatten()
    kept = own[:MOST_TOKENS]
    return {
        "length": len(own),
        "tokens": [decode([token]) for token in response[kept].tolist()],
        "advantages": [round(value, 5) for value in advantages[kept].tolist()],
        "entropies": [round(value, 5) for value in entropies[kept].tolist()],
    }
