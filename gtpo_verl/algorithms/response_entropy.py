"""DAPO's advantage reshaped response by response by mean entropy: `eda` (EDGE-GRPO) and `empg`.

Both give a correct response of low entropy more credit, the opposite of GRPO-S, and a wrong one more blame.
"""

from dataclasses import dataclass, replace

import torch

from gtpo_verl.algorithms.base import dapo_advantages, entropies, output, response_means, scopes
from gtpo_verl.algorithms.batch import AdvantageOutput, Batch
from gtpo_verl.algorithms.config import GroupOrBatch, NotNegative, Settings, interval
from gtpo_verl.algorithms.registry import Algorithm

FLOOR = 1e-6  # nats, of a mean entropy that is divided by


@dataclass(frozen=True, kw_only=True)
class EDAConfig(Settings):
    """scope: the responses whose mean entropies are compared, those of the `group` or of the `batch`.

    clamp: (lo, hi) of P̂, or None as published; [0.1, 10] is a safe choice.
    """

    scope: GroupOrBatch = "group"
    clamp: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.clamp is None:
            return
        bounds = interval("clamp", self.clamp)
        if bounds[0] == 0:
            raise ValueError(f"clamp needs lo above 0, got {self.clamp!r}")
        object.__setattr__(self, "clamp", bounds)


def _eda(batch: Batch, config: EDAConfig) -> AdvantageOutput:
    """A = A0 / P̂, P̂ = Ĥ over the mean Ĥ of the group, Ĥ the mean entropy of a response: arXiv 2507.21848, eqs. 3, 6, 7.

    The paper's other half, guided error correction, needs reference solutions and is not here. The published code
    (ZhangXJ199/EDGE-GRPO) takes the mean over a micro-batch, counts padding in Ĥ and lets the gradient into it.
    """
    A0, mask = dapo_advantages(batch), batch.response_mask != 0
    H = response_means(entropies(batch), mask).clamp(min=FLOOR)
    whole = mask.any(1, keepdim=True)  # an empty response is compared with nothing
    mean = torch.ones_like(H)
    for rows in scopes(batch, config.scope):
        mean[rows] = torch.where(whole[rows], H[rows], 0.0).sum() / whole[rows].sum().clamp(min=1)
    P = torch.where(whole, H / mean, 1.0)
    if config.clamp is not None:
        P = P.clamp(*config.clamp)
    return output(A0 / P, A0, batch)


EDA = Algorithm(
    name="eda",
    label="EDGE-GRPO",
    level="sequence",
    needs=frozenset({"entropy", "rewards"}),
    config=EDAConfig,
    compute=_eda,
    guide="dapo",
    advantage_ns=81.0,
)


@dataclass(frozen=True, kw_only=True)
class EMPGConfig(Settings):
    """k: k >= 0, how fast credit falls with entropy; 0 leaves DAPO less its mean over the batch."""

    k: NotNegative = 1.0


def _empg(batch: Batch, config: EMPGConfig) -> AdvantageOutput:
    """A = A0 · e^(-k h) / mean e^(-k h), less the mean of A over responses; h is Ĥ scaled to [0, 1] over the batch.

    arXiv 2509.09265. A response to one prompt is one step of the paper's agent, so its second term, ζ times the
    certainty of the next step, is not there. Where all Ĥ are equal, h is 0.
    """
    A0, mask = dapo_advantages(batch), batch.response_mask != 0
    if not mask.any():
        return output(A0, A0, batch)
    whole = mask.any(1, keepdim=True)
    H = response_means(entropies(batch), mask)
    low, high = H[whole].aminmax()
    differ = high - low > 16 * torch.finfo(H.dtype).eps * high  # else by the rounding of the means
    h = (H - low) / (high - low) if differ else torch.zeros_like(H)
    g = (-config.k * h).exp()
    A = response_means(A0, mask) * g / g[whole].mean()
    return output(torch.where(mask, A - A[whole].mean(), 0.0), A0, batch)


EMPG = replace(EDA, name="empg", label="EMPG", config=EMPGConfig, compute=_empg, guide=None, advantage_ns=90.0)
