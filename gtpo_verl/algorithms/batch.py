"""What every method reads and returns: a batch of responses in, advantages out."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Batch:
    """B responses of at most T tokens, right-padded; a method reads what its registry entry `needs`.

    response_mask: (B, T) bool or 0/1, holes allowed; padding may hold anything in every other tensor.
    group: (B,) integers, equal for the responses to one prompt.
    correct: (B,) bool, the verifier's verdict.
    entropy: (B, T) nats, of the old policy at the sampling temperature.
    rewards: (B,) outcome rewards, without any length penalty.
    old_log_probs: (B, T) log-probabilities of the sampled tokens under the old policy.
    length_penalty: (B,) <= 0, added where the method adds it; None leaves the choice to the method's config.
    seed: of what a method draws at random, another one at each step.
    guide: (B,) bool, rows of a guiding policy, for methods that tell them apart; None where there are none.
    A0: (B, T) DAPO's advantages, where they are of more rows than these; None where they follow from the rewards.
    """

    response_mask: torch.Tensor
    group: torch.Tensor
    correct: torch.Tensor
    entropy: torch.Tensor | None = None
    rewards: torch.Tensor | None = None
    old_log_probs: torch.Tensor | None = None
    length_penalty: torch.Tensor | None = None
    seed: int = 0
    guide: torch.Tensor | None = None
    A0: torch.Tensor | None = None


@dataclass(frozen=True)
class AdvantageOutput:
    """advantages: (B, T), 0 outside the mask. shaped_rewards: (B, T) token level or (B,) sequence level, or None.
    metrics: by name.
    """

    advantages: torch.Tensor
    shaped_rewards: torch.Tensor | None
    metrics: dict[str, float]
