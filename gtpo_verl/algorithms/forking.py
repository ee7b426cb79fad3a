"""DAPO on a fifth of the tokens: those of the highest entropy (forking tokens, arXiv 2506.01939), or random ones.

A = A0 on the kept tokens and 0 on the others, whose clipped loss is then 0. "DAPO with forking tokens" is a row of the
results table of arXiv 2508.04349. `random20` is our control: it keeps as many tokens, chosen without information.

The published code (Shenzhi-Wang/Beyond-the-80-20-Rule-RLVR) ranks within a micro-batch, by the entropies of the current
policy: the old policy's are the same in the first update of a step. The later text divides the loss by the kept tokens
(`normalizer: kept`), its first version and TRL's implementation by all.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch

from gtpo_verl.algorithms.base import Scope, dapo_advantages, entropies, highest, output, quantile, scopes
from gtpo_verl.algorithms.batch import AdvantageOutput, Batch
from gtpo_verl.algorithms.config import Settings, ZeroToOne
from gtpo_verl.algorithms.registry import Algorithm


@dataclass(frozen=True, kw_only=True)
class ForkingConfig(Settings):
    """Settings of `fork20` and `random20`.

    ratio: ρ, the share of tokens on top, in (0, 1].
    scope: where they are ranked, in the `batch`, in each `group` or in each `response`.
    rule: `threshold` takes all tokens at or above the (1 - ρ) quantile, `topk` exactly ⌈ρN⌉, of equal ones the first.
    select: keep the `top`, or the `bottom`: the other tokens.
    polarity: whose tokens are chosen from, `both`, those of `correct` or of `wrong` responses; the others are kept
    whole.
    normalizer: `kept` multiplies A by the tokens over the kept tokens of the step, so that the token-mean of the loss
    is that over kept ones; `all` does not.
    """

    ratio: ZeroToOne = 0.2
    scope: Scope = "batch"
    rule: Literal["threshold", "topk"] = "threshold"
    select: Literal["top", "bottom"] = "top"
    polarity: Literal["both", "correct", "wrong"] = "both"
    normalizer: Literal["kept", "all"] = "kept"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.ratio == 0:
            raise ValueError("ratio must be above 0: no token would be kept")


def kept_tokens(score: torch.Tensor, batch: Batch, config: ForkingConfig) -> torch.Tensor:
    """(B, T) bool: the tokens that a ranking by score (B, T) keeps."""
    mask = batch.response_mask != 0
    judged = mask
    if config.polarity != "both":
        judged = mask & (batch.correct == (config.polarity == "correct"))[:, None]
    kept = torch.zeros_like(mask)
    for rows in scopes(batch, config.scope):
        among = judged[rows]
        if not among.any():
            continue
        if config.rule == "threshold":
            top = score[rows] >= quantile(score[rows][among], 1 - config.ratio)
        else:
            top = highest(score[rows], among, config.ratio)
        kept[rows] = among & (top if config.select == "top" else ~top)
    return kept | (mask & ~judged)


def _masked(score: Callable[[Batch], torch.Tensor]) -> Callable[[Batch, ForkingConfig], AdvantageOutput]:
    def compute(batch: Batch, config: ForkingConfig) -> AdvantageOutput:
        A0 = dapo_advantages(batch)
        kept = kept_tokens(score(batch), batch, config)
        A = A0 * kept
        if config.normalizer == "kept":
            A = A * (int((batch.response_mask != 0).sum()) / max(int(kept.sum()), 1))
        return output(A, A0, batch, kept)

    return compute


def _random(batch: Batch) -> torch.Tensor:
    """(B, T) uniform numbers, drawn for the valid tokens alone, so that padding changes nothing."""
    mask = (batch.response_mask != 0).cpu()
    generator = torch.Generator().manual_seed(batch.seed)
    drawn = torch.rand(int(mask.sum()), generator=generator)
    return torch.zeros(mask.shape).masked_scatter_(mask, drawn).to(batch.response_mask.device)


FORK20 = Algorithm(
    name="fork20",
    label="DAPO, forking tokens",
    level="token",
    needs=frozenset({"entropy", "rewards"}),
    config=ForkingConfig,
    compute=_masked(entropies),
    guide="dapo",
    advantage_ns=126.0,
)

RANDOM20 = replace(
    FORK20,
    name="random20",
    label="DAPO, random tokens",
    needs=frozenset({"rewards"}),
    compute=_masked(_random),
    advantage_ns=117.0,
)
