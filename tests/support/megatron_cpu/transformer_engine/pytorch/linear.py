"""Linear layers with tensor and sequence parallelism; their collectives are Megatron-Core's."""

from collections.abc import Callable
from typing import Any

import torch

from transformer_engine.pytorch.norm import norm_weight


class Linear(torch.nn.Module):
    """(tokens, ..., in_features) to (tokens, ..., out_features), of which each rank has a share as ``parallel_mode``
    says.

    column: every rank has all inputs and a share of the outputs. row: the other way round. None: not shared. With
    sequence parallelism what would be whole on every rank is shared by tokens.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        sequence_parallel: bool,
        fuse_wgrad_accumulation: bool,
        tp_group: Any,
        tp_size: int,
        get_rng_state_tracker: Callable[[], Any] | None,
        init_method: Callable[[torch.Tensor], Any],
        bias: bool,
        return_bias: bool,
        parallel_mode: str | None,
        params_dtype: torch.dtype,
        device: Any,
        rng_tracker_name: str | None = None,
    ) -> None:
        super().__init__()
        if fuse_wgrad_accumulation:
            raise NotImplementedError("gradients accumulated by the matrix product")
        self.in_features, self.out_features, self.use_bias = in_features, out_features, bias
        self.tp_group, self.tp_size, self.parallel_mode = tp_group, tp_size, parallel_mode
        self.sequence_parallel = sequence_parallel and tp_size > 1
        self.return_bias = return_bias
        rows = out_features // tp_size if parallel_mode == "column" else out_features
        columns = in_features // tp_size if parallel_mode == "row" else in_features
        self.weight = torch.nn.Parameter(torch.empty(rows, columns, dtype=params_dtype))
        self.bias = torch.nn.Parameter(torch.zeros(rows, dtype=params_dtype)) if bias else None
        init_method(self.weight.data)
        if parallel_mode is not None:
            _mark_shared(self.weight, dim=0 if parallel_mode == "column" else 1)
        if self.bias is not None and parallel_mode == "column":
            _mark_shared(self.bias, dim=0)
        elif self.bias is not None:
            self.bias.sequence_parallel = self.sequence_parallel

    def forward(self, x: torch.Tensor, is_first_microbatch: bool | None = None) -> Any:
        from megatron.core.tensor_parallel import mappings  # it imports this package

        group = self.tp_group
        if self.parallel_mode == "column":
            if self.sequence_parallel:
                x = mappings.gather_from_sequence_parallel_region(x, group=group)
            else:
                x = mappings.copy_to_tensor_model_parallel_region(x, group=group)
        out = torch.nn.functional.linear(x, self.weight)
        if self.parallel_mode == "row":
            if self.sequence_parallel:
                out = mappings.reduce_scatter_to_sequence_parallel_region(out, group=group)
            else:
                out = mappings.reduce_from_tensor_model_parallel_region(out, group=group)
        if self.return_bias:
            return out, self.bias
        return out if self.bias is None else out + self.bias


class LayerNormLinear(Linear):
    """A norm of the inputs, then a column-parallel layer."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        eps: float,
        normalization: str,
        zero_centered_gamma: bool,
        return_layernorm_output: bool,
        sequence_parallel: bool,
        params_dtype: torch.dtype,
        **options: Any,
    ) -> None:
        super().__init__(
            in_features, out_features, sequence_parallel=sequence_parallel, params_dtype=params_dtype, **options
        )
        if normalization != "RMSNorm" or zero_centered_gamma or return_layernorm_output:
            raise NotImplementedError("norms other than RMSNorm, whose output nobody else needs")
        self.eps = eps
        self.layer_norm_weight = norm_weight(in_features, params_dtype, sequence_parallel)

    def forward(self, x: torch.Tensor, is_first_microbatch: bool | None = None) -> Any:
        x = torch.nn.functional.rms_norm(x, (x.shape[-1],), self.layer_norm_weight, self.eps)
        return super().forward(x)


def _mark_shared(parameter: torch.nn.Parameter, dim: int) -> None:
    """The attributes by which Megatron knows that a parameter is split over ranks, for one in the norm of gradients."""
    parameter.tensor_model_parallel, parameter.partition_dim, parameter.partition_stride = True, dim, 1
