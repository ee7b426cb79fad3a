"""What an estimator needs and verl does not pass it: entropies, verdicts, and a place for metrics.

verl calls an advantage estimator with rewards, mask, group index and its config. The trainer puts the rest here for the
duration of that one call.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch

from gtpo_verl.errors import UserError


@dataclass(frozen=True)
class CreditContext:
    """The rest of the batch that is about to get its advantages; row order is that of verl's call.

    Attributes:
        correct: (B,) bool, the verifier's verdict.
        entropy: (B, T) float, nats, of the old policy at the sampling temperature; 0 outside the mask.
        length_settings: settings of the soft overlong penalty, which the run keeps outside ``algorithm``: ``max_length`` and
            ``cache_length`` in tokens, ``penalty_factor``; empty where it is off.
        metrics: filled by the estimator.
    """

    correct: torch.Tensor
    entropy: torch.Tensor
    length_settings: Mapping[str, Any]
    metrics: dict[str, float] = field(default_factory=dict)


_current: ContextVar[CreditContext | None] = ContextVar("gtpo_verl_credit", default=None)


@contextmanager
def credit_context(context: CreditContext) -> Iterator[CreditContext]:
    """Make ``context`` the one that estimators see inside the block."""
    token = _current.set(context)
    try:
        yield context
    finally:
        _current.reset(token)


def current_context(estimator: str) -> CreditContext:
    """The context of the call in progress.

    Raises:
        UserError: the estimator runs under a trainer that is not ours, so there are no entropies to be had.
    """
    context = _current.get()
    if context is None:
        raise UserError(
            f"algorithm.adv_estimator={estimator} needs entropies and verdicts, which verl's own trainer does not pass on: "
            "start the run with `gtpo-verl train` (or python -m gtpo_verl.train) instead of verl.trainer.main_ppo."
        )
    return context
