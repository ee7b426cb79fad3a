"""The entropy of softmax(x) for rows of logits or log-probs, in one pass and without a copy of them.

With m the maximum of a row, s = Σ exp(x − m) and t = Σ exp(x − m)(x − m),

    H = −Σ p ln p = ln s − t / s

which needs no normalised input, so logits and log-probs serve alike. Masked ids (−inf) contribute nothing: p ln p → 0.
"""

from __future__ import annotations

from typing import Any

import torch

_BLOCK = 1 << 17  # elements in flight on the CPU (0.5 MiB in float32): a temporary stays in cache
_FLOOR = -1000.0  # exp of it is 0 in float32, and 0 · −1000 is 0 where 0 · −inf is NaN


def entropy(x: torch.Tensor) -> torch.Tensor:
    """H(softmax(x)) of every row, in blocks of rows, for devices without Triton.

    x: (N, V) logits or log-probs, any float type; −inf marks ids that cannot be sampled.
    Returns (N,) float32, nats, ≥ 0; NaN for a row that holds NaN or nothing but −inf.
    """
    rows = max(1, _BLOCK // max(1, x.shape[1]))
    out = torch.empty(x.shape[0], dtype=torch.float32, device=x.device)
    for start in range(0, x.shape[0], rows):
        block = x[start : start + rows].float()
        z = block - block.amax(-1, keepdim=True)
        e = z.exp()
        s = e.sum(-1).double()
        t = e.mul_(z.clamp_(min=_FLOOR)).sum(-1).double()
        out[start : start + rows] = s.log() - t / s
    return out.clamp_(min=0.0)


def rank_and_entropy(x: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Rank of a token and entropy of every row in one pass, on devices with Triton.

    ``x`` is that of ``entropy``, ``token_ids`` (N,) int64; returns the words (N,) int64 of ``codec.pack``.
    """
    if x.stride(-1) != 1:
        x = x.contiguous()
    words = torch.empty(x.shape[0], dtype=torch.int64, device=x.device)
    if x.shape[0]:
        tokens = token_ids.contiguous()  # the kernel steps through them one by one
        RankAndEntropyKernel()[(x.shape[0],)](words, x, x.stride(0), tokens, x.shape[1], BLOCK_SIZE=8192)
    return words


class RankAndEntropyKernel:
    """Launches as vLLM's ``_ranks_kernel`` does, and writes words of ``codec.pack`` in place of ranks."""

    def __getitem__(self, grid: Any) -> Any:
        from gtpo_verl.integrations.vllm.triton_kernels import NUM_WARPS, rank_entropy_kernel

        def launch(
            output: torch.Tensor,
            logits: torch.Tensor,
            logits_stride: int,
            token_ids: torch.Tensor,
            vocab_size: int,
            BLOCK_SIZE: int,  # noqa: N803  (vLLM passes it by this name)
        ) -> None:
            rank_entropy_kernel[grid](
                output, logits, logits_stride, token_ids, vocab_size, BLOCK_SIZE=BLOCK_SIZE, num_warps=NUM_WARPS
            )

        return launch
