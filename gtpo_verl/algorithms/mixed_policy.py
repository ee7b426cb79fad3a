"""Mixed-policy DAPO: groups in which some responses are a guiding policy's. A reconstruction after the abstract of
arXiv 2507.12931, the only part of it that was read; LUFFY (arXiv 2504.14945) is one of its settings.

A group has N_on responses of the policy that generates (own rows) and N_off of a frozen policy π_φ (guide rows). Guide
rows have ratios r̂ = π_θ / π_φ. docs/guides/mixed-policy.md says what is read and what is inferred.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from gtpo_verl.algorithms.base import dapo_advantages, penalised_reward
from gtpo_verl.algorithms.batch import AdvantageOutput, Batch
from gtpo_verl.algorithms.config import Settings, config_from
from gtpo_verl.algorithms.groups import group_rows
from gtpo_verl.algorithms.grpo import DAPO
from gtpo_verl.algorithms.losses import LOG_RATIO_BOUND
from gtpo_verl.algorithms.normalization import STD_EPSILON, Moments
from gtpo_verl.algorithms.other_losses import ACTOR, CLIP_RANGE, DR_GRPO
from gtpo_verl.algorithms.registry import Algorithm
from gtpo_verl.errors import UserError

# `policy_loss.loss_mode` of a run that may have a guide, and the loss that tells the guide's rows from the others: that
# of tokens, `mixed`, is verl's `vanilla` on the others.
GUIDED_LOSSES = {"vanilla": "mixed", "mixed": "mixed", "grpo_s": "grpo_s"}


@dataclass(frozen=True, kw_only=True)
class GuideConfig(Settings):
    """`algorithm.guide`: which rows of a group are the guide's, and what the objective makes of them.

    mode: `mix` gives the last `n_off` rows of a group to the guide unless all the others are correct; `zero` gives it
    the last `n_zero` rows if all the others are wrong; `both` does both, and `off` neither.
    source: where its responses are from: `traces`, a column of the training data, or `server`, a model in vLLM replicas
    of its own.
    model: of `server`, a directory in Hugging Face format or a name on the hub; its tokenizer is the policy's.
    replicas, tensor_parallel_size: of `server`, how many there are and the devices of each, all on one node.
    ratio: denominator of a guide row's ratio, π_φ (`phi`), 1 (`one`), or the old policy as for own rows (`old`).
    clip: of guide rows, the run's clip range and dual clip (`dapo`), or `none`.
    shape_gamma: γ > 0 of the shaping f(r̂) = r̂ / (r̂ + γ) in place of r̂, without a clip; None for none.
    adv_scope: mean and standard deviation of a group over all its rows (`union`) or its own alone (`on_only`).
    in_entropy_stats: a method that weighs tokens by entropies treats guide rows like any other; else they have an
    unshaped reward, and own rows are compared with each other alone (`guided_advantages`).
    drop_wrong: a response of the guide that the verifier calls wrong is replaced by one of the policy's own.
    last_step: the last step in which the guide takes part; None for no end.
    """

    mode: Literal["off", "mix", "zero", "both"] = "off"
    source: Literal["traces", "server"] = "traces"
    model: str | None = None
    replicas: int = 1
    tensor_parallel_size: int = 1
    n_off: int = 1
    n_zero: int = 1
    ratio: Literal["phi", "one", "old"] = "phi"
    clip: Literal["dapo", "none"] = "dapo"
    shape_gamma: float | None = None
    adv_scope: Literal["union", "on_only"] = "union"
    in_entropy_stats: bool = False
    drop_wrong: bool = False
    last_step: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.in_entropy_stats and self.adv_scope != "union":
            raise ValueError("in_entropy_stats=true makes guide rows like any other: set adv_scope=union")
        if self.source == "server" and not self.model:
            raise ValueError("source=server needs model=DIRECTORY (Hugging Face format), the guide")
        if self.source == "traces" and self.model is not None:
            raise ValueError("model is read with source=server alone: set source=server, or model=null")
        if self.shape_gamma is not None and self.shape_gamma <= 0:
            raise ValueError(f"shape_gamma must be above 0, got {self.shape_gamma}")
        if self.shape_gamma is not None and self.clip != "none":
            raise ValueError("shape_gamma is a shaping without a clip: set clip=none, or shape_gamma=null")
        if self.ratio == "one" and self.clip != "none":
            raise ValueError(
                "ratio=one with clip=dapo would take the gradient of every guide token with A < 0 and π_θ below "
                "1 - clip_ratio_low, and never bind for A > 0: set clip=none"
            )

    @property
    def served(self) -> bool:
        """Whether the run has servers of the guide."""
        return self.mode != "off" and self.source == "server"

    @property
    def devices(self) -> int:
        """Of the guide's servers."""
        return self.replicas * self.tensor_parallel_size if self.served else 0

    @property
    def mixed(self) -> int:
        """Rows of a group that go to the guide unless all others are correct."""
        return self.n_off if self.mode in ("mix", "both") else 0

    @property
    def reserved(self) -> int:
        """The last rows of a group, which may go to the guide: the others are drawn and judged first."""
        return self.mixed + (self.n_zero if self.mode in ("zero", "both") else 0)

    def rows(self, verdicts: Sequence[bool]) -> int:
        """How many of the reserved rows go to the guide, by the verdicts on the group's other rows.

        None where all are correct: beside a wrong row of the guide they would teach to unlearn the guide.
        """
        if all(verdicts):
            return 0
        return self.mixed if any(verdicts) else self.reserved


def guide_config(settings: Mapping[str, Any]) -> GuideConfig:
    """The guide of a run, from `algorithm.guide`. Raises UserError for an unknown key or an impossible value."""
    try:
        return config_from(GuideConfig, settings)
    except ValueError as error:
        raise UserError(f"algorithm.guide: {error}") from error


# -------------------------------------------------------------------- advantages


def on_only_advantages(
    rewards: torch.Tensor, group: torch.Tensor, guide: torch.Tensor, by_std: bool = True
) -> torch.Tensor:
    """A = (R - mean) / (std + 1e-6) of own and guide rows, mean and standard deviation over the own rows of the group.

    rewards: (B,) float. group: (B,) integers. guide: (B,) bool, the guide's rows. by_std: divide by it.
    Where the own rows of a group have equal rewards, the divisor is 1: they have A = 0 and a guide row R - mean. A
    group without own rows has A = 0. Returns (B,) of the type of `rewards`.
    Source: inferred; LUFFY's code has it (`grpo_split`).
    """
    A = torch.zeros_like(rewards)
    for rows in group_rows(group):
        own = Moments.of(rewards[rows[~guide[rows]]])
        if not own.count:
            continue
        std = own.std(torch.finfo(rewards.dtype).eps)
        A[rows] = (rewards[rows] - own.mean) / (std + STD_EPSILON if by_std and std else 1.0)
    return A


def has_rule(entry: Algorithm, settings: GuideConfig) -> bool:
    """Whether a method says what the advantages of guide rows are."""
    if settings.adv_scope == "on_only":
        return entry.guide == "dapo" or (entry.guide == "alike" and entry.verl_estimator == "grpo")
    return entry.guide is not None


def guided_advantages(
    entry: Algorithm, batch: Batch, guide: torch.Tensor, settings: GuideConfig, config: Any = None
) -> AdvantageOutput:
    """Advantages of a method for a batch in which some rows are a guide's.

    entry, batch, config: as in `Algorithm.advantages`. guide: (B,) bool.
    The rule is `entry.guide`. `alike`: rows of either kind are the same to a method of rewards alone. `dapo`: guide
    rows have DAPO's advantage A0, and the method reshapes that of own rows, seeing no entropy or probability of the
    others; A0 is over the rows that `settings.adv_scope` says. `unshaped`: GTPO and GRPO-S, `gtpo_advantages`.
    Metrics of the method are of own rows, unless the rule is `alike`.
    Raises ValueError for a method without a rule; with `adv_scope=on_only`, for those of verl's estimator, which knows
    none, and for GTPO and GRPO-S: where own rows have one verdict, their shaped rewards differ by entropies alone, and
    say nothing about the size of an advantage.
    """
    if not has_rule(entry, settings):
        raise ValueError(f"{entry.label} has no rule for rows of a guide with adv_scope={settings.adv_scope}")
    if entry.guide == "alike" and settings.adv_scope == "on_only":
        raise ValueError(f"{entry.label} is verl's estimator, which knows no adv_scope: see `on_only_advantages`")
    if entry.guide == "alike" or settings.in_entropy_stats:
        return entry.advantages(batch, config)
    if entry.guide == "unshaped":
        return entry.advantages(replace(batch, guide=guide), config)
    mask = batch.response_mask != 0
    A0 = dapo_advantages(batch)
    if settings.adv_scope == "on_only":
        whole = mask.any(1)
        A0 = torch.zeros_like(A0)
        A0[whole] = on_only_advantages(penalised_reward(batch)[whole], batch.group[whole], guide[whole])[:, None]
    own = entry.advantages(replace(batch, response_mask=mask & ~guide[:, None], A0=A0), config)
    advantages = torch.where(guide[:, None] & mask, A0.to(own.advantages.dtype), own.advantages)
    return replace(own, advantages=advantages)


def guide_metrics(
    log_prob: torch.Tensor,
    guide_log_prob: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    clip_ratio_low: float,
    clip_ratio_high: float,
) -> dict[str, float]:
    """How far the policy is from the guide on the guide's responses.

    log_prob, guide_log_prob, advantages: (B, T), log π and log π_φ, or the denominator in its place. mask: (B, T) bool,
    tokens of guide rows, at least one.
    Returns `ratio_mean`; `clipfrac`, the share of tokens outside the clip range on the side where it binds; `ess`, the
    effective sample size (Σr̂)² / Σr̂² as a share of the tokens, 1 where all ratios are equal.
    """
    ratio = (log_prob - guide_log_prob)[mask].double().clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()
    A = advantages[mask]
    bound = ((A > 0) & (ratio > 1 + clip_ratio_high)) | ((A < 0) & (ratio < 1 - clip_ratio_low))
    return {
        "ratio_mean": ratio.mean().item(),
        "clipfrac": bound.double().mean().item(),
        "ess": (ratio.sum().square() / ratio.square().sum() / len(ratio)).item(),
    }


# A group's advantages are over all its rows, whoever wrote them: DAPO's, and Dr. GRPO's, which LUFFY's code has.
DAPO_MIXED = replace(
    DAPO,
    name="dapo_mixed",
    label="Mixed-policy DAPO",
    loss="mixed",
    changes=("algorithm.guide.",),
    style=None,
)

LUFFY = replace(
    DR_GRPO,
    name="luffy",
    label="LUFFY",
    loss="mixed",
    changes=(
        "algorithm.guide.",
        *DR_GRPO.changes,
        *CLIP_RANGE,
        f"{ACTOR}clip_ratio_c",
        f"{ACTOR}entropy_coeff",
    ),
)
