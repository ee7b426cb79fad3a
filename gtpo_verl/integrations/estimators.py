"""The registered methods as advantage estimators in verl's registry."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from omegaconf import DictConfig
from verl.trainer.ppo.core_algos import register_adv_est

from gtpo_verl.algorithms import Algorithm, Batch, algorithms
from gtpo_verl.algorithms.mixed_policy import guide_config, guided_advantages
from gtpo_verl.integrations.context import current_context, length_penalty

Estimator = Callable[..., tuple[torch.Tensor, torch.Tensor]]


def group_ids(index: np.ndarray) -> torch.Tensor:
    """Number verl's group names: (B,) strings to (B,) int64."""
    _, numbers = np.unique(index, return_inverse=True)
    return torch.from_numpy(numbers.astype(np.int64))


def estimator(entry: Algorithm) -> Estimator:
    """A method in the form that verl calls."""

    def estimate(
        token_level_rewards: torch.Tensor,
        response_mask: torch.Tensor,
        config: DictConfig,
        index: np.ndarray,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """verl's contract: rewards (B, T), mask (B, T), algorithm config, group names (B,); advantages and returns (B,
        T).

        The token rewards are not read, since they include the overlong penalty: scores and penalty come apart in the
        context.
        """
        context = current_context(entry.name)
        settings, _ = entry.configure(config.get(entry.name) or {})
        batch = Batch(
            response_mask,
            group_ids(index).to(response_mask.device),
            context.correct,
            entropy=context.entropy,
            rewards=context.rewards,
            old_log_probs=context.old_log_probs,
            seed=context.seed,
        )
        batch = replace(batch, length_penalty=length_penalty(settings, batch, context.overlong))
        if context.guide is None:
            out = entry.advantages(batch, settings)
        else:
            out = guided_advantages(entry, batch, context.guide, guide_config(config.guide), settings)
        context.metrics.update(out.metrics)
        advantages = out.advantages.to(token_level_rewards.dtype)
        return advantages, advantages

    estimate.__name__ = f"{entry.name}_advantages"
    return estimate


def register() -> None:
    """Make every method that is not verl's own known to verl in this process."""
    for name, function in _ESTIMATORS.items():
        register_adv_est(name)(function)


_ESTIMATORS = {entry.name: estimator(entry) for entry in algorithms().values() if entry.verl_estimator is None}
