"""The losses that treat clipped tokens otherwise: published coefficients, loops in float64, identities."""

import math
from collections.abc import Callable
from typing import Any

import family_loops as loops
import pytest
import torch

from gtpo_verl.algorithms.losses import aspo_loss, ce_gppo_loss, dcpo_clip_loss, dcpo_clip_ranges, token_loss

Loss = Callable[..., Any]
A, B = 1.154699, -0.577349  # of fixture F
CASES = [
    (ce_gppo_loss, loops.ce_gppo, {"beta1": 0.5, "beta2": 1.0}),
    (ce_gppo_loss, loops.ce_gppo, {"beta1": 0.0, "beta2": 0.3}),
    (aspo_loss, loops.aspo, {}),
    (dcpo_clip_loss, loops.dcpo_clip, {}),
]


def coefficients(loss: Loss, advantage: float, ratios: list[float], pi: float = 0.5, **settings: float) -> list[float]:
    """What multiplies ∇log π of a token, at these ratios."""
    old = torch.full((1, len(ratios)), math.log(pi), dtype=torch.float64)
    new = (old + torch.tensor([ratios], dtype=torch.float64).log()).requires_grad_()
    losses, _ = loss(new, old, torch.full_like(old, advantage), torch.ones_like(old), **settings)
    losses.sum().backward()
    assert new.grad is not None
    return (-new.grad[0]).tolist()


def test_published_coefficients() -> None:
    settings = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28, "beta1": 0.5, "beta2": 1.0}
    assert coefficients(ce_gppo_loss, B, [0.7], **settings) == pytest.approx([-0.230940], abs=1e-6)
    assert coefficients(ce_gppo_loss, A, [1.5], **settings) == pytest.approx([1.478014], abs=1e-6)
    found = coefficients(aspo_loss, A, [0.2, 0.5, 1.0, 1.2 - 1e-9, 1.5])
    assert [value / A for value in found] == pytest.approx([3, 2, 1, 0.833333, 0], abs=1e-6)
    assert coefficients(aspo_loss, -1.0, [0.7, 0.9, 2.0, 5.0]) == pytest.approx([0, -0.9, -2, -3])


def test_published_clip_ranges() -> None:
    old = torch.tensor([0.9, 0.2, 0.01]).double().log()
    low, high = dcpo_clip_ranges(old, 0.16, 0.2, 10.0)
    assert low.tolist() == pytest.approx([0.768742, 0.5, 0.5], abs=1e-6)
    assert high.tolist() == pytest.approx([1.187184, 1.618034, 5.0], abs=1e-6)
    _, high = dcpo_clip_ranges(torch.tensor([-50.0]), 0.16, 0.2, None)
    assert high.tolist() == [10.0]


@pytest.mark.parametrize(("loss", "loop", "settings"), CASES)
@pytest.mark.parametrize("clip", [(0.2, 0.2, 3.0), (0.1, 0.4, 10.0)])
def test_every_token_against_the_loops(loss: Loss, loop: Loss, settings: Any, clip: tuple[float, ...]) -> None:
    generator = torch.Generator().manual_seed(3)
    mask = torch.arange(40) < torch.tensor([40, 25, 1, 0])[:, None]
    old = torch.where(mask, -3 * torch.rand(4, 40, generator=generator, dtype=torch.float64), math.nan)
    distance = torch.randn(4, 40, generator=generator, dtype=torch.float64)
    new = (old + distance).requires_grad_()
    advantages = torch.randn(4, 40, generator=generator, dtype=torch.float64)
    names = ("clip_ratio_low", "clip_ratio_high", "clip_ratio_c")
    losses, metrics = loss(new, old, advantages, mask, **dict(zip(names, clip, strict=True)), **settings)
    losses.sum().backward()
    assert new.grad is not None
    assert metrics["clipfrac"] > 0
    assert {"ppo_kl", "ratio_mean", "ratio_spread"} <= metrics.keys()
    clipped = 0
    for i, t in mask.nonzero().tolist():
        ratio, pi = distance[i, t].exp().item(), old[i, t].exp().item()
        value, coefficient = loop(advantages[i, t].item(), ratio, pi, *clip, *settings.values())
        assert losses[i, t].item() == pytest.approx(-value, abs=1e-8)
        assert new.grad[i, t].item() == pytest.approx(-coefficient, abs=1e-8)
        clipped += coefficient == 0
    assert clipped > 3 or "beta1" in settings
    assert (losses[~mask] == 0).all()
    assert (new.grad[~mask] == 0).all()


@pytest.mark.parametrize(("loss", "loop", "settings"), CASES)
def test_at_ratios_of_one_all_are_dapo(loss: Loss, loop: Loss, settings: Any) -> None:
    assert coefficients(loss, B, [1.0], **settings) == pytest.approx([B])
    assert coefficients(loss, A, [1.0], **settings) == pytest.approx([A])


def test_ce_gppo_without_beta_is_dapo() -> None:
    ratios = [0.3, 0.79, 0.81, 1.0, 1.27, 1.29, 4.0, 20.0]
    for advantage in (A, B):
        clip = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28, "clip_ratio_c": 10.0}
        plain = coefficients(token_loss, advantage, ratios, **clip)
        assert coefficients(ce_gppo_loss, advantage, ratios, beta1=0.0, beta2=0.0, **clip) == pytest.approx(plain)
        assert coefficients(ce_gppo_loss, advantage, ratios, beta1=1.0, beta2=1.0, **clip) != pytest.approx(plain)


def test_impossible_betas_are_refused() -> None:
    with pytest.raises(ValueError, match="beta1 and beta2"):
        coefficients(ce_gppo_loss, A, [1.0], beta1=-1.0)
