"""The objectives against autograd of their formulas, written out token by token."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gtpo_verl.algorithms.losses import sequence_loss, token_loss

LOW, HIGH = 0.2, 0.28


def policies(seed: int, rows: int = 6, columns: int = 9, distance: float = 0.4):
    """log_prob with gradient, old_log_prob, advantages (B, T), ragged mask with a hole; float64, NaN outside the
    mask.
    """
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, columns + 1, (rows,), generator=generator)
    mask = torch.arange(columns) < lengths[:, None]
    mask[0, 1:3] = False
    old = -torch.rand(rows, columns, generator=generator, dtype=torch.float64)
    new = old + distance * torch.randn(rows, columns, generator=generator, dtype=torch.float64)
    advantages = torch.randn(rows, columns, generator=generator, dtype=torch.float64)
    new, old, advantages = (torch.where(mask, x, torch.nan) for x in (new, old, advantages))
    return new.requires_grad_(), old, advantages, mask


def clipped(ratio: torch.Tensor, advantage: torch.Tensor, low: float = LOW, high: float = HIGH) -> torch.Tensor:
    return -torch.minimum(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)


@given(st.integers(0, 2**31), st.sampled_from([None, 1.5, 10.0]))
def test_token_loss_and_its_gradient(seed, dual_clip):
    new, old, advantages, mask = policies(seed)
    losses, _ = token_loss(new, old, advantages, mask, LOW, HIGH, dual_clip)
    (losses * mask).sum().backward()
    expected = torch.zeros_like(old)
    again = new.detach().clone().requires_grad_()
    for i, t in mask.nonzero().tolist():
        term = clipped((again[i, t] - old[i, t]).exp(), advantages[i, t])
        if dual_clip is not None and advantages[i, t] < 0:
            term = torch.minimum(term, -dual_clip * advantages[i, t])
        expected[i, t] = term
    expected.sum().backward()
    torch.testing.assert_close(losses.detach(), expected.detach())
    torch.testing.assert_close(new.grad[mask], again.grad[mask])
    assert not new.grad[~mask].any()


@given(st.integers(0, 2**31), st.sampled_from(["arithmetic", "geometric"]), st.sampled_from([0.01, 0.4]))
def test_sequence_loss_and_its_gradient(seed, ratio, high):
    new, old, advantages, mask = policies(seed)
    per_response = advantages[:, 0]
    losses, _ = sequence_loss(new, old, per_response, mask, 0.1, high, ratio)
    losses.sum().backward()
    again = new.detach().clone().requires_grad_()
    terms = []
    for i in range(len(mask)):
        log_ratios = (again[i] - old[i])[mask[i]]
        mean = log_ratios.exp().mean() if ratio == "arithmetic" else log_ratios.mean().exp()
        terms.append(clipped(mean, per_response[i], 0.1, high))
    torch.stack(terms).sum().backward()
    torch.testing.assert_close(losses, torch.stack(terms))
    torch.testing.assert_close(new.grad[mask], again.grad[mask])
    assert not new.grad[~mask].any()


def test_at_the_old_policy_the_gradient_is_that_of_the_policy_gradient():
    new, old, advantages, mask = policies(0, distance=0.0)
    token_loss(new, old, advantages, mask)[0].sum().backward()
    torch.testing.assert_close(new.grad[mask], -advantages[mask])
    new.grad = None
    sequence_loss(new, old, advantages[:, 0], mask)[0].sum().backward()
    expected = (-advantages[:, :1] / mask.sum(1, keepdim=True)).expand(mask.shape)
    torch.testing.assert_close(new.grad[mask], expected[mask])


def test_clip_fractions_count_the_side_that_binds():
    # Ratios 1.5, 1.5, 0.5, 0.5, 1.1 with advantages +, -, +, -, +: the second and third are not clipped.
    old = torch.zeros(1, 5)
    new = torch.tensor([[1.5, 1.5, 0.5, 0.5, 1.1]]).log()
    advantages = torch.tensor([[1.0, -1.0, 1.0, -1.0, 1.0]])
    _, metrics = token_loss(new, old, advantages, torch.ones(1, 5, dtype=torch.bool))
    assert metrics["clipfrac_high"].item() == pytest.approx(0.2)
    assert metrics["clipfrac_low"].item() == pytest.approx(0.2)
    assert metrics["clipfrac"].item() == pytest.approx(0.4)
    assert metrics["ratio_mean"].item() == pytest.approx(1.02)
    assert metrics["ratio_spread"].item() == pytest.approx(math.sqrt((4 * 0.25 + 0.01) / 5))
    assert metrics["ppo_kl"].item() == pytest.approx(-new.mean().item())


def test_sequence_metrics_are_over_responses():
    # Mean ratios 1.5 and 0.9; the third response is empty.
    new = torch.tensor([[2.0, 1.0], [0.9, 5.0], [7.0, 7.0]]).log()
    mask = torch.tensor([[1, 1], [1, 0], [0, 0]], dtype=torch.bool)
    losses, metrics = sequence_loss(new, torch.zeros(3, 2), torch.tensor([1.0, 1.0, 1.0]), mask)
    torch.testing.assert_close(losses, torch.tensor([-1.28, -0.9, 0.0]))
    assert metrics["clipfrac_high"].item() == pytest.approx(0.5)
    assert metrics["ratio_mean"].item() == pytest.approx(1.2)


def test_dual_clip_counts_and_bounds():
    new, old = torch.full((1, 2), 20.0).log(), torch.zeros(1, 2)
    losses, metrics = token_loss(new, old, torch.tensor([[-1.0, 1.0]]), torch.ones(1, 2).bool(), clip_ratio_c=10.0)
    torch.testing.assert_close(losses, torch.tensor([[10.0, -1.28]]))
    assert metrics["clipfrac_lower"].item() == 0.5


def test_no_ratio_overflows():
    new = torch.tensor([[500.0, -500.0]], requires_grad=True)
    losses, _ = token_loss(new, torch.zeros(1, 2), torch.tensor([[-1.0, 1.0]]), torch.ones(1, 2).bool())
    losses.sum().backward()
    assert losses.isfinite().all()
    assert new.grad.isfinite().all()


@pytest.mark.parametrize("arguments", [{"clip_ratio_low": 1.1}, {"clip_ratio_high": -0.1}, {"clip_ratio_c": 1.0}])
def test_impossible_clip_ratios(arguments):
    one = torch.ones(1, 1)
    with pytest.raises(ValueError, match="clip"):
        token_loss(one, one, one, one.bool(), **arguments)
    with pytest.raises(ValueError, match="ratio must be"):
        sequence_loss(one, one, one[0], one.bool(), ratio="harmonic")
