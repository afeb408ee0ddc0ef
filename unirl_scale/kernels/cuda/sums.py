"""Sums in the canonical tree: neighbours are paired level by level and an odd last one moves up.

That is the tree that splits at the largest power of two below n, so aligned blocks of a power of two of
leaves can be summed first, in registers, and the tree over the block sums is again canonical. Additions
are plain fp32, so the bits are those of the plain-torch truth. An absent leaf counts as -0.0, the one number
that changes nothing it is added to: x + -0.0 is x for every x, -0.0 included.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from unirl_scale.kernels.spans import Spans

BLOCK_ROWS = 64  # leaves a program sums in registers
COLUMNS = 256


@triton.jit
def tree_rows(at, mask, row, rows, stride, SIZE: tl.constexpr):
    """Canonical tree over rows row .. row + SIZE of a matrix, those below `rows`; `at` points into row 0."""
    if SIZE == 1:
        inside = mask & (row < rows)
        total = tl.load(at + row * stride, mask=inside, other=-0.0).to(tl.float32)
    else:
        left = tree_rows(at, mask, row, rows, stride, SIZE // 2)
        total = left + tree_rows(at, mask, row + SIZE // 2, rows, stride, SIZE // 2)
    return total


@triton.jit
def tree_line(x, SIZE: tl.constexpr):
    """Canonical tree over a vector of SIZE, a power of two -> one element."""
    if SIZE > 1:
        x = tree_line(tl.sum(tl.reshape(x, (SIZE // 2, 2)), axis=1), SIZE // 2)
    return x


@triton.jit(do_not_specialize=["rows"])
def block_tree_kernel(
    x_ptr, out_ptr, rows, columns, x_row, out_row, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """out[b] = tree over x[b*ROWS : (b+1)*ROWS], the last block possibly short."""
    block = tl.program_id(1).to(tl.int64)
    col = tl.program_id(0).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    mask = col < columns
    total = tree_rows(x_ptr + col, mask, block * ROWS, rows, x_row, ROWS)
    tl.store(out_ptr + block * out_row + col, total, mask=mask)


@triton.jit(do_not_specialize=["columns"])
def sample_blocks_kernel(
    x_ptr, out_ptr, cu_ptr, out_cu_ptr, columns, x_row, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """Sums each block of ROWS rows counted from each sample's start; block sums of a sample lie at out_cu."""
    sample, block = tl.program_id(2), tl.program_id(1)
    start = tl.load(cu_ptr + sample).to(tl.int64)
    rows = (tl.load(cu_ptr + sample + 1).to(tl.int64) - start) - block.to(tl.int64) * ROWS
    if rows > 0:
        col = tl.program_id(0).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
        mask = col < columns
        first = start + block * ROWS
        total = tree_rows(x_ptr + col, mask, first, first + rows, x_row, ROWS)
        out_row = tl.load(out_cu_ptr + sample).to(tl.int64) + block
        tl.store(out_ptr + out_row * columns + col, total, mask=mask)


@triton.jit(do_not_specialize=["samples", "columns"])
def add_samples_kernel(
    x_ptr, out_ptr, cu_ptr, samples, columns, x_row, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """out += tree over the sample's rows (at most ROWS), for each sample in order."""
    col = tl.program_id(0).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    mask = col < columns
    total = tl.load(out_ptr + col, mask=mask, other=0.0)
    for sample in range(samples):
        start = tl.load(cu_ptr + sample).to(tl.int64)
        stop = tl.load(cu_ptr + sample + 1).to(tl.int64)
        if stop > start:
            total += tree_rows(x_ptr + col, mask, start, stop, x_row, ROWS)
    tl.store(out_ptr + col, total, mask=mask)


def tree_sum(leaves: Tensor) -> Tensor:
    """fp32 [n, ...] -> [...], the canonical tree over dim 0."""
    level = leaves.reshape(leaves.shape[0], -1)
    while level.shape[0] > 1:
        n, columns = level.shape
        rows = min(BLOCK_ROWS, triton.next_power_of_2(n))
        width = 4 * COLUMNS if rows <= 8 else COLUMNS
        out = torch.empty(triton.cdiv(n, rows), columns, dtype=torch.float32, device=level.device)
        if columns:
            grid = (triton.cdiv(columns, width), out.shape[0])
            block_tree_kernel[grid](
                level, out, n, columns, level.stride(0), columns, ROWS=rows, COLUMNS=width
            )
        level = out
    return level[0].view(leaves.shape[1:])


def sum_tokens(x: Tensor, spans: Spans, out: Tensor) -> None:
    """out fp32 [N] += tree over each sample's rows of x [T, N], sample by sample."""
    columns = x.shape[1]
    while spans.max_length > BLOCK_ROWS:
        blocks = Spans.of([triton.cdiv(n, BLOCK_ROWS) for n in spans.lengths], x.device)
        partial = torch.empty(blocks.total, columns, dtype=torch.float32, device=x.device)
        grid = (triton.cdiv(columns, COLUMNS), blocks.max_length, len(spans))
        sample_blocks_kernel[grid](
            x, partial, spans.cu_seqlens, blocks.cu_seqlens, columns, x.stride(0),
            ROWS=BLOCK_ROWS, COLUMNS=COLUMNS,
        )  # fmt: skip
        x, spans = partial, blocks
    if spans.max_length:
        rows = triton.next_power_of_2(spans.max_length)
        width = 64  # few columns a program: this pass has no other parallelism
        add_samples_kernel[(triton.cdiv(columns, width),)](
            x, out, spans.cu_seqlens, len(spans), columns, x.stride(0), ROWS=rows, COLUMNS=width, num_warps=2
        )
