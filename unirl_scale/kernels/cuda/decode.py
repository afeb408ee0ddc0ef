"""Matrix products for a few rows (decode), on Hopper, with the bits of the training products.

A tensor-core instruction is 64 rows high, so up to 32 rows of x swap places with the weight: 64 rows of
the weight by 16 or 32 of x. Beyond, x fills the instruction, and tiles of 64, 32 or 16 rows of the weight
spread it over the multiprocessors. Products commute and K is visited in the same order, so every element
is the one that training computes. The work is reading the weight once: a deep ring of stages keeps enough
bytes in flight for that, and leaves run side by side, since their tree joins them only afterwards.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from unirl_scale.kernels.cuda.chain import follow
from unirl_scale.kernels.cuda.tiles import INSTRUCTION_ROWS, DecodeTile

MAX_ROWS = 64


@triton.jit(do_not_specialize=["rows", "columns", "k_steps", "first"])
def decode_products_kernel(
    w_desc, x_desc, out_ptr, bias_ptr,
    rows, columns, k_steps, first, w_leaf, x_leaf, out_leaf, out_row,
    ROUND_LEAF: tl.constexpr, HAS_BIAS: tl.constexpr, X_FIRST: tl.constexpr,
    BLOCK_W: tl.constexpr, BLOCK_X: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """out[g] = x[first + g] @ w[first + g].T; w_leaf rows and x_leaf columns lie between leaves."""
    follow()
    group = tl.program_id(1)
    leaf = first + group
    col = tl.program_id(0) * BLOCK_W
    n = col + tl.arange(0, BLOCK_W)
    m = tl.arange(0, BLOCK_X)
    if X_FIRST:
        n, m = n[None, :], m[:, None]
        acc = tl.zeros((BLOCK_X, BLOCK_W), tl.float32)
    else:
        n, m = n[:, None], m[None, :]
        acc = tl.zeros((BLOCK_W, BLOCK_X), tl.float32)
    for step in tl.range(0, k_steps):
        w = w_desc.load([leaf * w_leaf + col, step * BLOCK_K])
        x = x_desc.load([0, leaf * x_leaf + step * BLOCK_K])
        if X_FIRST:
            acc = tl.dot(x, w.T, acc)
        else:
            acc = tl.dot(w, x.T, acc)
    if ROUND_LEAF:
        acc = acc.to(tl.bfloat16).to(tl.float32)
    if HAS_BIAS:
        acc += tl.load(bias_ptr + n, mask=n < columns, other=0.0).to(tl.float32)
    at = out_ptr + group * out_leaf + m * out_row + n
    tl.store(at, acc.to(out_ptr.dtype.element_ty), mask=(n < columns) & (m < rows))


def products(
    x: Tensor,
    w: Tensor,
    out: Tensor,
    *,
    first: int,
    round_leaf: bool,
    bias: Tensor | None,
    tile: DecodeTile,
) -> None:
    """out[g] = x[first + g] @ w[first + g].T.

    Args:
        x: [LA, M <= 64, K] view over [M, LA*K], K a multiple of tile.k when LA > 1.
        w: [LB, N, K] contiguous.
        out: [G, M, N], last stride 1.
    """
    groups, rows, columns = out.shape
    leaves, _, k = x.shape
    flat_x = TensorDescriptor(x, [rows, leaves * k], [x.stride(1), 1], [tile.x, tile.k])
    flat_w = TensorDescriptor(w, [w.shape[0] * columns, k], [w.stride(1), 1], [tile.w, tile.k])
    decode_products_kernel[(triton.cdiv(columns, tile.w), groups)](
        flat_w, flat_x, out, out if bias is None else bias,
        rows, columns, triton.cdiv(k, tile.k), first, columns, k if leaves > 1 else 0,
        out.stride(0), out.stride(1),
        ROUND_LEAF=round_leaf, HAS_BIAS=bias is not None, X_FIRST=tile.x == INSTRUCTION_ROWS,
        BLOCK_W=tile.w, BLOCK_X=tile.x, BLOCK_K=tile.k,
        num_warps=4, num_stages=tile.stages, launch_pdl=True,
    )  # fmt: skip
