"""GTPO: token-level reward shaping by policy entropy (arXiv 2508.04349, not the other GTPO of arXiv 2508.03772).

The formulas work on one group at a time, the G responses to one prompt, in this order:

    H  entropies of the old policy, nats        -> V  what a token is compared by: H, or 1/H in wrong responses
    -> W  weights, V over its mean              -> R  shaped rewards          -> A  advantages, R normalised

`_plus` is the set P of the n correct responses, `_minus` the set N of the m wrong ones. Each is a `Side`, one number
for each valid token, (N,); arithmetic on it reuses its memory, so a name is not read again after the next one is made
from it. α1, α2 are `config.alpha1`, `config.alpha2`; d[t] is the number of correct responses with a token at position
t, h[t] of wrong ones. "early" is arXiv v1 to v4, "late" is v5 and v6.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from gtpo_verl.algorithms._packed.flat import fill_rows, split_rows
from gtpo_verl.algorithms._packed.layout import Group, check_batch, check_penalty, check_tokens, one_thread, zeros
from gtpo_verl.algorithms._packed.moments import Moments, center
from gtpo_verl.algorithms._packed.recorder import Recorder
from gtpo_verl.algorithms._packed.tokens import (
    Side,
    Tokens,
    Total,
    Workspace,
    check_entropies,
    clamp_entropies,
    write_tokens,
)
from gtpo_verl.algorithms.batch import AdvantageOutput, Batch
from gtpo_verl.algorithms.config import ShapingConfig, check_shares, number
from gtpo_verl.algorithms.normalization import Normalizer, normalizers
from gtpo_verl.algorithms.penalties import named_penalty
from gtpo_verl.algorithms.registry import Algorithm, Style

Means = tuple[torch.Tensor, torch.Tensor]  # of V_plus and of V_minus


@dataclass(frozen=True, kw_only=True)
class GTPOConfig(ShapingConfig):
    """Settings of GTPO; the defaults are the preset `gtpo_v6` (late text of arXiv 2508.04349).

    alpha1, alpha2: base reward and weight of the entropy term, early eq. 2, late eqs. 3 and 5.
    axis: the entropies one is compared with: same `position`, same `response`, or the `matrix` of both.
    clip_kappa: κ of the early eq. 13, which clips the correct rewards to [1, alpha1 (1 + 1/κ)], or None.
    """

    alpha1: float = 1.0
    alpha2: float = 0.1
    axis: str = "position"
    clip_kappa: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_shares("alpha1", self.alpha1, "alpha2", self.alpha2)
        if self.clip_kappa is None:
            return
        if number("clip_kappa", self.clip_kappa) <= 1:
            raise ValueError(f"clip_kappa must be above 1 (early eq. 13), got {self.clip_kappa}")
        # An upper bound of exactly 1 is legal; 0.9 * (1 + 1/9) must not fail by its last bit.
        if self.alpha1 * (1 + 1 / self.clip_kappa) < 1 - 1e-12:
            raise ValueError(
                f"clip_kappa needs alpha1 * (1 + 1/kappa) >= 1, else the bounds of early eq. 13 cross: "
                f"{self.alpha1} * (1 + 1/{self.clip_kappa}) = {self.alpha1 * (1 + 1 / self.clip_kappa):.4g}"
            )


# ---------------------------------------------------------------------------------------------------- the formulas


def mean_values(V: Side, config: GTPOConfig) -> torch.Tensor:
    """The mean of the values that a token is compared with; geometric: early (3), (Π_k V[k,t])^(1/d[t]).

    axis `position`: over the responses alive at t, (width,); `response`: over the tokens of a response, (rows,);
    `matrix`: over all of them, ().
    """
    geometric = config.mean == "geometric"
    return V.total(config.axis, logarithm=geometric).mean(logarithm=geometric)


def weights(V: Side, mean: torch.Tensor, config: GTPOConfig) -> Side:
    """W = V / mean of V, with V = H for correct and V = 1/H for wrong tokens (`shaped_rewards`): it averages 1 over
    the tokens that are compared.

    Arithmetic mean, correct: early (2), late (3): w⁺ = H[i,t] / Σ_k H[k,t] · d[t].
    Arithmetic mean, wrong: early (15), late (5): w⁻ = (1/H[j,t]) / Σ_k (1/H[k,t]) · h[t].
    Geometric mean: early (3), (19), late appendix C: w⁺ = H[i,t] / (Π_k H[k,t])^(1/d[t]), and so with 1/H and h[t].
    """
    return V.over(mean, config.axis)


def rewards_of_correct(W_plus: Side, config: GTPOConfig, penalty: Sequence[float] | None) -> Side:
    """r⁺ of correct responses: early (2), (13), (14), late (3); penalty: one number per response, or None."""
    alpha1 = W_plus.values.new_tensor(config.alpha1)
    R_plus = W_plus.affine(alpha1, config.alpha2)  # early (2), late (3): r⁺ = α1 + α2 w⁺
    if config.clip_kappa is not None:  # early (13): r⁺ ← clip(r⁺, 1, α1 + α1/κ)
        R_plus = R_plus.clip(1.0, config.alpha1 * (1 + 1 / config.clip_kappa))
    if penalty is not None:  # r⁺ ← r⁺ + R(len): early (14), or the group-relative penalty of late appendix D
        R_plus = R_plus.plus(penalty)
    return R_plus


def rewards_of_wrong(W_minus: Side, config: GTPOConfig) -> Side:
    """r⁻ of wrong responses: early (2), (15), late (5)."""
    zero, alpha1 = W_minus.values.new_zeros(()), W_minus.values.new_tensor(config.alpha1)
    if config.negatives == "zero":  # early (2): r⁻ = 0
        return W_minus.clip(0.0, 0.0)
    if config.negatives == "inverse":  # early (15): r⁻ = -w⁻
        return W_minus.affine(zero, -1.0)
    return W_minus.affine(-alpha1, -config.alpha2)  # late (5): r⁻ = -α1 - α2 w⁻


def flat_rewards(config: GTPOConfig) -> tuple[float, float]:
    """The rewards of a correct and of a wrong token without the entropy term: those of weight 1, the average one."""
    correct = config.alpha1 + config.alpha2
    if config.clip_kappa is not None:
        correct = min(max(correct, 1.0), config.alpha1 * (1 + 1 / config.clip_kappa))
    return correct, {"zero": 0.0, "inverse": -1.0, "based_inverse": -config.alpha1 - config.alpha2}[config.negatives]


def shaped_rewards(
    H: Tokens, config: GTPOConfig, means: Means | None = None, penalty: Sequence[float] | None = None
) -> tuple[Side, Side]:
    """H -> V -> W -> R of one group; means: of the whole batch (`scope: batch`), or None for those of the group."""
    V_plus, V_minus = H.correct, H.wrong.inverse()
    mean_plus, mean_minus = means or (mean_values(V_plus, config), mean_values(V_minus, config))
    W_plus, W_minus = weights(V_plus, mean_plus, config), weights(V_minus, mean_minus, config)
    return rewards_of_correct(W_plus, config, penalty), rewards_of_wrong(W_minus, config)


def advantages(R: Side, moments: Moments, by: Normalizer) -> Side:
    """A = (R - mean) / (std + 1e-6): early (4), (16), (17), late (6); `normalizers` has the sets.

    R comes centred, less its own mean `moments.mean`: float32 keeps small differences between rewards of about 1 that
    way.
    """
    # (R + moments.mean - by.mean) * by.scale
    return R.affine(R.values.new_tensor((moments.mean - by.mean) * by.scale), by.scale)


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
    guide: (B,) bool, rows of a guiding policy, or None. Their tokens have `flat_rewards`, which are in the sets of the
    normalisation; their entropies, which may be anything, are compared with none, and the metrics are of the others.
    Returns advantages and shaped rewards (B, T), float64 for float64 entropies and else float32, and the metrics of
    `Recorder`.
    Raises ValueError for shapes or types that disagree and for entropies that are not finite or negative, with row and
    position.
    Source: early eqs. 2, 3, 4, 13 to 17, 19; late eqs. 3, 5, 6 and appendix C. Normalisation: docs/equations.md.
    """
    check_batch(response_mask, group, correct=correct, length_penalty=length_penalty, guide=guide)
    check_tokens(entropy, response_mask)
    with torch.no_grad(), one_thread(entropy.device):
        run = _Run(entropy.detach(), correct, response_mask, group, config, length_penalty, guide)
        return run.advantages(return_shaped)


@dataclass(frozen=True)
class _Rewards:
    """The moments of the shaped rewards of a group."""

    plus: Moments
    minus: Moments


class _Run:
    """One call: the batch, its layout and the working memory."""

    def __init__(
        self,
        entropy: torch.Tensor,
        correct: torch.Tensor,
        response_mask: torch.Tensor,
        group: torch.Tensor,
        config: GTPOConfig,
        length_penalty: torch.Tensor | None,
        guide: torch.Tensor | None,
    ) -> None:
        self.config = config
        self.entropy = entropy
        self.response_mask = response_mask
        self.penalties = None if length_penalty is None else length_penalty.tolist()
        self.layout, self.flat = split_rows(
            response_mask, group, correct, guide, flat_rewards(config), self.penalties, per_token=True
        )
        check_penalty(length_penalty, [*self.layout.groups, *self.flat.groups.values()])
        self.recorder = Recorder(self.layout)
        self.out_dtype = torch.float64 if entropy.dtype == torch.float64 else torch.float32
        self.eps = torch.finfo(self.out_dtype).eps
        # Rewards of one polarity alone, or with a penalty that cancels their base, may differ by little and float32
        # would lose the difference. Everywhere else the two polarities are far apart and float32 is as good as the
        # data.
        fine = config.normalization == "within" or config.degenerate == "shape" or length_penalty is not None
        self.workspace = Workspace(self.layout, response_mask, torch.float64 if fine else self.out_dtype)
        self.swept = False
        self.of_guide: dict[int, float] = {}  # advantages of the guide's rows

    def advantages(self, return_shaped: bool) -> AdvantageOutput:
        config = self.config
        out = zeros(self.response_mask.shape, self.out_dtype, self.entropy.device)
        shaped = zeros(self.response_mask.shape, self.out_dtype, self.entropy.device) if return_shaped else None
        out_rows, shaped_rows = out.unbind(0), () if shaped is None else shaped.unbind(0)
        means = self._means_of_batch() if config.scope == "batch" and config.axis != "response" else None
        batch = Moments.constant(0.0, 0.0), Moments.constant(0.0, 0.0)
        waiting = []
        for group, H in self._entropies():
            R_plus, R_minus = shaped_rewards(H, config, means, self._penalty(group))
            if return_shaped:
                write_tokens(R_plus, R_minus, group, shaped_rows)
            rewards = _Rewards(center(R_plus), center(R_minus))
            self.recorder.rewards(rewards.plus, rewards.minus)
            over = self.flat.joined(group, rewards.plus, rewards.minus)
            if config.norm_scope == "group":
                A_plus, A_minus = self._normalize(R_plus, R_minus, rewards, group, over)
                write_tokens(A_plus, A_minus, group, out_rows)
            else:  # R waits in the output: centred, float32 keeps a reward as well as an advantage
                write_tokens(R_plus, R_minus, group, out_rows)
                batch = batch[0].join(over[0]), batch[1].join(over[1])
                waiting.append((group, rewards))
        for group, rewards in waiting:
            R = self.workspace.load(group, out_rows)
            A_plus, A_minus = self._normalize(R.correct, R.wrong, rewards, group, batch)
            write_tokens(A_plus, A_minus, group, out_rows)
        fill_rows(out, self.of_guide, self.response_mask)
        if shaped is not None:
            fill_rows(shaped, {row: self.flat.rewards[row] for row in self.of_guide}, self.response_mask)
        return AdvantageOutput(out, shaped, self.recorder.metrics())

    def _normalize(
        self, R_plus: Side, R_minus: Side, rewards: _Rewards, group: Group, over: tuple[Moments, Moments]
    ) -> tuple[Side, Side]:
        """Centred R -> A of one group; over: moments of the correct and of the wrong rewards of the group or of the
        batch (`norm_scope`). The advantages of its guide rows are kept in `of_guide`.
        """
        config = self.config
        by_plus, by_minus = normalizers(*over, config.normalization, config.negatives, self.eps)
        self.of_guide |= self.flat.advantages(group, (by_plus, by_minus), config.preserve_sign)
        A_plus = advantages(R_plus, rewards.plus, by_plus)
        A_minus = advantages(R_minus, rewards.minus, by_minus)
        if rewards.plus.low < by_plus.mean:
            self.recorder.correct_flips += (A_plus.values < 0).sum().item()
        if rewards.minus.high > by_minus.mean:
            self.recorder.wrong_flips += (A_minus.values > 0).sum().item()
        if config.preserve_sign:
            return A_plus.clip(0.0, None), A_minus.clip(None, 0.0)
        return A_plus, A_minus

    def _entropies(self) -> Iterator[tuple[Group, Tokens]]:
        """H of each group that takes part, clamped and floored. The first sweep also checks the entropies of all
        groups.
        """
        first, self.swept = not self.swept, True
        rows = self.entropy.unbind(0)
        for group in self.layout.groups:
            takes_part = self.config.degenerate == "shape" or self.flat.contrast(group)
            if not first and not takes_part:
                continue
            H = self.workspace.load(group, rows)
            sums = check_entropies(H, self.entropy, self.response_mask) if first else None
            at_floor = clamp_entropies(H, self.config.entropy_clip, self.config.entropy_floor)
            if sums is not None:
                self.recorder.entropies(group, sums, at_floor)
            if takes_part:
                yield group, H

    def _means_of_batch(self) -> Means:
        """`scope: batch`: the means of V_plus and V_minus over all groups that take part."""
        geometric = self.config.mean == "geometric"
        size = self.response_mask.shape[1] if self.config.axis == "position" else 1
        sums = torch.zeros(2, 2, size, dtype=torch.float64, device=self.entropy.device)
        dtype = torch.float64
        for group, H in self._entropies():
            dtype = H.values.dtype
            width = group.width if self.config.axis == "position" else 1
            for side, V in enumerate((H.correct, H.wrong.inverse())):
                total = V.total(self.config.axis, logarithm=geometric)
                sums[side, 0, :width].add_(total.sums)
                sums[side, 1, :width].add_(total.counts)
        plus, minus = (Total(side[0], side[1]).mean(geometric) for side in sums.to(dtype))
        return (plus, minus) if self.config.axis == "position" else (plus[0], minus[0])

    def _penalty(self, group: Group) -> list[float] | None:
        return None if self.penalties is None else [self.penalties[row] for row in group.rows[: group.n]]


def _compute(batch: Batch, config: GTPOConfig) -> AdvantageOutput:
    assert batch.entropy is not None
    penalty = named_penalty(batch, config)
    return gtpo_advantages(
        batch.entropy, batch.correct, batch.response_mask, batch.group, config, penalty, guide=batch.guide
    )


GTPO = Algorithm(
    name="gtpo",
    label="GTPO",
    level="token",
    needs=frozenset({"entropy"}),
    config=GTPOConfig,
    compute=_compute,
    loss="gtpo",
    aggregation="token-mean",
    guide="flat",
    advantage_ns=20.0,
    style=Style(light="#0072b2", dark="#56b4e9", marker="o"),
)
