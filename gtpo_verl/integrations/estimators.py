"""The registered methods as advantage estimators in verl's registry."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from omegaconf import DictConfig

from gtpo_verl.algorithms import Algorithm, algorithms, response_lengths
from gtpo_verl.algorithms.mixed_policy import guide_config, guided_advantages
from gtpo_verl.integrations.context import current_context, length_penalty

Estimator = Callable[..., tuple[torch.Tensor, torch.Tensor]]


def group_ids(index: Sequence[str] | np.ndarray) -> torch.Tensor:
    """Number verl's group names: (B,) strings to (B,) int64."""
    _, numbers = np.unique(index, return_inverse=True)
    return torch.from_numpy(numbers.astype(np.int64))


def estimator(entry: Algorithm) -> Estimator:
    """A method in the form that verl calls."""

    def estimate(
        token_level_rewards: torch.Tensor, response_mask: torch.Tensor, config: DictConfig, index: np.ndarray
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Advantages and returns (B, T) from rewards (B, T), mask (B, T), algorithm config and group names (B,).

        Of the rewards, which include the overlong penalty, and the names nothing is read: the context has scores and
        penalty apart, and the groups.
        """
        context = current_context(entry.name)
        settings, _ = entry.configure(config.get(entry.name) or {})
        batch, last = context.batch, context.last_output
        mask = batch.response_mask
        lengths = response_lengths(mask) if context.lengths is None else context.lengths
        if last is not None:
            rows = last.unique()
            tensors = {name: value for name, value in vars(batch).items() if isinstance(value, torch.Tensor)}
            of_last: dict[str, Any] = {name: value[rows] for name, value in tensors.items()}
            batch, lengths = replace(batch, **of_last), lengths[rows]
        if batch.guide is not None:  # the guide's responses have no penalty, and are no measure of the policy's
            lengths = lengths.masked_fill(batch.guide, 0)
        batch = replace(batch, length_penalty=length_penalty(settings, batch, context.overlong, lengths))
        if batch.guide is None:
            out = entry.advantages(batch, settings)
        else:
            guide = guide_config(config.guide)
            out = guided_advantages(entry, replace(batch, guide=None), batch.guide, guide, settings)
        context.metrics.update(out.metrics)
        advantages = out.advantages if last is None else _of_sessions(out.advantages, mask, last)
        advantages = torch.where(response_mask != 0, advantages.to(token_level_rewards.dtype), 0.0)
        return advantages, advantages

    estimate.__name__ = f"{entry.name}_advantages"
    return estimate


def _of_sessions(advantages: torch.Tensor, mask: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
    """(B, T) from (S, T), those of the last outputs of the S sessions in the order of their rows: the outputs before
    the last get its mean advantage, as verl's `grpo` gives them its only one.

    mask: (B, T), tokens of the policy. last: (B,), the row of the last output of each row's session.
    """
    rows, session = last.unique(return_inverse=True)
    means = advantages.sum(1) / (mask[rows] != 0).sum(1).clamp(min=1)
    whole = means[session][:, None] * (mask != 0)
    whole[rows] = advantages
    return whole


def register() -> None:
    """Make every method that is not verl's own known to verl in this process."""
    # here: `import verl` runs the plugin, which needs this module whole
    from verl.trainer.ppo.core_algos import register_adv_est

    for name, function in _ESTIMATORS.items():
        register_adv_est(name)(function)


_ESTIMATORS = {entry.name: estimator(entry) for entry in algorithms().values() if entry.verl_estimator is None}
