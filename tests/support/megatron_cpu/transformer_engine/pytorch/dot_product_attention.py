"""Causal attention with grouped queries, over padded or packed sequences, with context parallelism.

With context parallelism of size C a sequence is cut into 2C chunks, and rank r has chunks r and 2C-1-r. Transformer
Engine sends keys and values round the ring; here every rank gathers all of them. Padding comes after the tokens, where
a causal mask keeps it from having an effect on them.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import scaled_dot_product_attention


class DotProductAttention(torch.nn.Module):
    """Queries (s, b, heads, d), keys and values (s, b, groups, d) to (s, b, heads * d); packed (``thd``): (t, heads, d)
    to (t, heads * d).
    """

    def __init__(
        self,
        num_attention_heads: int,
        kv_channels: int,
        *,
        num_gqa_groups: int,
        attention_dropout: float,
        attn_mask_type: str,
        attention_type: str,
        sequence_parallel: bool,
        tp_size: int,
        tp_group: Any,
        get_rng_state_tracker: Any,
        layer_number: int,
        softmax_scale: float | None = None,
        cp_group: Any = None,
        cp_global_ranks: list[int] | None = None,
        cp_stream: Any = None,
        cp_comm_type: str = "p2p",
    ) -> None:
        super().__init__()
        if attention_dropout or attention_type != "self":
            raise NotImplementedError("attention with dropout, or to another sequence")
        self.scale = kv_channels**-0.5 if softmax_scale is None else softmax_scale
        self.cp_group = cp_group

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *,
        attn_mask_type: str,
        qkv_format: str = "sbhd",
        cu_seqlens_q: torch.Tensor | None = None,
        cu_seqlens_q_padded: torch.Tensor | None = None,
        **packing: Any,
    ) -> torch.Tensor:
        if qkv_format == "sbhd" and attn_mask_type == "causal":
            parts = (x.permute(1, 2, 0, 3) for x in (query, key, value))
            return self._attend(*parts).permute(2, 0, 1, 3).flatten(2)
        if qkv_format != "thd" or attn_mask_type != "padding_causal":
            raise NotImplementedError(f"attention in the format {qkv_format} with the mask {attn_mask_type}")
        ends = cu_seqlens_q if cu_seqlens_q_padded is None else cu_seqlens_q_padded
        size = 1 if self.cp_group is None else self.cp_group.size()
        lengths = (ends.diff() // size).tolist()
        lengths.append(len(query) - sum(lengths))  # what fills the last micro-batch up, if anything does
        sequences = zip(*(x.split(lengths) for x in (query, key, value)), strict=True)
        outputs = [self._attend(*(x.transpose(0, 1)[None] for x in one)) for one in sequences if len(one[0])]
        return torch.cat([output[0].transpose(0, 1) for output in outputs]).flatten(1)

    def _attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """(b, heads, s, d), (b, groups, s, d) and the same to (b, heads, s, d); s is this rank's share."""
        options = {"scale": self.scale, "enable_gqa": True}
        if self.cp_group is None or self.cp_group.size() == 1:
            return scaled_dot_product_attention(query, key, value, is_causal=True, **options)
        size, rank = self.cp_group.size(), self.cp_group.rank()
        own = _positions(query.shape[2], size, rank)
        others = torch.cat([_positions(query.shape[2], size, other) for other in range(size)])
        key, value = torch.cat(_gathered(torch.stack([key, value]), self.cp_group), dim=3)
        return scaled_dot_product_attention(query, key, value, attn_mask=own[:, None] >= others[None], **options)


def _positions(share: int, size: int, rank: int) -> torch.Tensor:
    """(share,): where a rank's tokens are in the sequence."""
    chunk = torch.arange(share // 2)
    return torch.cat([chunk + rank * len(chunk), chunk + (2 * size - 1 - rank) * len(chunk)])


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> tuple[torch.Tensor, ...]:
        ctx.group = group
        parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(group.size())]
        dist.all_gather(parts, x.contiguous(), group=group)
        return tuple(parts)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        summed = torch.stack(gradients)
        dist.all_reduce(summed, group=ctx.group)
        return summed[ctx.group.rank()], None


def _gathered(x: torch.Tensor, group: Any) -> tuple[torch.Tensor, ...]:
    """A tensor of every rank, in order of ranks."""
    return _Gathered.apply(x, group)
