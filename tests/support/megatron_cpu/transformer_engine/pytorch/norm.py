"""RMSNorm."""

from typing import Any

import torch


def norm_weight(size: int, dtype: torch.dtype, sequence_parallel: bool) -> torch.nn.Parameter:
    """The weight (size,) of a norm, marked as Megatron expects: with sequence parallelism every rank has a part of the
    tokens, so that its gradient is summed over ranks.
    """
    weight = torch.nn.Parameter(torch.ones(size, dtype=dtype))
    weight.sequence_parallel = sequence_parallel
    return weight


class RMSNorm(torch.nn.Module):
    """(..., hidden_size) to the same."""

    def __init__(
        self,
        hidden_size: int,
        eps: float,
        sequence_parallel: bool,
        zero_centered_gamma: bool,
        params_dtype: torch.dtype,
        device: Any,
    ) -> None:
        super().__init__()
        if zero_centered_gamma:
            raise NotImplementedError("norms with weights around 0")
        self.eps = eps
        self.weight = norm_weight(hidden_size, params_dtype, sequence_parallel)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.rms_norm(x, (x.shape[-1],), self.weight, self.eps)
