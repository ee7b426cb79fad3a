"""Metrics of credit assignment: those that every method reports, and those of advantages of any estimator."""

import math
from collections.abc import Sequence

import torch

from gtpo_verl.algorithms.checks import check_batch, check_entropies, check_tokens
from gtpo_verl.algorithms.groups import Group, groups_of
from gtpo_verl.algorithms.normalization import Moments

TAIL = 0.9  # where the tail is looked at, as a share of the longest response
POLARITIES = ("correct", "wrong")


class CreditMetrics:
    """The metrics that all methods share, collected group by group; `found` has them by name.

    Values are weighted by tokens at token level and by responses at sequence level. Degenerate groups that are left out
    count in `groups`, `responses`, `entropy_*`, `floor_share` and `tail_alive_*` alone. Of every pair the first is of
    correct responses, the second of wrong ones.
    """

    def __init__(self) -> None:
        self._ends: list[tuple[list[int], list[int]]] = []  # of each group
        self._entropies = [0.0, 0.0]
        self._tokens = [0, 0]
        self._at_floor: int | None = None
        self._rewards = [Moments(), Moments()]
        self._flips = [0, 0]
        self._judged = [0, 0]  # of what the flips are counted

    def add_group(self, ends: torch.Tensor, correct: torch.Tensor) -> None:
        """The responses of a group: ends (n,), one past the last valid column, and verdicts (n,) bool."""
        self._ends.append((ends[correct].tolist(), ends[~correct].tolist()))

    def add_entropies(self, group: Group, H: torch.Tensor, mask: torch.Tensor, floor: float | None = None) -> None:
        """Entropies (G, T) of a group, 0 outside the mask, before they are floored; floor: in nats, None for none."""
        for polarity, side in enumerate(group.sides):
            self._entropies[polarity] += H[side].sum().item()
            self._tokens[polarity] += int(mask[side].count_nonzero())
        if floor is not None:
            self._at_floor = (self._at_floor or 0) + int((torch.le(H, floor) & mask).count_nonzero())

    def add_rewards(self, rewards: Sequence[Moments]) -> None:
        """Moments of the shaped rewards of a group that takes part in the statistics."""
        self._rewards = [both.join(more) for both, more in zip(self._rewards, rewards, strict=True)]

    def add_sign_flips(self, group: Group, A: torch.Tensor, mask: torch.Tensor) -> None:
        """Advantages (G, T), or (G, 1), before `preserve_sign`: which contradict the verdict."""
        plus, minus = group.sides
        for polarity, (side, contradicts) in enumerate(((plus, A[plus] < 0), (minus, A[minus] > 0))):
            self._flips[polarity] += int((contradicts & mask[side]).count_nonzero())
            self._judged[polarity] += int(mask[side].count_nonzero())

    def found(self) -> dict[str, float]:
        """The metrics by name; a mean over nothing is left out."""
        # Responses whose last valid column lies beyond TAIL of the longest end: few survivors mean noisy weights there.
        tail = math.floor(TAIL * max((end for ends in self._ends for side in ends for end in side), default=0))
        found = {
            "groups": float(len(self._ends)),
            "responses": float(sum(len(plus) + len(minus) for plus, minus in self._ends)),
        }
        if self._ends:
            found["degenerate_share"] = sum(not (plus and minus) for plus, minus in self._ends) / len(self._ends)
        for polarity, name in enumerate(POLARITIES):
            rewards, tokens = self._rewards[polarity], self._tokens[polarity]
            found[f"tail_alive_{name}"] = float(sum(end > tail for ends in self._ends for end in ends[polarity]))
            found[f"sign_flip_{name}"] = self._flips[polarity] / max(self._judged[polarity], 1)
            if rewards.count:
                found[f"shaped_{name}_mean"] = rewards.mean
                found[f"shaped_{name}_std"] = math.sqrt(rewards.m2 / max(rewards.count - 1, 1))
            if tokens:
                found[f"entropy_{name}"] = self._entropies[polarity] / tokens
        if self._at_floor is not None and any(self._tokens):
            found["floor_share"] = self._at_floor / sum(self._tokens)
        return found


@torch.no_grad()
def credit_metrics(
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    group: torch.Tensor,
    correct: torch.Tensor,
    entropy: torch.Tensor,
) -> dict[str, float]:
    """The metrics of `CreditMetrics` that need no estimator, and the spread of the advantages inside responses.

    advantages, entropy (nats): (B, T). response_mask: (B, T) bool or 0/1. group: (B,) integers. correct: (B,) bool.
    Returns, next to counts, entropies and the share of degenerate groups: `sign_flip_correct` and `sign_flip_wrong`,
    shares of the tokens of either polarity whose advantage contradicts the verdict; `advantage_spread`, the standard
    deviation of the advantages inside a response, averaged over responses: 0 where credit is per response.
    Raises ValueError for shapes that disagree and entropies that are not finite or negative.
    """
    check_batch(response_mask, group, correct=correct)
    check_tokens(entropy, response_mask)
    check_tokens(advantages, response_mask, "advantages")
    metrics, responses = CreditMetrics(), []
    for members in groups_of(response_mask, group, correct):
        mask = members.mask
        H = torch.where(mask, members.take(entropy).double(), 0.0)
        check_entropies(H, members.rows, entropy.dtype)
        metrics.add_group(members.ends, correct[members.rows])
        metrics.add_entropies(members, H, mask)
        A = members.take(advantages).double()
        metrics.add_sign_flips(members, A, mask)
        responses += [row[valid] for row, valid in zip(A, mask, strict=True)]
    spreads = [(A - A[0]).std(correction=0).item() for A in responses if len(A)]  # exactly 0 where all are equal
    return metrics.found() | ({"advantage_spread": sum(spreads) / len(spreads)} if spreads else {})
