"""Methods of the verdict alone: `w_reinforce`, `psr` and `nsr` (arXiv 2506.01347), `qae` (arXiv 2509.22611), and
`rl_zvp` (arXiv 2509.21880) for groups without contrast.
"""

import math
from dataclasses import dataclass, replace
from typing import Literal

import torch

from gtpo_verl.algorithms.base import dapo_advantages, dtype_of, entropies, output, over_scope, penalised_reward
from gtpo_verl.algorithms.batch import AdvantageOutput, Batch
from gtpo_verl.algorithms.config import NotNegative, Settings
from gtpo_verl.algorithms.groups import group_rows
from gtpo_verl.algorithms.normalization import Moments
from gtpo_verl.algorithms.registry import Algorithm

DYNAMIC_SAMPLING = "algorithm.filter_groups.enable"


@dataclass(frozen=True, kw_only=True)
class WReinforceConfig(Settings):
    """correct, wrong: the advantage of correct responses, and minus that of wrong ones, at least 0."""

    correct: NotNegative = 0.1
    wrong: NotNegative = 1.0


@dataclass(frozen=True, kw_only=True)
class PSRConfig(WReinforceConfig):
    """Positive sample reinforcement."""

    correct: NotNegative = 1.0
    wrong: NotNegative = 0.0


@dataclass(frozen=True, kw_only=True)
class NSRConfig(WReinforceConfig):
    """Negative sample reinforcement."""

    correct: NotNegative = 0.0
    wrong: NotNegative = 1.0


def _w_reinforce(batch: Batch, config: WReinforceConfig) -> AdvantageOutput:
    """A = λ on correct responses, -1 on wrong ones: no baseline, no group, no length penalty.

    Groups of one polarity are trained on like any other. As the published code (TianHongZXY/RLVR-Decomposed).
    """
    A = torch.full(batch.correct.shape, -config.wrong, dtype=dtype_of(batch), device=batch.correct.device)
    A[batch.correct] = config.correct
    return AdvantageOutput(A[:, None] * (batch.response_mask != 0), None, {})


W_REINFORCE = Algorithm(
    name="w_reinforce",
    label="W-REINFORCE",
    level="outcome",
    needs=frozenset(),
    config=WReinforceConfig,
    compute=_w_reinforce,
    guide="alike",
    advantage_ns=10.0,
    changes=(DYNAMIC_SAMPLING,),
    trains_without_contrast=True,
)

PSR = replace(W_REINFORCE, name="psr", label="PSR", config=PSRConfig)

NSR = replace(W_REINFORCE, name="nsr", label="NSR", config=NSRConfig)


@dataclass(frozen=True, kw_only=True)
class QAEConfig(Settings):
    """K: the quantile, in (0, 1). Groups with a share of correct responses up to 1 - K train on the correct ones alone,
    the others on the wrong ones, and either on the length penalty of the rest.
    """

    K: float = 0.4

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.K < 1:
            raise ValueError(f"K must be in (0, 1), got {self.K}")


def _qae(batch: Batch, config: QAEConfig) -> AdvantageOutput:
    """A = (R - b) / (std + 1e-6), b the K-quantile of the rewards of the group: inf{x : F(x) >= K}.

    b is taken of the rewards without the length penalty, which would take responses of one verdict apart. Read in notes
    with the equations; the authors' code (junkangwu/QAE) was not.
    """
    assert batch.rewards is not None
    mask, R = batch.response_mask != 0, penalised_reward(batch)
    rewards, A = batch.rewards.detach().to(R.dtype), torch.zeros_like(R)
    for rows in group_rows(batch.group):
        rows = rows[mask[rows].any(1)]
        if not len(rows):
            continue
        place = math.ceil(config.K * len(rows) - 1e-9)
        baseline = rewards[rows].sort().values[max(place, 1) - 1]
        A[rows] = (R[rows] - baseline) * Moments.of(R[rows]).scale(torch.finfo(R.dtype).eps)
    return AdvantageOutput(A[:, None] * mask, None, {})


QAE = Algorithm(
    name="qae",
    label="QAE",
    level="outcome",
    needs=frozenset({"rewards"}),
    config=QAEConfig,
    compute=_qae,
    guide="alike",
    advantage_ns=8.0,
)


@dataclass(frozen=True, kw_only=True)
class ZVPConfig(Settings):
    """alpha: α >= 0, advantage per nat. max_scope: the tokens whose highest entropy wrong ones are compared with, those
    of the `response` or of the `group`.
    """

    alpha: NotNegative = 0.1
    max_scope: Literal["response", "group"] = "response"


def _rl_zvp(batch: Batch, config: ZVPConfig) -> AdvantageOutput:
    """A0 in groups with contrast; α H where all are correct; -α (max H - H) where all are wrong: eq. 5.

    By the verdict, where the paper has R > 0. Its H is that of the policy in training. No code was found.
    """
    A0, H = dapo_advantages(batch), entropies(batch)
    verdicts = batch.correct[:, None].to(H.dtype).expand_as(H)
    all_correct = over_scope(verdicts, batch, "group", torch.min) == 1
    all_wrong = over_scope(verdicts, batch, "group", torch.max) == 0
    highest = over_scope(H, batch, config.max_scope, torch.max)
    A = torch.where(all_correct, config.alpha * H, torch.where(all_wrong, -config.alpha * (highest - H), A0))
    return output(A, A0, batch)


RL_ZVP = Algorithm(
    name="rl_zvp",
    label="RL-ZVP",
    level="token",
    needs=frozenset({"entropy", "rewards"}),
    config=ZVPConfig,
    compute=_rl_zvp,
    advantage_ns=94.0,
    changes=(DYNAMIC_SAMPLING,),
    trains_without_contrast=True,
)
