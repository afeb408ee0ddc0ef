"""Drawing tokens by exact integers: one program a row, three passes over logits that L2 holds."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096


@triton.jit
def integer_weights(row_ptr, col, columns, top, SCALE: tl.constexpr):
    """Likelihoods relative to `top` in units of 1 / SCALE, rounded down: int64, 0 past the last column."""
    x = tl.load(row_ptr + col, mask=col < columns, other=float("-inf"))
    return (tl.exp(x - top) * SCALE).to(tl.int64)


@triton.jit
def sample_kernel(
    logits_ptr, uniforms_ptr, out_ptr, columns, logits_row,
    SCALE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Only the block in which the running sum passes the threshold is summed column by column."""
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * logits_row
    col = tl.arange(0, BLOCK)
    tops = tl.full((BLOCK,), float("-inf"), tl.float32)
    for start in range(0, columns, BLOCK):
        x = tl.load(row_ptr + start + col, mask=start + col < columns, other=float("-inf"))
        tops = tl.maximum(tops, x)
    top = tl.max(tops, axis=0)
    sums = tl.zeros((BLOCK,), tl.int64)
    for start in range(0, columns, BLOCK):
        sums += integer_weights(row_ptr, start + col, columns, top, SCALE)
    total = tl.sum(sums, axis=0)
    threshold = (tl.load(uniforms_ptr + row) * total.to(tl.float64)).to(tl.int64)
    threshold = tl.minimum(threshold, total - 1)
    before = total * 0
    for start in range(0, columns, BLOCK):
        weights = integer_weights(row_ptr, start + col, columns, top, SCALE)
        here = tl.sum(weights, axis=0)
        if (before <= threshold) & (threshold < before + here):
            passed = before + tl.cumsum(weights, axis=0) <= threshold
            tl.store(out_ptr + row, (start + tl.sum(passed.to(tl.int32), axis=0)).to(tl.int64))
        before += here


def sample(logits: Tensor, uniforms: Tensor, scale: float) -> Tensor:
    """logits fp32 [B, V] with contiguous rows, uniforms fp64 [B] -> int64 [B]."""
    rows, columns = logits.shape
    out = torch.zeros(rows, dtype=torch.int64, device=logits.device)
    if rows:
        sample_kernel[(rows,)](
            logits, uniforms, out, columns, logits.stride(0), SCALE=scale, BLOCK=BLOCK, num_warps=8
        )
    return out
