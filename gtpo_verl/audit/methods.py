"""The credit that each method assigns to every token of the audited rollouts, as it enters the gradient."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from gtpo_verl.algorithms import Algorithm, Batch, algorithm_of, algorithms, response_lengths
from gtpo_verl.algorithms.grpo import DAPO
from gtpo_verl.audit.values import Bools
from gtpo_verl.config import SEARCH_PATH, choices, compose_config, known_presets
from gtpo_verl.integrations.context import Overlong, length_penalty
from gtpo_verl.runs.statistics import Floats


@dataclass(frozen=True, eq=False)
class Method:
    """A preset `algo=NAME`: its entry in the registry, its settings, and the aggregation of its loss."""

    name: str
    entry: Algorithm
    settings: Any
    aggregation: str

    @property
    def scored(self) -> bool:
        """Whether its credit at ratios of 1 can differ from DAPO's."""
        # clip_cov has DAPO's advantages, and a loss that works on a random 0.02 % of the tokens.
        by_loss = self.entry.compute is DAPO.compute and self.entry.loss == "clip_cov"
        return self.aggregation != DAPO.aggregation or not (self.entry.needs_several_updates or by_loss)


def methods(names: Sequence[str] = (), overrides: Sequence[str] = ()) -> list[Method]:
    """The presets of these names, or of every registered method, DAPO first; those overrides apply that are of
    `algorithm.*`. Raises UserError: there is no preset of a name, or a setting is impossible.
    """
    searched = [line for line in overrides if line.startswith(f"{SEARCH_PATH}=")]  # a user's own presets
    known = choices("algo") if searched else known_presets("--methods", names)
    wanted = list(dict.fromkeys(["dapo", *(names or (name for name in algorithms() if name in known))]))
    settings = [line for line in overrides if line.lstrip("+").startswith("algorithm.")]
    found = []
    for name in wanted:
        config = compose_config([*searched, f"algo={name}", *settings])
        entry = algorithm_of(config)
        assert entry is not None, f"algo={name} trains no registered method"
        of_method, _ = entry.configure(config.algorithm.get(entry.name) or {})
        found.append(Method(name, entry, of_method, str(config.actor_rollout_ref.actor.loss_agg_mode)))
    return found


def effective_credit(A: Floats, mask: Bools, aggregation: str) -> Floats:
    """The coefficient (B, T) of ∇ log π of each token in the objective at ratios of 1, times the tokens of the batch.

    The loss divides advantages A (B, T) by all tokens (`token-mean`), by the responses and the length of each
    (`seq-mean-token-mean`), or by a constant (`seq-mean-token-sum...`), which is dropped.
    """
    if aggregation != "seq-mean-token-mean":
        return np.where(mask, A, 0.0)
    lengths = mask.sum(axis=1, keepdims=True)
    responses = int((lengths > 0).sum())
    return np.where(mask, A * mask.sum() / (responses * np.maximum(lengths, 1)), 0.0)


def credit_of(method: Method, batch: Batch, overlong: Overlong | None) -> Floats:
    """The effective credit (B, T) of a method on a batch, to which its penalty of length is added."""
    lengths = response_lengths(batch.response_mask)
    batch = replace(batch, length_penalty=length_penalty(method.settings, batch, overlong, lengths))
    A = method.entry.advantages(batch, method.settings).advantages.to(torch.float64).numpy()
    return effective_credit(A, (batch.response_mask != 0).numpy(), method.aggregation)
