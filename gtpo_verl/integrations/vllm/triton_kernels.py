"""The Triton kernel behind ``kernels``; imported only where it runs: CPU installs may have no usable Triton."""

# ruff: noqa: N803  (Triton writes compile-time arguments in capitals)
# mypy: disable-error-code="untyped-decorator, no-untyped-def"

import triton
import triton.language as tl

NUM_WARPS = 8  # 8192 logits a block: 32 a thread, no register spills for sm_80, sm_90 and sm_100 (tested)
_LOWEST = tl.constexpr(-3.0e38)  # means "no maximum yet": finite, so that differences with it are never NaN


@triton.jit
def _accumulate(x, m, s, t):
    """Add one block of a row to the running m, s and t of the module ``kernels``; sums are rescaled to the new m.

    Within a block everything is float32; s and t, one scalar each, are carried in float64: H is their difference of
    logarithm and quotient, and would lose a digit.
    """
    new_m = tl.maximum(m, tl.max(x, axis=0))
    d = (m - new_m).to(tl.float64)
    scale = tl.exp(d)
    z = x - new_m
    e = tl.exp(z)
    t = scale * (t + d * s) + tl.sum(e * tl.where(x == float("-inf"), 0.0, z), axis=0).to(tl.float64)
    s = scale * s + tl.sum(e, axis=0).to(tl.float64)
    return new_m, s, t


@triton.jit
def rank_entropy_kernel(output_ptr, x_ptr, x_stride, token_ids_ptr, vocab_size, BLOCK_SIZE: tl.constexpr):
    """output[row] = codec.pack(rank of token_ids[row] in x[row], H(softmax(x[row]))); one program a row.

    The rank counts the ids that are at least as likely as the token, itself included, as vLLM counts it.
    """
    row = tl.program_id(0).to(tl.int64)
    row_ptr = x_ptr + row * x_stride
    chosen = tl.load(row_ptr + tl.load(token_ids_ptr + row)).to(tl.float32)
    rank = tl.full((), 0, tl.int32)
    m = tl.full((), _LOWEST, tl.float32)
    s = tl.full((), 0.0, tl.float64)
    t = tl.full((), 0.0, tl.float64)
    for start in range(0, vocab_size, BLOCK_SIZE):
        ids = start + tl.arange(0, BLOCK_SIZE)
        x = tl.load(row_ptr + ids, mask=ids < vocab_size, other=float("-inf")).to(tl.float32)
        rank += tl.sum((x >= chosen).to(tl.int32), axis=0)
        m, s, t = _accumulate(x, m, s, t)
    h = (tl.log(s) - t / s).to(tl.float32)
    h = tl.where(h < 0.0, 0.0, h)  # rounding below zero; NaN compares false and stays
    bits = h.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF
    tl.store(output_ptr + row, tl.maximum(rank, 1).to(tl.int64) << 32 | bits)
