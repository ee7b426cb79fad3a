"""What an estimator needs beside the rewards, mask, group index and config that verl passes it: entropies, verdicts,
scores, and a place for metrics. The trainer puts it here for the duration of one call.
"""

from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass, field

import torch
from omegaconf import DictConfig, OmegaConf

from gtpo_verl.algorithms import Batch, group_relative_overlong_penalty, soft_overlong_penalty
from gtpo_verl.algorithms.config import ShapingConfig
from gtpo_verl.errors import UserError
from gtpo_verl.integrations.temporarily import bound


@dataclass(frozen=True)
class Overlong:
    """The soft overlong penalty of a run, `reward.reward_kwargs`: its two lengths in tokens and its factor."""

    max_length: int
    cache_length: int
    factor: float = 1.0


def overlong(config: DictConfig) -> Overlong | None:
    """The run's soft overlong penalty, kept in one place, the reward manager's; None where it is switched off."""
    settings = OmegaConf.select(config, "reward.reward_kwargs.overlong_buffer_cfg")
    if not settings or not settings.enable:
        return None
    return Overlong(config.reward.reward_kwargs.max_resp_len, settings.len, settings.penalty_factor)


@dataclass(frozen=True)
class CreditContext:
    """What is about to get its advantages; row order is that of verl's call.

    batch: entropy is 0 outside the mask, which is that before verl's rejection sampling (`rollout_rs`): that takes
    tokens and whole rows out of the loss, and not out of the statistics of their group.
    overlong: the run's soft overlong penalty, or None where it is switched off.
    lengths: (B,) tokens after the prompt, those of tools included, as verl's reward manager counts them; None for those
    of the mask.
    last_output: (B,) int64, for each row the row with the last output of its session; None where every session has one.
    metrics: filled by the estimator.
    """

    batch: Batch
    overlong: Overlong | None = None
    lengths: torch.Tensor | None = None
    last_output: torch.Tensor | None = None
    metrics: dict[str, float] = field(default_factory=dict)


_current: ContextVar[CreditContext | None] = ContextVar("gtpo_verl_credit", default=None)


def credit_context(context: CreditContext) -> AbstractContextManager[None]:
    """Make ``context`` the one that estimators see inside the block."""
    return bound(_current, context)


def current_context(estimator: str) -> CreditContext:
    """The context of the call in progress; raises UserError under verl's own trainer, which has none."""
    context = _current.get()
    if context is None:
        raise UserError(
            f"algorithm.adv_estimator={estimator} needs entropies and verdicts, which verl's own trainer does not pass "
            "on: run `python -m gtpo_verl.main_ppo` with the arguments of verl.trainer.main_ppo."
        )
    return context


def length_penalty(settings: object, batch: Batch, overlong: Overlong | None, lengths: torch.Tensor) -> torch.Tensor:
    """(B,) the length penalty of a batch, 0 where there is none.

    GTPO and GRPO-S name theirs in their own `settings`; any other method gets the run's soft overlong penalty, as DAPO
    does, times the run's `penalty_factor`. lengths: (B,) tokens.
    """
    shaping = settings if isinstance(settings, ShapingConfig) else None
    if shaping is not None and shaping.length_penalty == "grop":
        return group_relative_overlong_penalty(lengths, batch.correct, batch.group, shaping.gamma)
    if overlong is None or (shaping is not None and shaping.length_penalty == "none"):
        return torch.zeros(len(lengths), device=lengths.device)
    denominator = shaping.length_denominator if shaping is not None else "cache"
    return overlong.factor * soft_overlong_penalty(lengths, overlong.max_length, overlong.cache_length, denominator)
