"""DAPO's advantage reshaped token by token by the entropy of the old policy.

With more entropy a correct token gets more credit in all three; a wrong one gets less blame (`entropy_bonus`), more
(`eapo`), or what the setting says (`polarity_entropy`, our control).
"""

from dataclasses import dataclass, replace

import torch

from gtpo_verl.algorithms.base import Scope, dapo_advantages, entropies, output, over_scope
from gtpo_verl.algorithms.batch import AdvantageOutput, Batch
from gtpo_verl.algorithms.config import NotNegative, Settings
from gtpo_verl.algorithms.registry import Algorithm


@dataclass(frozen=True, kw_only=True)
class EntropyBonusConfig(Settings):
    """alpha: α >= 0, advantage per nat (0.4 for GRPO, 0.1 for PPO). kappa: κ > 1, the bonus is at most |A0| / κ."""

    alpha: NotNegative = 0.4
    kappa: float = 2.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kappa <= 1:
            raise ValueError(f"kappa must be above 1, else the bonus turns the sign of wrong tokens, got {self.kappa}")


def _entropy_bonus(batch: Batch, config: EntropyBonusConfig) -> AdvantageOutput:
    """A = A0 + min(α H, |A0| / κ), arXiv 2506.14758. The bonus is positive on wrong tokens too: it reduces blame.

    Public re-implementations multiply it with A0, or have κ = 1 or 5; the paper's H is that of the policy in training.
    """
    A0 = dapo_advantages(batch)
    A = A0 + torch.minimum(config.alpha * entropies(batch), A0.abs() / config.kappa)
    return output(A, A0, batch)


ENTROPY_BONUS = Algorithm(
    name="entropy_bonus",
    label="Entropy bonus",
    level="token",
    needs=frozenset({"entropy", "rewards"}),
    config=EntropyBonusConfig,
    compute=_entropy_bonus,
    guide="dapo",
    advantage_ns=64.0,
)


@dataclass(frozen=True, kw_only=True)
class EAPOConfig(Settings):
    """alpha: α >= 0. phi: φ > α, |Z| is at most |A0| / φ. scope: of mean and standard deviation, which the source does
    not say.
    """

    alpha: NotNegative = 0.2
    phi: float = 2.0
    scope: Scope = "batch"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.phi <= self.alpha:
            raise ValueError(
                f"alpha / phi must be below 1, else advantages turn their sign, got {self.alpha} / {self.phi}"
            )


def _eapo(batch: Batch, config: EAPOConfig) -> AdvantageOutput:
    """A = A0 + α sign(A0) Z, Z = clip((H - mean) / std, ±|A0| / φ), 0 where std is: arXiv 2604.11056 v1.

    More entropy, more credit and more blame. Read in notes that print both equations and the constants; no code was
    found. The standard deviation is that of the population.
    """
    A0, H = dapo_advantages(batch), entropies(batch)
    mean = over_scope(H, batch, config.scope, torch.mean)
    std = over_scope(H, batch, config.scope, _spread)
    bound = A0.abs() / config.phi
    Z = torch.where(std > 0, (H - mean) / std, 0.0).clamp(-bound, bound)
    return output(A0 + config.alpha * A0.sign() * Z, A0, batch)


def _spread(values: torch.Tensor) -> torch.Tensor:
    """Population standard deviation, 0 for values that differ by round-off only."""
    low, high = values.aminmax()
    differ = high - low > 16 * torch.finfo(values.dtype).eps * high.abs()
    return torch.where(differ, values.std(correction=0), 0.0)


EAPO = replace(ENTROPY_BONUS, name="eapo", label="EAPO", config=EAPOConfig, compute=_eapo, advantage_ns=92.0)


@dataclass(frozen=True, kw_only=True)
class PolarityEntropyConfig(Settings):
    """lambda_correct, lambda_wrong: λ of either polarity; above 0 more entropy means more credit (or blame).

    scope: the tokens whose mean entropy has weight 1. The defaults lean as GTPO does; (0, 0) is DAPO.
    """

    lambda_correct: float = 0.5
    lambda_wrong: float = -0.5
    scope: Scope = "batch"


def _polarity_entropy(batch: Batch, config: PolarityEntropyConfig) -> AdvantageOutput:
    """A = A0 · max(0, 1 + λ (H / mean H - 1)): our control, which spans the directions of the published methods.

    Before the clamp the weights average 1 over the scope if both λ are equal. Where the mean is 0 they are 1.
    """
    A0, H = dapo_advantages(batch), entropies(batch)
    lambdas = torch.full_like(H[:, :1], config.lambda_wrong)
    lambdas[batch.correct] = config.lambda_correct
    mean = over_scope(H, batch, config.scope, torch.mean)
    excess = torch.where(mean > 0, H / mean - 1, 0.0)
    return output(A0 * (1 + lambdas * excess).clamp(min=0), A0, batch)


POLARITY_ENTROPY = replace(
    ENTROPY_BONUS,
    name="polarity_entropy",
    label="Polarity entropy",
    config=PolarityEntropyConfig,
    compute=_polarity_entropy,
    advantage_ns=71.0,
)
