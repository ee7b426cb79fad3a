"""GTPO: token-level reward shaping by policy entropy (arXiv 2508.04349, not the other GTPO of arXiv 2508.03772).

The formulas are on the responses of one polarity in one group, (n, T) or (m, T), in this order:

    H  entropies of the old policy, nats        -> V  what a token is compared by: H, or 1/H in wrong responses
    -> W  weights, V over its mean              -> R  shaped rewards          -> A  advantages, R normalised

P is the set of the n correct responses to a prompt, N that of the m wrong ones; α1, α2 are `config.alpha1`,
`config.alpha2`; d[t] is the number of correct responses with a token at position t, h[t] of wrong ones. The mask marks
the tokens that are compared: the others may hold anything. "early" is arXiv v1 to v4, "late" is v5 and v6. The last
step, R -> A, is in normalization.py, and the loop over groups in shaping.py.
"""

from dataclasses import dataclass
from typing import Literal

import torch

from gtpo_verl.algorithms.batch import AdvantageOutput
from gtpo_verl.algorithms.config import NotNegative, ShapingConfig, check_shares
from gtpo_verl.algorithms.penalties import of_batch
from gtpo_verl.algorithms.registry import Algorithm, Style
from gtpo_verl.algorithms.shaping import Formulas, ShapedBatch, Totals

COMPARED = {"position": (0,), "response": (1,), "matrix": (0, 1)}  # the dimensions of (n, T) that `axis` compares over


@dataclass(frozen=True, kw_only=True)
class GTPOConfig(ShapingConfig):
    """Settings of GTPO; the defaults are the preset `gtpo_v6` (late text of arXiv 2508.04349).

    alpha1, alpha2: base reward and weight of the entropy term, early eq. 2, late eqs. 3 and 5.
    axis: the entropies one is compared with: same `position`, same `response`, or the `matrix` of both.
    clip_kappa: κ of the early eq. 13, which clips the correct rewards to [1, alpha1 (1 + 1/κ)], or None.
    """

    alpha1: NotNegative = 1.0
    alpha2: NotNegative = 0.1
    axis: Literal["position", "response", "matrix"] = "position"
    clip_kappa: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_shares("alpha1", self.alpha1, "alpha2", self.alpha2)
        if self.clip_kappa is None:
            return
        if self.clip_kappa <= 1:
            raise ValueError(f"clip_kappa must be above 1 (early eq. 13), got {self.clip_kappa}")
        # An upper bound of exactly 1 is legal; 0.9 * (1 + 1/9) must not fail by its last bit.
        if self.alpha1 * (1 + 1 / self.clip_kappa) < 1 - 1e-12:
            raise ValueError(
                f"clip_kappa needs alpha1 * (1 + 1/kappa) >= 1, else the bounds of early eq. 13 cross: "
                f"{self.alpha1} * (1 + 1/{self.clip_kappa}) = {self.alpha1 * (1 + 1 / self.clip_kappa):.4g}"
            )

    @property
    def compares_batch(self) -> bool:
        """Whether the entropies of all groups are compared; those of one response never leave it."""
        return super().compares_batch and self.axis != "response"


# ---------------------------------------------------------------------------------------------------- the formulas


def values(H: torch.Tensor, correct: bool) -> torch.Tensor:
    """V = H in correct responses, 1/H in wrong ones."""
    return H if correct else 1 / H


def totals(V: torch.Tensor, mask: torch.Tensor, config: GTPOConfig) -> Totals:
    """Σ V, or Σ log V for the geometric mean, over the tokens that one is compared with, and how many they are.

    axis `position`: over the responses alive at t, d[t] or h[t] many, (1, T); `response`: over the tokens of a
    response, (n, 1); `matrix`: over all of them, (1, 1).
    """
    terms = V if config.mean == "arithmetic" else V.log()
    axis = COMPARED[config.axis]
    return torch.where(mask, terms, 0.0).sum(axis, keepdim=True), mask.sum(axis, keepdim=True)


def weights(V: torch.Tensor, totals: Totals, config: ShapingConfig) -> torch.Tensor:
    """W = V / mean of V: it averages 1 over the tokens that are compared.

    Arithmetic, correct: early eq. 2, late eq. 3: w⁺ = H[i,t] / Σ_{k∈P} H[k,t] · d[t].
    Arithmetic, wrong: early eq. 15, late eq. 5: w⁻ = (1/H[j,t]) / Σ_{k∈N} (1/H[k,t]) · h[t].
    Geometric: early eqs. 3 and 19, late appendix C: w⁺ = H[i,t] / (Π_{k∈P} H[k,t])^(1/d[t]), and so with 1/H and h[t].
    """
    mean = totals[0] / totals[1]  # a quotient: the weight of a single survivor is exactly 1
    return V / (mean if config.mean == "arithmetic" else mean.exp())


def rewards_of_correct(W: torch.Tensor, penalty: torch.Tensor | None, config: GTPOConfig) -> torch.Tensor:
    """r⁺ of correct responses: early eqs. 2, 13, 14, late eq. 3."""
    R = config.alpha1 + config.alpha2 * W  # early eq. 2, late eq. 3: r⁺ = α1 + α2 w⁺
    if config.clip_kappa is not None:  # early eq. 13: r⁺ ← clip(r⁺, 1, α1 + α1/κ)
        R = R.clamp(1.0, config.alpha1 * (1 + 1 / config.clip_kappa))
    if penalty is not None:  # r⁺ ← r⁺ + R(len): early eq. 14, or the group-relative penalty of late appendix D
        R = R + penalty
    return R


def rewards_of_wrong(W: torch.Tensor, config: GTPOConfig) -> torch.Tensor:
    """r⁻ of wrong responses: early eqs. 2, 15, late eq. 5."""
    if config.negatives == "zero":  # early eq. 2: r⁻ = 0
        return torch.zeros_like(W)
    if config.negatives == "inverse":  # early eq. 15: r⁻ = -w⁻
        return -W
    return -config.alpha1 - config.alpha2 * W  # late eq. 5: r⁻ = -α1 - α2 w⁻


FORMULAS = Formulas(None, values, totals, weights, rewards_of_correct, rewards_of_wrong)


# ---------------------------------------------------------------------------------------------------- over a batch


def gtpo_advantages(
    entropy: torch.Tensor,
    correct: torch.Tensor,
    response_mask: torch.Tensor,
    group: torch.Tensor,
    config: GTPOConfig,
    length_penalty: torch.Tensor | None = None,
    return_shaped: bool = True,
    guide: torch.Tensor | None = None,
) -> AdvantageOutput:
    """Shape the reward of every token by the entropy of the old policy and normalise it to an advantage.

    entropy: (B, T) nats of the old policy at the sampling temperature; padding may hold anything. Never receives a
    gradient.
    correct: (B,) bool, the verifier's verdict. response_mask: (B, T) bool or 0/1, right-padded, holes allowed. group:
    (B,) integers.
    length_penalty: (B,) <= 0, added to the shaped rewards of correct responses whatever `config.length_penalty` says
    (`length_penalty_for` computes the one it names), or None.
    return_shaped: also return the shaped rewards, another (B, T).
    guide: (B,) bool, rows of a guiding policy, or None. Their tokens have the unshaped reward, that of weight 1, and
    are in the sets of the normalisation; their entropies, which may be anything, are compared with none, and the
    metrics are of the others.
    Returns advantages and shaped rewards (B, T), float64 for float64 entropies and else float32, and the metrics of
    `CreditMetrics`.
    Raises ValueError for shapes or types that disagree and for entropies that are not finite or negative, with row and
    position.
    Source: early eqs. 2, 3, 4, 13 to 17, 19; late eqs. 3, 5, 6 and appendix C. docs/reference/equations.md.
    """
    batch = ShapedBatch(FORMULAS, config, entropy, correct, response_mask, group, length_penalty, guide)
    return batch.advantages(return_shaped)


GTPO = Algorithm(
    name="gtpo",
    label="GTPO",
    level="token",
    needs=frozenset({"entropy"}),
    config=GTPOConfig,
    compute=of_batch(gtpo_advantages),
    guide="unshaped",
    advantage_ns=44.0,
    style=Style(light="#0072b2", dark="#56b4e9", marker="circle"),
)
