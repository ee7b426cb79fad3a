"""From what an audit has sampled to its figures; no model is needed."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from gtpo_verl.algorithms import Batch
from gtpo_verl.audit.analysis import BASELINE, Analysis, analyse
from gtpo_verl.audit.methods import Method, credit_of
from gtpo_verl.audit.metrics import Credit
from gtpo_verl.audit.plan import Plan
from gtpo_verl.audit.references import (
    RANDOM_SEEDS,
    branch_shares,
    branch_variance,
    position_credit,
    random_credit,
    state_credit,
)
from gtpo_verl.audit.sampling import Chosen, choose_responses, measured, measured_branches
from gtpo_verl.audit.store import Rollout, Store
from gtpo_verl.audit.values import Bools, Values
from gtpo_verl.integrations.context import Overlong, length_penalty
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
    """Compute the figures.

    Raises:
        UserError: points were not sampled yet.
    """
    chosen = choose_responses(store.rollouts, plan, seed)
    values = measured(store, chosen)
    batch = batch_of(chosen.batch, seed)
    mask = (batch.response_mask != 0).numpy()
    of_batch = {
        method.name: credit_of(method, replace(batch, length_penalty=length_penalty(method.settings, batch, overlong)))
        for method in methods
        if method.scored
    }
    tokens = {name: credit[chosen.rows] for name, credit in of_batch.items()}
    audited = mask[chosen.rows]
    found = {name: Credit.of_tokens(credit, audited, chosen.points, values.correct) for name, credit in tokens.items()}
    found[POSITION] = position_credit(values, found[BASELINE].tokens)
    if plan.branches:
        branches = measured_branches(store, chosen, plan)
        # V of the branches, not of the halves: their noise would be in the credit and in the truth it is judged by
        V = branch_shares(*branches).mean(axis=-1)
        found[STATE] = state_credit(branch_variance(*branches), V, found[BASELINE].tokens, values.correct)
    random = _random(tokens[BASELINE], audited, chosen, values.correct, seed)
    unscored = tuple(method.name for method in methods if not method.scored)
    return Result(analyse(values, found, random), values, chosen, tokens, unscored)


def _random(uniform: Floats, mask: Bools, chosen: Chosen, correct: Bools, seed: int) -> list[Credit]:
    return [
        random_credit(uniform, mask, chosen.points, correct, RANDOM_SEEDS * seed + number)
        for number in range(RANDOM_SEEDS)
    ]


def batch_of(rollouts: Sequence[Rollout], seed: int) -> Batch:
    """The responses as a step of a training would hand them to a method: (B, T), padded on the right."""
    lengths = torch.tensor([len(rollout.tokens) for rollout in rollouts])
    mask = torch.arange(int(lengths.max())) < lengths[:, None]

    def padded(name: str) -> torch.Tensor:
        values = torch.zeros(mask.shape, dtype=torch.float64)
        values[mask] = torch.tensor(np.concatenate([getattr(rollout, name) for rollout in rollouts]))
        return values

    _, group = np.unique([rollout.row for rollout in rollouts], return_inverse=True)
    return Batch(
        mask,
        torch.from_numpy(group),
        torch.tensor([rollout.correct for rollout in rollouts]),
        entropy=padded("entropies").clamp(min=0),
        rewards=torch.tensor([rollout.score for rollout in rollouts], dtype=torch.float64),
        old_log_probs=padded("log_probs"),
        seed=seed,
    )


def measurement(store: Store, result: Result) -> dict[str, Any]:
    """What was sampled, in numbers."""
    counts, batch = store.counts.values(), result.chosen.batch
    return {
        "prompts_with_contrast": len({rollout.row for rollout in batch}),
        "responses_of_these": len(batch),
        "responses_audited": len(result.chosen.rows),
        "responses_too_short": result.chosen.short,
        "responses_truncated": sum(rollout.truncated for rollout in result.chosen.responses),
        "continuations": sum(count.trials for count in counts),
        "continuations_truncated": sum(count.truncated for count in counts),
        "tokens_of_continuations": sum(count.decoded for count in counts),
        "tokens_of_responses": sum(len(rollout.tokens) for rollout in store.rollouts),
        "mean_response_length": float(np.mean([len(rollout.tokens) for rollout in batch])),
        "tokens_a_step": float(np.mean([len(rollout.tokens) for rollout in result.chosen.responses]))
        / (result.chosen.points.shape[1] - 1),
    }
