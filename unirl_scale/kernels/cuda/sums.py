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


@triton.jit
def _sample_rows(cu_ptr, sample, capacity, UNIT: tl.constexpr):
    """First row and row count of a sample: its tokens, or the sums of UNIT of them at sample * capacity."""
    start = tl.load(cu_ptr + sample).to(tl.int64)
    rows = tl.cdiv(tl.load(cu_ptr + sample + 1).to(tl.int64) - start, UNIT)
    first = start if UNIT == 1 else capacity * tl.cast(sample, tl.int64)
    return first, rows


@triton.jit(do_not_specialize=["columns", "capacity", "out_capacity"])
def sample_blocks_kernel(
    x_ptr, out_ptr, cu_ptr, columns, x_row, capacity, out_capacity,
    UNIT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Sums blocks of ROWS rows counted from their sample's start, into out[sample * out_capacity + block]."""
    sample, block = tl.program_id(2), tl.program_id(1)
    first, rows = _sample_rows(cu_ptr, sample, capacity, UNIT)
    if block * ROWS < rows:
        col = tl.program_id(0).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
        mask = col < columns
        total = tree_rows(x_ptr + col, mask, first + block * ROWS, first + rows, x_row, ROWS)
        out_row = sample.to(tl.int64) * out_capacity + block
        tl.store(out_ptr + out_row * columns + col, total, mask=mask)


@triton.jit(do_not_specialize=["samples", "columns", "capacity"])
def add_samples_kernel(
    x_ptr, out_ptr, cu_ptr, samples, columns, x_row, capacity,
    UNIT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """out += tree over the sample's rows (at most ROWS), for each sample in order."""
    col = tl.program_id(0).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    mask = col < columns
    total = tl.load(out_ptr + col, mask=mask, other=0.0)
    for sample in range(samples):
        first, rows = _sample_rows(cu_ptr, sample, capacity, UNIT)
        if rows > 0:
            total += tree_rows(x_ptr + col, mask, first, first + rows, x_row, ROWS)
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
    columns, longest, unit, capacity = x.shape[1], spans.max_length, 1, 0
    while longest > BLOCK_ROWS:
        blocks = triton.cdiv(longest, BLOCK_ROWS)
        partial = torch.empty(len(spans) * blocks, columns, dtype=torch.float32, device=x.device)
        sample_blocks_kernel[(triton.cdiv(columns, COLUMNS), blocks, len(spans))](
            x, partial, spans.cu_seqlens, columns, x.stride(0), capacity, blocks,
            UNIT=unit, ROWS=BLOCK_ROWS, COLUMNS=COLUMNS,
        )  # fmt: skip
        x, longest, unit, capacity = partial, blocks, unit * BLOCK_ROWS, blocks
    if longest:
        width = 32  # few columns a program: this pass has no other parallelism
        add_samples_kernel[(triton.cdiv(columns, width),)](
            x, out, spans.cu_seqlens, len(spans), columns, x.stride(0), capacity,
            UNIT=unit, ROWS=triton.next_power_of_2(longest), COLUMNS=width, num_warps=1,
        )  # fmt: skip
