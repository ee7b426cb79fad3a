"""GTPO: token-level reward shaping by policy entropy (arXiv 2508.04349, not the other GTPO of arXiv 2508.03772).

The tokens of a group go through the same memory in this order: entropies H, values V that are compared (H of correct tokens, 1/H of
wrong ones), weights W, shaped rewards R, centred rewards, advantages.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from gtpo_verl.algorithms._packed.layout import (
    Group,
    check_batch,
    check_entropy_shape,
    check_penalty,
    one_thread,
    read_layout,
    zeros,
)
from gtpo_verl.algorithms._packed.moments import ROUND_OFF, Moments, Normalizer, normalizers
from gtpo_verl.algorithms._packed.recorder import Recorder
from gtpo_verl.algorithms._packed.tokens import Scratch, Side, Tokens, check_entropies, clamp_entropies, write_tokens
from gtpo_verl.algorithms.batch import AdvantageOutput, Batch
from gtpo_verl.algorithms.config import GTPOConfig
from gtpo_verl.algorithms.penalties import named_penalty
from gtpo_verl.algorithms.registry import Algorithm, Style


def gtpo_advantages(
    entropy: torch.Tensor,
    correct: torch.Tensor,
    response_mask: torch.Tensor,
    group: torch.Tensor,
    config: GTPOConfig,
    length_penalty: torch.Tensor | None = None,
    return_shaped: bool = True,
) -> AdvantageOutput:
    """Shape the reward of every token by the entropy of the old policy and normalise it to an advantage.

    entropy: (B, T) nats of the old policy at the sampling temperature; padding may hold anything. Never receives a gradient.
    correct: (B,) bool, the verifier's verdict. response_mask: (B, T) bool or 0/1, right-padded, holes allowed. group: (B,) integers.
    length_penalty: (B,) <= 0, added to the shaped rewards of correct responses whatever `config.length_penalty` says
    (`length_penalty_for` computes the one it names), or None.
    return_shaped: also return the shaped rewards, another (B, T).
    Returns advantages and shaped rewards (B, T), float64 for float64 entropies and else float32, and the metrics of `Recorder`.
    Raises ValueError for shapes or types that disagree and for entropies that are not finite or negative, with row and position.
    Source: early eqs. 2, 3, 4, 13 to 17, 19; late eqs. 3, 5, 6 and appendix C. Normalisation: docs/equations.md.
    """
    check_batch(response_mask, group, correct=correct, length_penalty=length_penalty)
    check_entropy_shape(entropy, response_mask)
    with torch.no_grad(), one_thread(entropy.device):
        return _Run(entropy.detach(), correct, response_mask, group, config, length_penalty).advantages(return_shaped)


@dataclass(frozen=True)
class _Compared:
    """What the values of one polarity are compared with: the sum of these values, or of their logarithms, and their count.

    (L,) for `axis: position`, (rows,) for `response`, () for `matrix`.
    """

    total: torch.Tensor
    count: torch.Tensor

    def typical(self, mean: str) -> torch.Tensor:
        """The mean of the values, arithmetic or geometric; NaN where there are none."""
        mean_summand = self.total / self.count  # a quotient: for the arithmetic mean a single survivor weighs exactly 1
        return mean_summand if mean == "arithmetic" else mean_summand.exp_()


@dataclass(frozen=True)
class _Centered:
    """What is known of the shaped rewards of a group: squared deviations inside each response, and the moments of either polarity."""

    m2s: list[float]
    right: Moments
    wrong: Moments


class _Run:
    """One call: the batch, its layout, the working memory, and what the sweeps over the groups have found so far."""

    def __init__(
        self,
        entropy: torch.Tensor,
        correct: torch.Tensor,
        response_mask: torch.Tensor,
        group: torch.Tensor,
        config: GTPOConfig,
        length_penalty: torch.Tensor | None,
    ) -> None:
        self.config = config
        self.entropy = entropy
        self.response_mask = response_mask
        self.layout = read_layout(response_mask, group, correct)
        check_penalty(length_penalty, self.layout)
        self.recorder = Recorder(self.layout)
        self.out_dtype = torch.float64 if entropy.dtype == torch.float64 else torch.float32
        self.eps = torch.finfo(self.out_dtype).eps
        # Rewards of one polarity alone, or with a penalty that cancels their base, may differ by little and float32 would lose the
        # difference. Everywhere else the two polarities are far apart and float32 is as good as the data.
        fine = config.normalization == "within" or config.degenerate == "shape" or length_penalty is not None
        self.dtype = torch.float64 if fine else self.out_dtype
        self.penalty = None if length_penalty is None else length_penalty.tolist()
        self.base = torch.tensor(config.alpha1, dtype=self.dtype)
        self.scratch = Scratch(self.layout, response_mask, self.dtype)
        self.swept = False

    def advantages(self, return_shaped: bool) -> AdvantageOutput:
        shape, device = self.response_mask.shape, self.entropy.device
        typical = self._typical_of_batch() if self.config.scope == "batch" and self.config.axis != "response" else None
        out = zeros(shape, self.out_dtype, device)
        shaped = zeros(shape, self.out_dtype, device) if return_shaped else None
        out_rows, shaped_rows = out.unbind(0), () if shaped is None else shaped.unbind(0)
        found = []
        for group, tokens in self._sweep():
            self._shape(group, tokens, typical)
            if shaped is not None:
                write_tokens(tokens, group, shaped_rows)
            rewards = _center(tokens)
            self.recorder.rewards(rewards.right, rewards.wrong)
            if self.config.norm_scope == "group":
                self._normalize(group, tokens, rewards, self._normalizers(rewards.right, rewards.wrong))
            else:
                found.append((group, rewards))
            write_tokens(tokens, group, out_rows)
        if found:
            # The centred rewards wait in the output: float32 keeps them as exactly as it keeps an advantage.
            sides = self._normalizers(self.recorder.correct_rewards, self.recorder.wrong_rewards)
            for group, rewards in found:
                tokens = self.scratch.load(group, out_rows)
                self._normalize(group, tokens, rewards, sides)
                write_tokens(tokens, group, out_rows)
        return AdvantageOutput(out, shaped, self.recorder.metrics())

    def _normalizers(self, right: Moments, wrong: Moments) -> tuple[Normalizer, Normalizer]:
        return normalizers(right, wrong, self.config.normalization, self.config.negatives, self.eps)

    def _takes_part(self, group: Group) -> bool:
        return self.config.degenerate == "shape" or not group.one_polarity

    def _sweep(self) -> Iterator[tuple[Group, Tokens]]:
        """Load the groups that take part one after the other, H clamped. The first sweep also checks the entropies of all groups."""
        first, self.swept = not self.swept, True
        entropy_rows = self.entropy.unbind(0)
        for group in self.layout.groups:
            if not first and not self._takes_part(group):
                continue
            tokens = self.scratch.load(group, entropy_rows)
            if first:
                self.recorder.entropies(group, check_entropies(tokens, self.entropy, self.response_mask))
            if self._takes_part(group):
                clamp_entropies(tokens.values, self.config.entropy_clip, self.config.entropy_floor)
                yield group, tokens

    def _typical_of_batch(self) -> list[torch.Tensor]:
        """`scope: batch`: the typical value of each polarity over all groups that take part."""
        shape = (self.response_mask.shape[1],) if self.config.axis == "position" else ()
        sums = torch.zeros(2, 2, *shape, dtype=torch.float64, device=self.entropy.device)
        for group, tokens in self._sweep():
            if self.config.mean == "geometric":
                tokens.values.log_()
            else:
                tokens.wrong.values.reciprocal_()
            for (total, count), part in zip(sums, self._compare(group, tokens), strict=True):
                there = slice(0, group.width) if shape else ...
                total[there].add_(part.total)
                count[there].add_(part.count)
        return [_Compared(total, count).typical(self.config.mean) for total, count in sums.to(self.dtype)]

    def _compare(self, group: Group, summands: Tokens) -> list[_Compared]:
        """What each polarity of a group is compared with along `axis`. summands: V, or log H for the geometric mean."""
        right, wrong = (self._along_axis(side, group.width) for side in summands.sides)
        if self.config.mean == "geometric":
            wrong.total.neg_()  # log(1/H) = -log H
        return [right, wrong]

    def _along_axis(self, side: Side, width: int) -> _Compared:
        if self.config.axis == "position":
            return _Compared(side.column_sums(width), side.column_counts(width))
        if self.config.axis == "response":
            return _Compared(side.row_sums(), side.values.new_tensor(side.lengths))
        return _Compared(side.values.sum(), side.values.new_tensor(float(len(side.values))))

    def _weigh(self, group: Group, tokens: Tokens, typical: list[torch.Tensor] | None) -> None:
        """H -> W in place: each value over the typical one of its polarity: that of the batch, or else that of this group."""
        config = self.config
        logs = tokens.like(tokens.values.log()) if config.mean == "geometric" and typical is None else None
        tokens.wrong.values.reciprocal_()
        if typical is None:
            compared = self._compare(group, tokens if logs is None else logs)
            typical = [part.typical(config.mean) for part in compared]
        for side, values in zip(tokens.sides, typical, strict=True):
            if not side.rows:
                continue
            if config.axis == "position":
                side.divide_columns(values)
            elif config.axis == "response":
                side.divide_rows(values)
            else:
                side.values.div_(values)

    def _shape(self, group: Group, tokens: Tokens, typical: list[torch.Tensor] | None) -> None:
        """H -> R in place: the shaped rewards of a group."""
        config = self.config
        self._weigh(group, tokens, typical)
        right, wrong = tokens.right.values, tokens.wrong.values
        torch.add(self.base, right, alpha=config.alpha2, out=right)  # early (2), late (3)
        if config.clip_kappa is not None:  # early (13)
            right.clamp_(1.0, config.alpha1 * (1 + 1 / config.clip_kappa))
        if self.penalty is not None and group.n:  # early (14), late appendix D
            torch._foreach_add_(tokens.right.rows, [self.penalty[row] for row in group.rows[: group.n]])
        if config.negatives == "zero":  # early (2)
            wrong.zero_()
        elif config.negatives == "inverse":  # early (15)
            wrong.neg_()
        else:  # late (5)
            torch.add(-self.base, wrong, alpha=-config.alpha2, out=wrong)

    def _normalize(
        self, group: Group, tokens: Tokens, rewards: _Centered, sides: tuple[Normalizer, Normalizer]
    ) -> None:
        """Centred R -> advantages, in place."""
        self.recorder.spreads(group, rewards.m2s, sides)
        plus, minus = sides
        right, wrong = tokens.right.values, tokens.wrong.values
        for values, moments, side in ((right, rewards.right, plus), (wrong, rewards.wrong, minus)):
            constant = torch.tensor((moments.mean - side.shift) * side.scale, dtype=values.dtype)
            torch.add(constant, values, alpha=side.scale, out=values)
        if rewards.right.low < plus.shift:
            self.recorder.correct_flips += (right < 0).sum().item()
        if rewards.wrong.high > minus.shift:
            self.recorder.wrong_flips += (wrong > 0).sum().item()
        if self.config.preserve_sign:
            right.clamp_(min=0)
            wrong.clamp_(max=0)


def _center(tokens: Tokens) -> _Centered:
    """R -> R minus the mean of its polarity, in place."""
    (right, right_m2s), (wrong, wrong_m2s) = (_center_side(side) for side in tokens.sides)
    return _Centered(right_m2s + wrong_m2s, right, wrong)


def _center_side(side: Side) -> tuple[Moments, list[float]]:
    """One polarity: its moments, from centred values so that nothing cancels, and the squared deviations inside each response.

    The latter, which only a metric needs, are differences; what may be their round-off alone is 0.
    """
    if not side.rows:
        return Moments.constant(0.0, 0.0), []
    sums = side.row_sums().tolist()
    center = math.fsum(sums) / len(side.values)
    side.values.sub_(center)
    # Not norms or dot products: their error in float32 grows with the number of tokens, that of a sum does not.
    parts = [part.sum() for part in side.values.square().split(side.lengths)]
    low, high, *squares = torch.stack([*side.values.aminmax(), *parts]).tolist()
    m2s = []
    for square, length, total in zip(squares, side.lengths, sums, strict=True):
        distance = abs(total / length - center)
        off = ROUND_OFF * torch.finfo(side.values.dtype).eps * max(abs(center), distance)  # of a mean
        m2 = square - length * distance**2
        m2s.append(m2 if m2 > length * off * (2 * distance + off) else 0.0)
    return Moments(len(side.values), center, math.fsum(squares), center + low, center + high), m2s


def _compute(batch: Batch, config: GTPOConfig) -> AdvantageOutput:
    assert batch.entropy is not None
    penalty = named_penalty(batch, config)
    return gtpo_advantages(batch.entropy, batch.correct, batch.response_mask, batch.group, config, penalty)


GTPO = Algorithm(
    name="gtpo",
    label="GTPO",
    level="token",
    needs=frozenset({"entropy"}),
    config=GTPOConfig,
    compute=_compute,
    loss="gtpo",
    aggregation="token-mean",
    advantage_ns=25.0,
    style=Style(light="#0072b2", dark="#56b4e9", marker="o"),
)
