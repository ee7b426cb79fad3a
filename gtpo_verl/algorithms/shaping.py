"""What GTPO and GRPO-S share: the loop over groups, statistics of the whole batch, rows of a guide, and metrics.

The formulas of a method are functions of the responses of one polarity in one group: (n, T), a number for each token,
or (n, 1), one for each response. A mask of that shape says which are compared. All is computed in float64, whatever the
entropies are: a group is small, and rewards of one polarity may differ by little.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from gtpo_verl.algorithms.batch import AdvantageOutput
from gtpo_verl.algorithms.checks import check_batch, check_entropies, check_finite, check_tokens
from gtpo_verl.algorithms.config import ShapingConfig
from gtpo_verl.algorithms.groups import Group, groups_of
from gtpo_verl.algorithms.metrics import CreditMetrics
from gtpo_verl.algorithms.normalization import Moments, normalized_over

Totals = tuple[torch.Tensor, torch.Tensor]  # sums of the values that are compared, and how many were added


@dataclass(frozen=True)
class Formulas:
    """The formulas of a method, H -> V -> W -> R, for the n responses of one polarity; `config` is its configuration.

    means: (H, mask, config) to the entropy of each response (n, 1); None where every token is shaped by its own.
    values: (H, correct) to V, what is compared. totals: (V, mask, config) to the sums over what is compared.
    weights: (V, totals, config) to W, which is V over its mean.
    rewards_of_correct: (W, penalty, config) to R; penalty (n, 1) or None. rewards_of_wrong: (W, config) to R.
    """

    means: Callable[[torch.Tensor, torch.Tensor, Any], torch.Tensor] | None
    values: Callable[[torch.Tensor, bool], torch.Tensor]
    totals: Callable[[torch.Tensor, torch.Tensor, Any], Totals]
    weights: Callable[[torch.Tensor, Totals, Any], torch.Tensor]
    rewards_of_correct: Callable[[torch.Tensor, torch.Tensor | None, Any], torch.Tensor]
    rewards_of_wrong: Callable[[torch.Tensor, Any], torch.Tensor]


@dataclass(frozen=True)
class ShapedBatch:
    """A batch whose rewards are shaped by entropy; the tensors are the arguments of `gtpo_advantages`."""

    formulas: Formulas
    config: ShapingConfig
    entropy: torch.Tensor
    correct: torch.Tensor
    response_mask: torch.Tensor
    group: torch.Tensor
    length_penalty: torch.Tensor | None
    guide: torch.Tensor | None

    @torch.no_grad()
    def advantages(self, return_shaped: bool) -> AdvantageOutput:
        """Advantages, shaped rewards if asked for, and the metrics of `CreditMetrics`."""
        mask, penalty = self.response_mask, self.length_penalty
        check_batch(mask, self.group, correct=self.correct, length_penalty=penalty, guide=self.guide)
        check_tokens(self.entropy, mask)
        per_token = self.formulas.means is None
        dtype = torch.float64 if self.entropy.dtype == torch.float64 else torch.float32
        advantages = torch.zeros(mask.shape, dtype=dtype, device=mask.device)
        shaped = advantages.new_zeros(len(mask), mask.shape[1] if per_token else 1) if return_shaped else None
        metrics = self._fill(advantages, shaped)
        if shaped is not None and not per_token:
            shaped = shaped.squeeze(1)
        return AdvantageOutput(advantages, shaped, metrics.found())

    def _fill(self, advantages: torch.Tensor, shaped: torch.Tensor | None) -> CreditMetrics:
        """Write the advantages (B, T) and the shaped rewards (B, T), or (B, 1), of every group."""
        metrics, eps = CreditMetrics(), torch.finfo(advantages.dtype).eps
        totals = self._totals_of_batch() if self.config.compares_batch else None
        rewards_of_batch = self._rewards_of_batch(totals) if self.config.norm_scope == "batch" else None
        for group in self._groups():
            H, own = self._entropies(group)
            if self.length_penalty is not None:
                check_finite("length_penalty", self.length_penalty, group.rows[: group.n])
            alive = own.any(1)
            metrics.add_group(group.ends[alive], self.correct[group.rows[alive]])
            metrics.add_entropies(group, H, own, self.config.entropy_floor)
            if not self._takes_part(group):
                continue
            H, own, valid = self._compared(group, H, own)
            R = self._rewards(group, H, own, totals)
            rewards_of_own = _moments(group, R, own)
            rewards_of_group = rewards_of_own if self.guide is None else _moments(group, R, valid)
            metrics.add_rewards(rewards_of_own)
            A = self._normalized(group, R, rewards_of_group if rewards_of_batch is None else rewards_of_batch, eps)
            metrics.add_sign_flips(group, A, own)
            if self.config.preserve_sign:
                plus, minus = group.sides
                A = torch.cat([A[plus].clamp(min=0), A[minus].clamp(max=0)])
            group.put(torch.where(group.mask, A, 0.0), advantages)
            if shaped is not None:
                group.put(torch.where(valid, R, 0.0), shaped)
        return metrics

    def _normalized(self, group: Group, R: torch.Tensor, over: tuple[Moments, Moments], eps: float) -> torch.Tensor:
        """R -> A; over: moments of the correct and of the wrong rewards of the group or of the batch."""
        if self.config.normalization == "none":
            return R
        sets = normalized_over(*over, self.config.normalization, self.config.negatives)
        return torch.cat([each.advantages(R[side], eps) for each, side in zip(sets, group.sides, strict=True)])

    def _groups(self) -> Iterator[Group]:
        """The groups that have a response of the policy's own."""
        for group in groups_of(self.response_mask, self.group, self.correct):
            if self.guide is None or not self.guide[group.rows].all():
                yield group

    def _takes_part(self, group: Group) -> bool:
        """Whether the rewards of a group are shaped; where they are not, its advantages are 0."""
        return self.config.degenerate == "shape" or 0 < group.n < len(group.rows)

    def _entropies(self, group: Group) -> tuple[torch.Tensor, torch.Tensor]:
        """H (G, T) as it was given, 0 outside of the mask (G, T) of the policy's own tokens, which comes with it."""
        own = group.mask if self.guide is None else group.mask & ~self.guide[group.rows, None]
        H = torch.where(own, group.take(self.entropy).double(), 0.0)
        check_entropies(H, group.rows, self.entropy.dtype)
        return H, own

    def _compared(
        self, group: Group, H: torch.Tensor, own: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """H of tokens (G, T) or responses (G, 1), clamped and floored; masks of the policy's own and of all of them."""
        if self.config.entropy_clip is not None:
            H = H.clamp(*self.config.entropy_clip)
        H = H.clamp(min=self.config.entropy_floor)
        if self.formulas.means is None:
            return H, own, group.mask
        return self.formulas.means(H, own, self.config), own.any(1, keepdim=True), group.mask.any(1, keepdim=True)

    def _rewards(
        self, group: Group, H: torch.Tensor, own: torch.Tensor, totals: tuple[Totals, Totals] | None
    ) -> torch.Tensor:
        """R (G, T) or (G, 1); totals: of the whole batch, for correct and for wrong responses, None for the group's."""
        formulas, config = self.formulas, self.config
        penalty = None if self.length_penalty is None else self.length_penalty[group.rows[: group.n], None].double()
        R = []
        for polarity, side in enumerate(group.sides):
            V = formulas.values(H[side], polarity == 0)
            if totals is None:
                sums, counts = formulas.totals(V, own[side], config)
            else:  # up to the longest response of the group
                sums, counts = (each[:, : V.shape[1]] for each in totals[polarity])
            # What is a guide's is compared with nothing: it has the average weight.
            W = torch.where(own[side], formulas.weights(V, (sums, counts), config), 1.0)
            if polarity == 0:
                R.append(formulas.rewards_of_correct(W, penalty, config))
            else:
                R.append(formulas.rewards_of_wrong(W, config))
        return torch.cat(R)

    def _taking_part(self) -> Iterator[tuple[Group, torch.Tensor, torch.Tensor, torch.Tensor]]:
        """The groups whose rewards are shaped, each with what `_compared` returns."""
        for group in self._groups():
            if self._takes_part(group):
                yield group, *self._compared(group, *self._entropies(group))

    def _totals_of_batch(self) -> tuple[Totals, Totals]:
        """`scope: batch`: sums over all groups, of correct and of wrong responses."""
        longest = self.response_mask.shape[1]
        sums, counts = torch.zeros(2, 2, 1, longest, dtype=torch.float64, device=self.entropy.device)
        width = 1
        for group, H, own, _ in self._taking_part():
            for polarity, side in enumerate(group.sides):
                V = self.formulas.values(H[side], polarity == 0)
                of_group, count = self.formulas.totals(V, own[side], self.config)
                width = max(width, of_group.shape[1])
                sums[polarity, :, : of_group.shape[1]] += of_group
                counts[polarity, :, : of_group.shape[1]] += count
        plus, minus = zip(sums[..., :width], counts[..., :width], strict=True)
        return plus, minus

    def _rewards_of_batch(self, totals: tuple[Totals, Totals] | None) -> tuple[Moments, Moments]:
        """`norm_scope: batch`: moments of all correct and wrong rewards, which are not kept but computed once more."""
        plus, minus = Moments(), Moments()
        for group, H, own, valid in self._taking_part():
            of_group = _moments(group, self._rewards(group, H, own, totals), valid)
            plus, minus = plus.join(of_group[0]), minus.join(of_group[1])
        return plus, minus


def _moments(group: Group, R: torch.Tensor, mask: torch.Tensor) -> tuple[Moments, Moments]:
    """Moments of the correct and of the wrong rewards inside a mask."""
    plus, minus = group.sides
    return Moments.of(R[plus], mask[plus]), Moments.of(R[minus], mask[minus])
