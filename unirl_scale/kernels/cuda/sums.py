"""Sums in the canonical tree: neighbours are paired level by level and an odd last one moves up.

That is the tree that splits at the largest power of two below n, so aligned blocks of a power of two of
leaves can be summed first, in registers, and the tree over the block sums is again canonical. Additions
are plain fp32, so the bits are those of the plain-torch truth.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from unirl_scale.kernels.spans import Spans

BLOCK_ROWS = 64  # leaves a program sums in registers


@triton.jit
def _pair(x, present, ROWS: tl.constexpr):
    """One level: x [C, ROWS], the first `present` columns real -> [C, ROWS // 2] and how many are real."""
    left, right = tl.split(tl.reshape(x, (x.shape[0], ROWS // 2, 2)))
    both = tl.arange(0, ROWS // 2) * 2 + 1 < present
    return tl.where(both[None, :], left + right, left), (present + 1) // 2


@triton.jit
def tree_columns(x, present, ROWS: tl.constexpr):
    """x fp32 [C, ROWS], the first `present` >= 1 of ROWS <= 64 real -> [C], the canonical tree over them."""
    if ROWS == 64:
        x, present = _pair(x, present, 64)
    if ROWS >= 32:
        x, present = _pair(x, present, 32)
    if ROWS >= 16:
        x, present = _pair(x, present, 16)
    if ROWS >= 8:
        x, present = _pair(x, present, 8)
    if ROWS >= 4:
        x, present = _pair(x, present, 4)
    if ROWS >= 2:
        x, present = _pair(x, present, 2)
    return tl.reshape(x, (x.shape[0],))


@triton.jit(do_not_specialize=["rows"])
def block_tree_kernel(
    x_ptr, out_ptr, rows, columns, x_row, out_row, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """out[b] = tree over x[b*ROWS : (b+1)*ROWS], the last block possibly short."""
    block = tl.program_id(1).to(tl.int64)
    col = tl.program_id(0).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    row = block * ROWS + tl.arange(0, ROWS)
    mask = (col < columns)[:, None] & (row < rows)[None, :]
    x = tl.load(x_ptr + row[None, :] * x_row + col[:, None], mask=mask, other=0.0).to(tl.float32)
    total = tree_columns(x, tl.minimum(rows - block * ROWS, ROWS), ROWS)
    tl.store(out_ptr + block * out_row + col, total, mask=col < columns)


@triton.jit(do_not_specialize=["samples", "columns"])
def sample_blocks_kernel(
    x_ptr, out_ptr, cu_ptr, out_cu_ptr, samples, columns, x_row, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """Sums each block of ROWS rows counted from each sample's start; block sums of a sample lie at out_cu."""
    sample, block = tl.program_id(2), tl.program_id(1)
    start = tl.load(cu_ptr + sample).to(tl.int64)
    rows = (tl.load(cu_ptr + sample + 1).to(tl.int64) - start) - block.to(tl.int64) * ROWS
    if rows > 0:
        col = tl.program_id(0).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
        row = tl.arange(0, ROWS)
        mask = (col < columns)[:, None] & (row < rows)[None, :]
        base = x_ptr + (start + block * ROWS) * x_row
        x = tl.load(base + row[None, :] * x_row + col[:, None], mask=mask, other=0.0).to(tl.float32)
        total = tree_columns(x, tl.minimum(rows, ROWS), ROWS)
        out_row = tl.load(out_cu_ptr + sample).to(tl.int64) + block
        tl.store(out_ptr + out_row * columns + col, total, mask=col < columns)


@triton.jit(do_not_specialize=["samples", "columns"])
def add_samples_kernel(
    x_ptr, out_ptr, cu_ptr, samples, columns, x_row, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """out += tree over the sample's rows (at most ROWS), for each sample in order."""
    col = tl.program_id(0).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    row = tl.arange(0, ROWS)
    total = tl.load(out_ptr + col, mask=col < columns, other=0.0)
    for sample in range(samples):
        start = tl.load(cu_ptr + sample).to(tl.int64)
        rows = tl.load(cu_ptr + sample + 1).to(tl.int64) - start
        if rows > 0:
            mask = (col < columns)[:, None] & (row < rows)[None, :]
            x = tl.load(x_ptr + (start + row)[None, :] * x_row + col[:, None], mask=mask, other=0.0)
            total += tree_columns(x.to(tl.float32), rows, ROWS)
    tl.store(out_ptr + col, total, mask=col < columns)


def tree_sum(leaves: Tensor) -> Tensor:
    """fp32 [n, ...] -> [...], the canonical tree over dim 0."""
    level = leaves.reshape(leaves.shape[0], -1)
    while level.shape[0] > 1:
        n, columns = level.shape
        rows = min(BLOCK_ROWS, triton.next_power_of_2(n))
        width = 2048 // rows if rows > 8 else 512
        out = torch.empty(triton.cdiv(n, rows), columns, dtype=torch.float32, device=level.device)
        grid = (triton.cdiv(columns, width), out.shape[0])
        block_tree_kernel[grid](level, out, n, columns, level.stride(0), columns, ROWS=rows, COLUMNS=width)
        level = out
    return level[0].view(leaves.shape[1:])


def sum_tokens(x: Tensor, spans: Spans, out: Tensor) -> None:
    """out fp32 [N] += tree over each sample's rows of x [T, N], sample by sample."""
    columns, longest = x.shape[1], spans.max_length
    width = 32
    while longest > BLOCK_ROWS:
        blocks = Spans.of([triton.cdiv(n, BLOCK_ROWS) for n in spans.lengths], x.device)
        partial = torch.empty(blocks.total, columns, dtype=torch.float32, device=x.device)
        grid = (triton.cdiv(columns, width), blocks.max_length, len(spans))
        sample_blocks_kernel[grid](
            x, partial, spans.cu_seqlens, blocks.cu_seqlens, len(spans), columns, x.stride(0),
            ROWS=BLOCK_ROWS, COLUMNS=width,
        )  # fmt: skip
        x, spans, longest = partial, blocks, blocks.max_length
    if longest:
        rows = triton.next_power_of_2(longest)
        add_samples_kernel[(triton.cdiv(columns, width),)](
            x, out, spans.cu_seqlens, len(spans), columns, x.stride(0), ROWS=rows, COLUMNS=width
        )
