"""From what an audit has sampled to its figures; no model is needed."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from gtpo_verl.algorithms import Batch
from gtpo_verl.audit import references
from gtpo_verl.audit.analysis import BASELINE, Analysis, analyse
from gtpo_verl.audit.kinds import kind_shares
from gtpo_verl.audit.methods import Method, credit_of
from gtpo_verl.audit.metrics import Credit
from gtpo_verl.audit.plan import Plan
from gtpo_verl.audit.sampling import Chosen, choose_responses, measured, measured_branches
from gtpo_verl.audit.store import Rollout, Store
from gtpo_verl.audit.values import Values
from gtpo_verl.integrations.context import Overlong
from gtpo_verl.runs.statistics import Floats

POSITION, STATE = "position", "state"


@dataclass(frozen=True, eq=False)
class Result:
    """An audit's figures, and what its page draws: values, responses, and the credit of each token, (N, T) by method.

    unscored: presets whose credit at ratios of 1 is DAPO's.
    """

    analysis: Analysis
    values: Values
    chosen: Chosen
    tokens: dict[str, Floats]
    unscored: tuple[str, ...]


def score(store: Store, plan: Plan, seed: int, methods: Sequence[Method], overlong: Overlong | None) -> Result:
    """Compute the figures. Raises UserError where points were not sampled yet."""
    chosen = choose_responses(store.rollouts, plan, seed)
    values = measured(store, chosen)
    batch = batch_of(chosen.batch, seed)
    tokens = {method.name: credit_of(method, batch, overlong)[chosen.rows] for method in methods if method.scored}
    audited = batch.response_mask.numpy()[chosen.rows]
    found = {name: Credit.of_tokens(credit, audited, chosen.points, values.correct) for name, credit in tokens.items()}
    found[POSITION] = references.position_credit(values, found[BASELINE].tokens)
    if plan.branches:
        branches = measured_branches(store, chosen, plan)
        # V of the branches, not of the halves: their noise would be in the credit and in the truth it is judged by
        V = references.branch_shares(*branches).mean(axis=-1)
        variance = references.branch_variance(*branches)
        found[STATE] = references.state_credit(variance, V, found[BASELINE].tokens, values.correct)
    count = references.RANDOM_SEEDS
    random = [
        references.random_credit(tokens[BASELINE], audited, chosen.points, values.correct, each)
        for each in range(count * seed, count * (seed + 1))
    ]
    unscored = tuple(method.name for method in methods if not method.scored)
    kinds = kind_shares(values, tokens, [rollout.texts for rollout in chosen.responses], chosen.points)
    return Result(replace(analyse(values, found, random), kinds=kinds), values, chosen, tokens, unscored)


def batch_of(rollouts: Sequence[Rollout], seed: int) -> Batch:
    """The responses as a step of a training would hand them to a method: (B, T), padded on the right."""
    entropy, mask = padded([rollout.entropies for rollout in rollouts], torch.float64)
    log_probs, _ = padded([rollout.log_probs for rollout in rollouts], torch.float64)
    _, group = np.unique([rollout.row for rollout in rollouts], return_inverse=True)
    return Batch(
        mask,
        torch.from_numpy(group),
        torch.tensor([rollout.correct for rollout in rollouts]),
        entropy=entropy.clamp(min=0),
        rewards=torch.tensor([rollout.score for rollout in rollouts], dtype=torch.float64),
        old_log_probs=log_probs,
        seed=seed,
    )


def padded(rows: Sequence[Sequence[Any]], dtype: torch.dtype = torch.int64) -> tuple[torch.Tensor, torch.Tensor]:
    """(B, T) values, 0 behind the end of each, and the mask of those that are there."""
    values = pad_sequence([torch.tensor(row, dtype=dtype) for row in rows], batch_first=True)
    lengths = torch.tensor([len(row) for row in rows])
    return values, torch.arange(values.shape[1]) < lengths[:, None]


def measurement(store: Store, result: Result) -> dict[str, Any]:
    """What was sampled, in numbers."""
    counts, batch = store.counts.values(), result.chosen.batch
    return {
        "prompts_with_contrast": len({rollout.row for rollout in batch}),
        "responses_of_these": len(batch),
        "responses_audited": len(result.chosen.rows),
        "responses_truncated": sum(rollout.truncated for rollout in result.chosen.responses),
        "continuations": sum(count.trials for count in counts),
        "continuations_truncated": sum(count.truncated for count in counts),
        "tokens_of_continuations": sum(count.decoded for count in counts),
        "tokens_of_responses": sum(len(rollout.tokens) for rollout in store.rollouts),
        "mean_response_length": float(np.mean([len(rollout.tokens) for rollout in batch])),
        "tokens_a_step": sum(len(rollout.tokens) for rollout in result.chosen.responses)
        / int(result.values.is_step.sum()),
    }
