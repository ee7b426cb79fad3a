"""DAPO's advantage reshaped by the probability π of the sampled token: `ar`, `prob_mask`, `stare_o1` and `stare_c2`."""

from dataclasses import dataclass, replace

import torch

from gtpo_verl.algorithms.base import dapo_advantages, entropies, highest, log_probs, output
from gtpo_verl.algorithms.batch import AdvantageOutput, Batch
from gtpo_verl.algorithms.config import NotNegative, Settings, ZeroToOne
from gtpo_verl.algorithms.registry import Algorithm


@dataclass(frozen=True, kw_only=True)
class ARConfig(Settings):
    """alpha: α in [0, 1], what a token of probability 0 loses; 0.2 in the published runs without Lopti, 0.3 with it."""

    alpha: ZeroToOne = 0.2


def _ar(batch: Batch, config: ARConfig) -> AdvantageOutput:
    """A = A0 (α π + 1 - α), advantage reweighting, arXiv 2505.12929: tokens of low probability get less, on both sides.

    The published code (zhyang2226/AR-Lopti) can also scale negative advantages: 0.8 in its YAML, 1 in every script, as
    here.
    """
    A0 = dapo_advantages(batch)
    return output(A0 * (1 - config.alpha * (1 - log_probs(batch).exp())), A0, batch)


AR = Algorithm(
    name="ar",
    label="AR",
    level="token",
    needs=frozenset({"rewards", "old_log_probs"}),
    config=ARConfig,
    compute=_ar,
    guide="dapo",
    advantage_ns=64.0,
)


@dataclass(frozen=True, kw_only=True)
class ProbMaskConfig(Settings):
    """threshold: tokens of at least this probability get no credit; above 1 all get it."""

    threshold: NotNegative = 0.9


def _prob_mask(batch: Batch, config: ProbMaskConfig) -> AdvantageOutput:
    """A = A0 where π < 0.9, else 0: the mask of SPO, arXiv 2505.23564; the loss is divided by all tokens."""
    A0 = dapo_advantages(batch)
    kept = log_probs(batch).exp() < config.threshold
    return output(A0 * kept, A0, batch, kept)


PROB_MASK = replace(
    AR, name="prob_mask", label="Probability mask", config=ProbMaskConfig, compute=_prob_mask, advantage_ns=74.0
)


@dataclass(frozen=True, kw_only=True)
class StareConfig(Settings):
    """Settings of STARE; the defaults are variant O1 for 7B (14B and 32B: w 1.05, and m 0.95 in C2).

    top_ratio: share of the tokens of either sign that counts as surprising. w, m: factors, above 0, on the advantages
    of surprising tokens, positive and negative ones. target_entropy: in nats; they apply in steps whose mean entropy is
    below it, null: in all.
    """

    top_ratio: ZeroToOne = 0.1
    w: float = 1.1
    m: float = 1.0
    target_entropy: NotNegative | None = 0.3

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("w", "m"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be above 0, got {getattr(self, name)}")


@dataclass(frozen=True, kw_only=True)
class StareC2Config(StareConfig):
    """Variant C2 for 7B: surprising tokens of negative advantage are scaled as well."""

    m: float = 0.9


def _stare(batch: Batch, config: StareConfig) -> AdvantageOutput:
    """A = ω A0, ω = W on the tokens with A0 > 0 and M on those with A0 < 0 whose surprisal -log π is in the top P of
    their sign; ω = 1 elsewhere, and everywhere unless the mean entropy of the step is below the target. arXiv
    2606.19236.

    The published code (hp-luo/STARE) ranks within a micro-batch and by the current policy; the text says batch. Its
    adaptive W and M, off by default, are not here. The mean entropy is that over tokens.
    """
    A0, mask = dapo_advantages(batch), batch.response_mask != 0
    weight = torch.ones_like(A0)
    mean_entropy = entropies(batch).sum() / mask.sum().clamp(min=1)
    if config.target_entropy is None or mean_entropy < config.target_entropy:
        surprisal = -log_probs(batch)
        for side, factor in ((A0 > 0, config.w), (A0 < 0, config.m)):
            weight[highest(surprisal, side, config.top_ratio)] = factor
    return output(weight * A0, A0, batch)


STARE_O1 = replace(
    AR,
    name="stare_o1",
    label="STARE O1",
    needs=frozenset({"entropy", "rewards", "old_log_probs"}),
    config=StareConfig,
    compute=_stare,
    advantage_ns=80.0,
)

STARE_C2 = replace(STARE_O1, name="stare_c2", label="STARE C2", config=StareC2Config)
