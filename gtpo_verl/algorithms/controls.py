"""Controls that take one part out of a method: `dapo_blame` is DAPO with less blame, `gtpo_shuffled` is GTPO with its
sizes of credit on other tokens.
"""

from dataclasses import dataclass
from typing import Literal

import torch

from gtpo_verl.algorithms.base import dapo_advantages, output, scopes
from gtpo_verl.algorithms.batch import AdvantageOutput, Batch
from gtpo_verl.algorithms.config import GroupOrBatch, Settings, ZeroToOne
from gtpo_verl.algorithms.gtpo import GTPO, GTPOConfig
from gtpo_verl.algorithms.registry import Algorithm

AS_PRESET = GTPOConfig(entropy_floor=1e-3)  # that of `algo=gtpo`: at 1e-6 nat, as published, rounding decides


@dataclass(frozen=True, kw_only=True)
class BlameConfig(Settings):
    """kappa: κ, the factor on the negative advantages of wrong responses, in [0, 1]; 1 is DAPO."""

    kappa: ZeroToOne = 0.5


def _dapo_blame(batch: Batch, config: BlameConfig) -> AdvantageOutput:
    """A = κ A0 where a response is wrong and A0 < 0, else A0."""
    A0 = dapo_advantages(batch)
    return output(torch.where(~batch.correct[:, None] & (A0 < 0), config.kappa * A0, A0), A0, batch)


@dataclass(frozen=True, kw_only=True)
class ShuffledConfig(Settings):
    """side: whose advantages change places, those of `wrong` responses, or of `both` kinds, each among themselves.
    scope: where they do, within a `group` or in the whole `batch`, which also mixes groups of other success rates.
    """

    side: Literal["wrong", "both"] = "wrong"
    scope: GroupOrBatch = "group"


def _gtpo_shuffled(batch: Batch, config: ShuffledConfig) -> AdvantageOutput:
    """GTPO's advantages in random order over the tokens of one verdict and scope: their sizes stay."""
    A0 = GTPO.advantages(batch, AS_PRESET).advantages
    A, mask = A0.clone(), batch.response_mask != 0
    generator = torch.Generator().manual_seed(batch.seed)
    for rows in scopes(batch, config.scope):
        for verdict in (False, True) if config.side == "both" else (False,):
            tokens = mask[rows] & (batch.correct[rows] == verdict)[:, None]
            values = A0[rows][tokens]
            moved = torch.randperm(len(values), generator=generator).to(values.device)
            A[rows] = A[rows].masked_scatter(tokens, values[moved])
    return output(A, A0, batch)


DAPO_BLAME = Algorithm(
    name="dapo_blame",
    label="DAPO, less blame",
    level="outcome",
    needs=frozenset({"rewards"}),
    config=BlameConfig,
    compute=_dapo_blame,
    guide="alike",
    advantage_ns=30.0,
)

GTPO_SHUFFLED = Algorithm(
    name="gtpo_shuffled",
    label="GTPO, shuffled",
    level="token",
    needs=frozenset({"entropy"}),
    config=ShuffledConfig,
    compute=_gtpo_shuffled,
    advantage_ns=60.0,
)
