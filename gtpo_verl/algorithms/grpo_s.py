"""GRPO-S: sequence-level reward shaping by policy entropy (arXiv 2508.04349).

The formulas are on the responses of one polarity in one group, (n, 1), one number for each, in this order: mean
entropies Ĥ -> values V (Ĥ, or 1/Ĥ in wrong responses) -> weights w -> shaped rewards r̂ -> advantages Â. V and w are
GTPO's, of responses in place of tokens: w = Ĥ[i] / mean_{k∈P} Ĥ[k] for correct ones, and for wrong ones
w = (1/Ĥ[j]) / mean_{k∈N} (1/Ĥ[k]). β1, β2 are `config.beta1`, `config.beta2`; P are the n correct responses to a
prompt, N the m wrong ones. "early" is arXiv v1 to v4, "late" is v5 and v6. The last step is in normalization.py, and
the loop over groups in shaping.py.
"""

from dataclasses import dataclass

import torch

from gtpo_verl.algorithms.base import response_means
from gtpo_verl.algorithms.batch import AdvantageOutput
from gtpo_verl.algorithms.config import Mean, NotNegative, ShapingConfig, check_shares
from gtpo_verl.algorithms.gtpo import values, weights
from gtpo_verl.algorithms.penalties import of_batch
from gtpo_verl.algorithms.registry import Algorithm, Style
from gtpo_verl.algorithms.shaping import Formulas, ShapedBatch, Totals


@dataclass(frozen=True, kw_only=True)
class GRPOSConfig(ShapingConfig):
    """Settings of GRPO-S; the defaults are the preset `grpo_s` (late text of arXiv 2508.04349).

    beta1, beta2: base reward and weight of the entropy term.
    entropy_mean: how the entropies of a response become one number, `arithmetic` or `geometric`.
    """

    beta1: NotNegative = 1.0
    beta2: NotNegative = 0.1
    entropy_mean: Mean = "arithmetic"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_shares("beta1", self.beta1, "beta2", self.beta2)


# ---------------------------------------------------------------------------------------------------- the formulas


def mean_entropies(H: torch.Tensor, mask: torch.Tensor, config: GRPOSConfig) -> torch.Tensor:
    """Ĥ (n, 1): the arithmetic or geometric mean of the entropies H (n, T) of each response, 0 or 1 without tokens."""
    terms = H if config.entropy_mean == "arithmetic" else H.log()
    mean = response_means(terms, mask)
    return mean if config.entropy_mean == "arithmetic" else mean.exp()


def totals(V: torch.Tensor, mask: torch.Tensor, config: GRPOSConfig) -> Totals:
    """Σ V, or Σ log V for the geometric mean, over the responses that are compared, and how many they are: (1, 1)."""
    terms = V if config.mean == "arithmetic" else V.log()
    return torch.where(mask, terms, 0.0).sum(0, keepdim=True), mask.sum(0, keepdim=True)


def rewards_of_correct(W: torch.Tensor, penalty: torch.Tensor | None, config: GRPOSConfig) -> torch.Tensor:
    """r̂ of correct responses: early section 3.4, late section on GRPO-S."""
    R = config.beta1 + config.beta2 * W
    return R if penalty is None else R + penalty  # of length: early eq. 14, late appendix D


def rewards_of_wrong(W: torch.Tensor, config: GRPOSConfig) -> torch.Tensor:
    """r̂ of wrong responses: early sections 3.4 and 4.6, late section on GRPO-S."""
    if config.negatives == "zero":  # early 3.4
        return torch.zeros_like(W)
    if config.negatives == "inverse":  # early 4.6
        return -W
    return -config.beta1 - config.beta2 * W  # late


FORMULAS = Formulas(mean_entropies, values, totals, weights, rewards_of_correct, rewards_of_wrong)


# ---------------------------------------------------------------------------------------------------- over a batch


def grpo_s_advantages(
    entropy: torch.Tensor,
    correct: torch.Tensor,
    response_mask: torch.Tensor,
    group: torch.Tensor,
    config: GRPOSConfig,
    length_penalty: torch.Tensor | None = None,
    return_shaped: bool = True,
    guide: torch.Tensor | None = None,
) -> AdvantageOutput:
    """Shape the reward of every response by its mean entropy, normalise it to an advantage and give it to all its
    tokens.

    Arguments, types and errors as in `gtpo_advantages`; guide rows have the unshaped reward, that of weight 1.
    Returns advantages (B, T), shaped rewards (B,), float64 for float64 entropies and else float32, and the metrics of
    `CreditMetrics`.
    Source: arXiv 2508.04349, early sections 3.4 and 4.6, late section on GRPO-S; normalisation as in GTPO, over
    responses.
    """
    batch = ShapedBatch(FORMULAS, config, entropy, correct, response_mask, group, length_penalty, guide)
    return batch.advantages(return_shaped)


GRPO_S = Algorithm(
    name="grpo_s",
    label="GRPO-S",
    level="sequence",
    needs=frozenset({"entropy"}),
    config=GRPOSConfig,
    compute=of_batch(grpo_s_advantages),
    loss="grpo_s",
    aggregation="seq-mean-token-mean",
    changes=(
        "actor_rollout_ref.actor.policy_loss.seq_ratio",
        "actor_rollout_ref.actor.policy_loss.seq_clip_ratio_low",
        "actor_rollout_ref.actor.policy_loss.seq_clip_ratio_high",
    ),
    guide="unshaped",
    advantage_ns=29.0,
    style=Style(light="#d55e00", dark="#ff9448", marker="diamond"),
)
