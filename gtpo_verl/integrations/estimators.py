"""The advantage estimators ``gtpo`` and ``grpo_s`` in verl's registry."""

from collections.abc import Callable

import numpy as np
import torch
from omegaconf import DictConfig
from verl.trainer.ppo.core_algos import register_adv_est

from gtpo_verl.algorithms import (
    AdvantageOutput,
    grpo_s_advantages,
    gtpo_advantages,
    length_penalty_for,
    response_lengths,
)
from gtpo_verl.integrations.context import current_context
from gtpo_verl.integrations.settings import algorithm_config


def group_ids(index: np.ndarray) -> torch.Tensor:
    """Number verl's group names: (B,) strings to (B,) int64."""
    _, numbers = np.unique(index, return_inverse=True)
    return torch.from_numpy(numbers.astype(np.int64))


def _estimator(name: str, shape: Callable[..., AdvantageOutput]) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    def estimate(
        token_level_rewards: torch.Tensor,
        response_mask: torch.Tensor,
        config: DictConfig,
        index: np.ndarray,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """verl's contract: rewards (B, T), mask (B, T), algorithm config, group names (B,); advantages and returns (B, T).

        The rewards are not read: a response is correct by its verdict, and penalties are applied to shaped rewards.
        """
        context = current_context(name)
        lengths = dict(context.length_settings)
        factor = lengths.pop("penalty_factor", 1.0)
        settings, _ = algorithm_config(name, config, **lengths)
        group = group_ids(index).to(response_mask.device)
        penalty = None
        if settings.length_penalty != "none":
            penalty = length_penalty_for(settings, response_lengths(response_mask), context.correct, group)
        if settings.length_penalty == "soft":
            penalty = penalty * factor  # as DAPO's reward manager does; group-relative penalties have no such factor
        out = shape(
            *(context.entropy, context.correct, response_mask, group, settings),
            length_penalty=penalty,
            return_shaped=False,
        )
        context.metrics.update(out.metrics)
        return out.advantages, out.advantages

    estimate.__name__ = f"{name}_advantages"
    return estimate


def register() -> None:
    """Make both estimators known to verl in this process."""
    register_adv_est("gtpo")(_GTPO)
    register_adv_est("grpo_s")(_GRPO_S)


_GTPO = _estimator("gtpo", gtpo_advantages)
_GRPO_S = _estimator("grpo_s", grpo_s_advantages)
