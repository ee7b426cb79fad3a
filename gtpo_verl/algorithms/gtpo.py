"""GTPO: token-level reward shaping by policy entropy (arXiv 2508.04349, not the other GTPO of arXiv 2508.03772).

Shapes in this file: G responses of one group, n of them correct and first, L columns up to the end of the longest; V values compared
(entropies of correct tokens, inverse entropies of wrong ones), W weights, R shaped rewards, M mask as numbers.
"""
# ruff: noqa: N803, N806

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from gtpo_verl.algorithms.config import GTPOConfig
from gtpo_verl.algorithms.layout import (
    Group,
    Scratch,
    check_batch,
    check_entropies,
    check_entropy_shape,
    check_penalty,
    one_thread,
    read_layout,
    write_rows,
    zeros,
)
from gtpo_verl.algorithms.output import AdvantageOutput, Recorder
from gtpo_verl.algorithms.statistics import Moments, Normalizer, normalizers


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
    """What the values of one polarity are compared with: the sum of these values (or of their logarithms) and their count."""

    total: torch.Tensor
    count: torch.Tensor

    def weigh(self, V: torch.Tensor, mean: str) -> None:
        """V -> W in place: each value over the mean of the values it is compared with; 0 stays 0.

        A comparison of positions may be longer than V: that of the batch reaches to its longest response.
        """
        total, count = (x[:, : V.shape[1]] for x in (self.total, self.count))
        nothing = count == 0
        if mean == "arithmetic":
            V.div_((total / count).masked_fill_(nothing, 1.0))  # a quotient: a single survivor weighs exactly 1
        else:
            V.mul_((-total / count).exp_().masked_fill_(nothing, 1.0))


@dataclass(frozen=True)
class _Rows:
    """Shaped rewards of a group: mean (G, 1) and squared deviations of each row, and the moments of either polarity."""

    means: torch.Tensor
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
        self.penalty = None if length_penalty is None else length_penalty.detach().to(self.dtype)
        self.scratch = Scratch(self.layout, entropy, self.dtype)
        self.swept = False

    def advantages(self, return_shaped: bool) -> AdvantageOutput:
        shape, device = self.response_mask.shape, self.entropy.device
        compared = self._compare_batch() if self.config.scope == "batch" and self.config.axis != "response" else None
        out = zeros(shape, self.out_dtype, device)
        shaped = zeros(shape, self.out_dtype, device) if return_shaped else None
        out_rows, shaped_rows = out.unbind(0), () if shaped is None else shaped.unbind(0)
        found = []
        for group, H, M in self._sweep():
            R = self._shape(group, H, M, compared)
            if shaped is not None:
                write_rows(R, shaped_rows, self.layout, group)
            rows = self._center(group, R, M)
            if self.config.norm_scope == "group":
                self._normalize(group, R, M, rows, self._sides(rows.right, rows.wrong))
            else:
                found.append((group, rows))
            write_rows(R, out_rows, self.layout, group)
        if found:
            # The centred rewards wait in the output: float32 keeps them as exactly as it keeps an advantage.
            sides = self._sides(self.recorder.correct_rewards, self.recorder.wrong_rewards)
            mask_rows = self.response_mask.unbind(0)
            for group, rows in found:
                R, M = self.scratch.load(group, out_rows, mask_rows)
                self._normalize(group, R, M, rows, sides)
                write_rows(R, out_rows, self.layout, group)
        return AdvantageOutput(out, shaped, self.recorder.metrics())

    def _sides(self, right: Moments, wrong: Moments) -> tuple[Normalizer, Normalizer]:
        return normalizers(right, wrong, self.config.normalization, self.config.negatives, self.eps)

    def _takes_part(self, group: Group) -> bool:
        return self.config.degenerate == "shape" or not group.one_polarity

    def _sweep(self) -> Iterator[tuple[Group, torch.Tensor, torch.Tensor]]:
        """Load the groups that take part one after the other: (group, H, M). The first sweep also checks the entropies of all."""
        first, self.swept = not self.swept, True
        entropy_rows, mask_rows = self.entropy.unbind(0), self.response_mask.unbind(0)
        for group in self.layout.groups:
            if not first and not self._takes_part(group):
                continue
            H, M = self.scratch.load(group, entropy_rows, mask_rows)
            if first:
                self.recorder.entropies(group, check_entropies(H, self.entropy, self.response_mask))
            if self._takes_part(group):
                yield group, H, M

    def _values(
        self, group: Group, H: torch.Tensor, M: torch.Tensor, compared: tuple[_Compared, _Compared] | None
    ) -> tuple[_Compared, _Compared]:
        """H -> V in place; returns what each polarity is compared with: `compared`, or else the rest of this group along `axis`."""
        if self.config.entropy_clip is not None:
            H.clamp_(*self.config.entropy_clip)
        H.clamp_(min=self.config.entropy_floor)
        geometric = self.config.mean == "geometric"
        log = H.log().mul_(M) if geometric and compared is None else None
        H[group.n :].reciprocal_()
        H.mul_(M)
        if compared is not None:
            return compared
        summed = H if log is None else log
        dims = {"position": [0], "response": [1], "matrix": [0, 1]}[self.config.axis]
        right, wrong = (
            _Compared(summed[part].sum(dims, keepdim=True), M[part].sum(dims, keepdim=True))
            for part in (slice(0, group.n), slice(group.n, None))
        )
        return right, _Compared(-wrong.total, wrong.count) if geometric else wrong  # log(1/H) = -log H

    def _compare_batch(self) -> tuple[_Compared, _Compared]:
        """`scope: batch`: the sums and counts of `_values` over all groups that take part."""
        width = self.response_mask.shape[1] if self.config.axis == "position" else 1
        sums = torch.zeros(2, 2, 1, width, dtype=torch.float64, device=self.entropy.device)
        for group, H, M in self._sweep():
            for side, part in zip(sums, self._values(group, H, M, None), strict=True):
                columns = part.total.shape[1]
                side[0, :, :columns] += part.total
                side[1, :, :columns] += part.count
        sums = sums.to(self.dtype)
        return _Compared(sums[0, 0], sums[0, 1]), _Compared(sums[1, 0], sums[1, 1])

    def _shape(
        self, group: Group, H: torch.Tensor, M: torch.Tensor, compared: tuple[_Compared, _Compared] | None
    ) -> torch.Tensor:
        """H -> R in place: the shaped rewards (G, L) of a group."""
        config, n = self.config, group.n
        right, wrong = H[:n], H[n:]
        for V, part in zip((right, wrong), self._values(group, H, M, compared), strict=True):
            part.weigh(V, config.mean)
        right.mul_(config.alpha2).add_(M[:n], alpha=config.alpha1)  # early (2), late (3)
        if config.clip_kappa is not None:  # early (13)
            right.clamp_(1.0, config.alpha1 * (1 + 1 / config.clip_kappa)).mul_(M[:n])
        if self.penalty is not None:  # early (14), late appendix D
            right.addcmul_(M[:n], self.penalty[group.rows[:n]].unsqueeze(1))
        if config.negatives == "zero":  # early (2)
            wrong.zero_()
        elif config.negatives == "inverse":  # early (15)
            wrong.neg_()
        else:  # late (5)
            wrong.mul_(-config.alpha2).add_(M[n:], alpha=-config.alpha1)
        return H

    def _center(self, group: Group, R: torch.Tensor, M: torch.Tensor) -> _Rows:
        """R -> R minus the mean of its row, in place; returns what is then known of the rows.

        Centred first and squared then, row by row: nothing cancels, and the spread inside a response is a by-product.
        """
        lengths = torch.tensor([self.layout.lengths[row] for row in group.rows], dtype=self.dtype, device=R.device)
        means = R.sum(dim=1) / lengths
        R.addcmul_(M, means.unsqueeze(1), value=-1)
        m2s = torch.linalg.vector_norm(R, dim=1).square_()
        lows, highs = means + R.amin(dim=1), means + R.amax(dim=1)  # padding is 0 here, the mean: never an extreme
        rows = torch.stack([lengths, means, m2s, lows, highs]).tolist()
        right, wrong = (Moments.of_rows(*(r[part] for r in rows)) for part in (slice(0, group.n), slice(group.n, None)))
        self.recorder.rewards(right, wrong)
        return _Rows(means.unsqueeze(1), rows[2], right, wrong)

    def _normalize(
        self, group: Group, R: torch.Tensor, M: torch.Tensor, rows: _Rows, sides: tuple[Normalizer, Normalizer]
    ) -> None:
        """Centred R -> advantages, in place."""
        self.recorder.spreads(group, rows.m2s, sides)
        n, (plus, minus) = group.n, sides
        rows.means[:n] -= plus.shift
        rows.means[n:] -= minus.shift
        R.addcmul_(M, rows.means)
        right, wrong = R[:n].mul_(plus.scale), R[n:].mul_(minus.scale)
        if rows.right.low < plus.shift:
            self.recorder.correct_flips += (right < 0).sum().item()
        if rows.wrong.high > minus.shift:
            self.recorder.wrong_flips += (wrong > 0).sum().item()
        if self.config.preserve_sign:
            right.clamp_(min=0)
            wrong.clamp_(max=0)
