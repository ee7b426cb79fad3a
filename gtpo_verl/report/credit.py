"""Sampled responses with the advantage of every token: where a method put the credit."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gtpo_verl.report.results import ArmResult
from gtpo_verl.runs.reader import read_credit_samples


@dataclass(frozen=True)
class Token:
    """A token's text, its advantage, and its shade in [0.15, 1]: how far the advantage is from 0."""

    text: str
    advantage: float
    shade: float

    @property
    def positive(self) -> bool:
        return self.advantage >= 0


@dataclass(frozen=True)
class CreditSample:
    """A response of an arm at a step; ``left_out``: tokens behind those that were kept."""

    arm: str
    step: int
    prompt: str
    correct: bool
    tokens: tuple[Token, ...]
    left_out: int

    @property
    def lowest(self) -> float:
        return min(token.advantage for token in self.tokens)

    @property
    def highest(self) -> float:
        return max(token.advantage for token in self.tokens)


def credit_samples(arms: Sequence[ArmResult]) -> list[CreditSample]:
    """The samples that each arm's first training kept at its last such step, in the order of the arms."""
    return [
        _sample(arm.name, found)
        for arm in arms
        for found in read_credit_samples(arm.counted[0].training)
        if found.get("tokens")
    ]


def _sample(arm: str, found: dict[str, Any]) -> CreditSample:
    """Shades run from the smallest to the largest distance from 0 in the response, so that small shifts are seen."""
    advantages = [float(value) for value in found["advantages"]]
    distances = [abs(value) for value in advantages]
    low, width = min(distances), max(distances) - min(distances)
    shades = [0.15 + 0.85 * (distance - low) / width if width > 1e-6 else 0.5 for distance in distances]
    tokens = [Token(*one) for one in zip(found["tokens"], advantages, shades, strict=True)]
    left_out = int(found.get("length", len(tokens))) - len(tokens)
    return CreditSample(arm, int(found["step"]), found["prompt"], bool(found["correct"]), tuple(tokens), left_out)
