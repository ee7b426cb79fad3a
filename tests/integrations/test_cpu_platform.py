"""What verl's actor does differently on a CPU."""

import pytest
import torch
from verl.utils import torch_functional

from gtpo_verl.integrations.cpu_platform import together


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(57, 258), (3, 19, 258)])
def test_log_probs_of_all_tokens_at_once_are_those_of_verl(shape: tuple[int, ...]) -> None:
    """Values and gradients; a packed batch (tokens, vocabulary) is one call, whatever its length."""
    calls: list[torch.Size] = []

    def counting(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        calls.append(logits.shape)
        return torch_functional.logprobs_from_logits_v2(logits, labels)

    generator = torch.Generator().manual_seed(1)
    logits = (4 * torch.randn(shape, generator=generator)).requires_grad_()
    labels = torch.randint(shape[-1], shape[:-1], generator=generator)
    weights = torch.randn(shape[:-1], generator=generator)
    found = together(counting)(logits, labels)
    (gradient,) = torch.autograd.grad((found * weights).sum(), logits)
    expected = torch_functional.logprobs_from_logits_v2(logits, labels)
    (expected_gradient,) = torch.autograd.grad((expected * weights).sum(), logits)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
    torch.testing.assert_close(gradient, expected_gradient, rtol=0, atol=1e-6)
    assert calls == [torch.Size([1, *shape]) if len(shape) == 2 else torch.Size(shape)]
