"""From shaped rewards to advantages: A = (R - mean) / (std + 1e-6), and the sets over which mean and std are taken."""

from dataclasses import dataclass

from gtpo_verl.algorithms._packed.moments import Moments


@dataclass(frozen=True)
class Normalizer:
    """A = (R - mean) * scale, with scale = 1 / (std + 1e-6); 0 where all rewards of the set are equal."""

    mean: float
    scale: float

    @classmethod
    def over(cls, rewards: Moments, eps: float) -> "Normalizer":
        """Normalise by this set of rewards."""
        return cls(rewards.mean, rewards.scale(eps))


def normalizers(
    plus: Moments, minus: Moments, normalization: str, negatives: str, eps: float
) -> tuple[Normalizer, Normalizer]:
    """The normalisers of the correct and of the wrong rewards.

    plus, minus: moments of the shaped rewards r⁺ of correct and r⁻ of wrong tokens (GTPO) or responses (GRPO-S).
    normalization, negatives: as in `ShapingConfig`. eps: of the type the rewards were computed in.
    Source: arXiv 2508.04349, early eqs. 4, 16, 17 and late eq. 6; `joint` is ours.
    """
    plus_and_zeros = plus.join(Moments.constant(0.0, minus.count))
    minus_and_zeros = minus.join(Moments.constant(0.0, plus.count))
    if normalization == "all" and negatives == "zero":  # early (4): one set, in which wrong tokens have r = 0
        return Normalizer.over(plus_and_zeros, eps), Normalizer.over(plus_and_zeros, eps)
    if normalization == "all":  # early (16) for correct, (17) for wrong: each side with one 0 per token of the other
        return Normalizer.over(plus_and_zeros, eps), Normalizer.over(minus_and_zeros, eps)
    if normalization == "within":  # late (6) taken literally: each polarity alone
        return Normalizer.over(plus, eps), Normalizer.over(minus, eps)
    if normalization == "joint":
        both = plus.join(minus)
        return Normalizer.over(both, eps), Normalizer.over(both, eps)
    return Normalizer(0.0, 1.0), Normalizer(0.0, 1.0)  # none: the shaped reward is the advantage
