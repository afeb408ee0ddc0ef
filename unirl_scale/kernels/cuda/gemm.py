"""Matrix products of any shape and dtype, every output element accumulated over K in one order.

All five product ops of the table are sums over leaves of `a[l] @ b[l]`, so one strided kernel serves
them; a second one serves the weight gradients. These kernels are the truth on the device: hopper_gemm.py
and decode.py give their bits faster where they fit, and these alone take fp32 and odd shapes.

Why the bits do not depend on the tile: a tensor-core instruction takes 16 columns of K, consecutive
instructions add to the same accumulator, and nothing splits K or visits it in another order. Padding
adds exact zeros.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from unirl_scale.kernels.spans import Spans

REGISTER_LEAVES = 4  # leaves one program adds up in registers: three tiles live at once


@triton.jit
def _leaf_product(
    a_tile, b_tile, a_step, b_step, row_mask, col_mask, k, ROUND: tl.constexpr, BLOCK_K: tl.constexpr
):  # fmt: skip
    """[BLOCK_M, BLOCK_N] product of one leaf over all of its k, accumulated from zero."""
    acc = tl.zeros((a_tile.shape[0], b_tile.shape[1]), tl.float32)
    ks = tl.arange(0, BLOCK_K)
    for start in range(0, k, BLOCK_K):
        inside = ks < k - start
        a = tl.load(a_tile, mask=row_mask[:, None] & inside[None, :], other=0.0)
        b = tl.load(b_tile, mask=inside[:, None] & col_mask[None, :], other=0.0)
        acc = tl.dot(a, b, acc, input_precision="ieee")
        a_tile += a_step
        b_tile += b_step
    if ROUND:
        acc = acc.to(tl.bfloat16).to(tl.float32)
    return acc


# Neither k nor the leaf is specialised. A loop known to run once would be folded, and `0 + a @ b`, then
# added to an earlier leaf, would be rewritten to accumulate straight onto it, which rounds differently.
@triton.jit(do_not_specialize=["rows", "columns", "k", "first"])
def leaf_products_kernel(
    a_ptr, b_ptr, c_ptr, bias_ptr,
    rows, columns, k, first,
    a_leaf, a_row, b_leaf, b_k, b_col, c_group, c_row,
    LEAVES: tl.constexpr, ROUND_LEAF: tl.constexpr, HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """c[g] = tree over i < LEAVES of a[g + first + i] @ b[g + first + i], one program a tile of one group g.

    Strides are in elements; a_leaf is 0 when all leaves share `a`. The last dims of a and c are contiguous.
    """
    tiles_n = tl.cdiv(columns, BLOCK_N)
    group = tl.program_id(1).to(tl.int64)
    row = (tl.program_id(0) // tiles_n).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    col = (tl.program_id(0) % tiles_n).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    ks = tl.arange(0, BLOCK_K).to(tl.int64)
    row_mask, col_mask = row < rows, col < columns
    a = a_ptr + (group + first) * a_leaf + row[:, None] * a_row + ks[None, :]
    b = b_ptr + (group + first) * b_leaf + ks[:, None] * b_k + col[None, :] * b_col
    b_step = BLOCK_K * b_k
    total = _leaf_product(a, b, BLOCK_K, b_step, row_mask, col_mask, k, ROUND_LEAF, BLOCK_K)
    if LEAVES >= 2:
        total += _leaf_product(
            a + a_leaf, b + b_leaf, BLOCK_K, b_step, row_mask, col_mask, k, ROUND_LEAF, BLOCK_K
        )
    if LEAVES >= 3:
        right = _leaf_product(
            a + 2 * a_leaf, b + 2 * b_leaf, BLOCK_K, b_step, row_mask, col_mask, k, ROUND_LEAF, BLOCK_K
        )
        if LEAVES == 4:
            right += _leaf_product(
                a + 3 * a_leaf, b + 3 * b_leaf, BLOCK_K, b_step, row_mask, col_mask, k, ROUND_LEAF, BLOCK_K
            )
        total += right
    if HAS_BIAS:
        total += tl.load(bias_ptr + col, mask=col_mask, other=0.0).to(tl.float32)[None, :]
    out = c_ptr + group * c_group + row[:, None] * c_row + col[None, :]
    tl.store(out, total.to(c_ptr.dtype.element_ty), mask=row_mask[:, None] & col_mask[None, :])


@triton.jit(do_not_specialize=["samples", "rows", "columns"])
def weight_grad_kernel(
    dy_ptr, x_ptr, out_ptr, cu_ptr,
    samples, rows, columns,
    dy_token, x_token, x_leaf, out_leaf, out_row,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """out[l] += dy_s.T @ x_s[l] for each sample s in order; a program keeps its tile of out in registers."""
    tiles_n = tl.cdiv(columns, BLOCK_N)
    leaf = tl.program_id(1).to(tl.int64)
    row = (tl.program_id(0) // tiles_n).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    col = (tl.program_id(0) % tiles_n).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    ts = tl.arange(0, BLOCK_K).to(tl.int64)
    row_mask, col_mask = row < rows, col < columns
    mask = row_mask[:, None] & col_mask[None, :]
    out = out_ptr + leaf * out_leaf + row[:, None] * out_row + col[None, :]
    total = tl.load(out, mask=mask, other=0.0)
    for sample in range(samples):
        start = tl.load(cu_ptr + sample).to(tl.int64)
        tokens = tl.load(cu_ptr + sample + 1).to(tl.int64) - start
        dy = dy_ptr + (start + ts)[:, None] * dy_token + row[None, :]
        x = x_ptr + (start + ts)[:, None] * x_token + leaf * x_leaf + col[None, :]
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for token in range(0, tokens, BLOCK_K):
            inside = ts < tokens - token
            a = tl.load(dy, mask=inside[:, None] & row_mask[None, :], other=0.0)
            b = tl.load(x, mask=inside[:, None] & col_mask[None, :], other=0.0)
            acc = tl.dot(tl.trans(a), b, acc, input_precision="ieee")
            dy += BLOCK_K * dy_token
            x += BLOCK_K * x_token
        if tokens > 0:
            total += acc
    tl.store(out, total, mask=mask)


def _block(dtype: torch.dtype) -> dict[str, int]:
    """Tensor-core instructions are 64 rows high, whatever M is; fp32 uses plain fused multiply-adds."""
    return {"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 64 if dtype == torch.bfloat16 else 32}


def leaf_products(
    a: Tensor,
    b: Tensor,
    out: Tensor,
    *,
    first: int,
    leaves: int,
    round_leaf: bool,
    bias: Tensor | None = None,
) -> None:
    """out[g] = canonical tree over i < leaves (<= REGISTER_LEAVES) of a[g + first + i] @ b[g + first + i].

    Args:
        a: [LA, M, K] view, last stride 1; stride 0 over dim 0 when leaves share it.
        b: [LB, K, N] view of any strides.
        out: [G, M, N] view, last stride 1, of the result dtype.
        bias: [N] when G is 1.
    """
    groups, rows, columns = out.shape
    if rows == 0:
        return
    block = _block(a.dtype)
    grid = (triton.cdiv(rows, block["BLOCK_M"]) * triton.cdiv(columns, block["BLOCK_N"]), groups)
    leaf_products_kernel[grid](
        a, b, out, out if bias is None else bias,
        rows, columns, a.shape[2], first,
        a.stride(0), a.stride(1), b.stride(0), b.stride(1), b.stride(2), out.stride(0), out.stride(1),
        LEAVES=leaves, ROUND_LEAF=round_leaf, HAS_BIAS=bias is not None, **block,
        num_warps=4, num_stages=3,
    )  # fmt: skip


def weight_grad(dy: Tensor, x: Tensor, spans: Spans, out: Tensor) -> None:
    """out[l] += dy_s.T @ x_s[:, l] sample by sample; dy [T, N], x [T, L, k] view, out fp32 [L, N, k]."""
    leaves, rows, columns = out.shape
    if len(spans) == 0:
        return
    block = _block(dy.dtype)
    grid = (triton.cdiv(rows, block["BLOCK_M"]) * triton.cdiv(columns, block["BLOCK_N"]), leaves)
    weight_grad_kernel[grid](
        dy, x, out, spans.cu_seqlens, len(spans), rows, columns,
        dy.stride(0), x.stride(0), x.stride(1), out.stride(0), out.stride(1), **block,
        num_warps=4, num_stages=3,
    )  # fmt: skip
