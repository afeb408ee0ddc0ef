"""Weight gradients for Hopper, bf16, sample by sample into fp32, with the bits of gemm.py.

A producer warp streams blocks of tokens counted from each sample's start. Each of two consumer warpgroups
accumulates a sample's product in registers, from zero, and then adds it to its tile of the gradient, which
stays in shared memory from the first sample to the last.
"""

from __future__ import annotations

import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from unirl_scale.kernels.cuda.hopper_gemm import BLOCK_M, HALF, REGISTERS, matrix, stack, tile_at
from unirl_scale.kernels.cuda.hopper_tiles import ring
from unirl_scale.kernels.cuda.tiles import GemmTile
from unirl_scale.kernels.spans import Spans


@gluon.jit
def _load_samples(
    dy_desc, x_desc, a_bufs, b_bufs, full, empty, cu_ptr,
    samples, tiles_m, tiles_n, leaves, x_leaf,
    GROUP_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Producer of the weight gradient: blocks of BLOCK_K tokens counted from each sample's start."""
    i = 0
    for tile in range(gl.program_id(0), tiles_m * tiles_n * leaves, gl.num_programs(0)):
        tile_m, tile_ln = tile_at(tile, tiles_m, tiles_n * leaves, GROUP_M)
        row = tile_m * 128
        col = tile_ln // tiles_n * x_leaf + tile_ln % tiles_n * BLOCK_N
        for sample in range(samples):
            start = gl.load(cu_ptr + sample)
            stop = gl.load(cu_ptr + sample + 1)
            for token in range(start, stop, BLOCK_K):
                slot = i % STAGES
                mbarrier.wait(empty.index(slot), (i // STAGES & 1) ^ 1)
                ready = full.index(slot)
                mbarrier.expect(ready, 2 * dy_desc.block_type.nbytes + x_desc.block_type.nbytes)
                tma.async_copy_global_to_shared(dy_desc, [token, row], ready, a_bufs.index(2 * slot))
                tma.async_copy_global_to_shared(dy_desc, [token, row + 64], ready, a_bufs.index(2 * slot + 1))
                tma.async_copy_global_to_shared(x_desc, [token, col], ready, b_bufs.index(slot))
                i += 1


@gluon.jit
def _zero_rows_from(buf, rows, BLOCK_K: gl.constexpr):
    """Zero the rows of a [BLOCK_K, 64] tile that belong to the next sample."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    token = gl.arange(0, BLOCK_K, layout=gl.SliceLayout(1, layout)).expand_dims(1)
    values = buf.load(layout)
    buf.store(gl.where(token < rows, values, gl.zeros_like(values)))
    fence_async_shared()


@gluon.jit
def _accumulate_samples(
    out_desc, a_bufs, b_bufs, out_buf, full, empty, loaded, cu_ptr,
    samples, tiles_m, tiles_n, leaves,
    HALF_INDEX: gl.constexpr, GROUP_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """Consumer: its tile of out stays in shared memory while samples are added to it one after another."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    flat = out_buf.reshape([64, BLOCK_N])
    i = 0
    tiles = 0
    for tile in range(gl.program_id(0), tiles_m * tiles_n * leaves, gl.num_programs(0)):
        tile_m, tile_ln = tile_at(tile, tiles_m, tiles_n * leaves, GROUP_M)
        row = tile_m * 128 + HALF_INDEX * 64
        col = tile_ln % tiles_n * BLOCK_N
        leaf = tile_ln // tiles_n
        tma.store_wait(0)
        mbarrier.expect(loaded, out_desc.block_type.nbytes)
        tma.async_copy_global_to_shared(out_desc, [leaf, row, col], loaded, out_buf)
        for sample in range(samples):
            start = gl.load(cu_ptr + sample)
            stop = gl.load(cu_ptr + sample + 1)
            if stop > start:
                acc = gl.zeros([64, BLOCK_N], gl.float32, layout)
                for token in range(start, stop, BLOCK_K):
                    slot = i % STAGES
                    mbarrier.wait(full.index(slot), i // STAGES & 1)
                    a = a_bufs.index(2 * slot + HALF_INDEX)
                    if stop - token < BLOCK_K:
                        _zero_rows_from(a, stop - token, BLOCK_K)
                    acc = warpgroup_mma(
                        a.permute((1, 0)), b_bufs.index(slot), acc, use_acc=token > start, is_async=True
                    )
                    acc = warpgroup_mma_wait(1, (acc,))
                    mbarrier.arrive(empty.index((i + STAGES - 1) % STAGES), pred=token > start)
                    i += 1
                acc = warpgroup_mma_wait(0, (acc,))
                mbarrier.arrive(empty.index((i + STAGES - 1) % STAGES))
                mbarrier.wait(loaded, tiles & 1)
                flat.store(flat.load(layout) + acc)
        mbarrier.wait(loaded, tiles & 1)
        tiles += 1  # noqa: SIM113 - the kernel language has no enumerate
        fence_async_shared()
        tma.async_copy_shared_to_global(out_desc, [leaf, row, col], out_buf)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["samples", "tiles_m", "tiles_n", "leaves"])
def weight_grad_kernel(
    dy_desc, x_desc, out_desc, cu_ptr,
    samples, tiles_m, tiles_n, leaves, x_leaf,
    GROUP_M: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """out[l] += dy_s.T @ x_s[l] for each sample s in order, in persistent programs."""
    BLOCK_K: gl.constexpr = dy_desc.block_type.shape[0]
    BLOCK_N: gl.constexpr = x_desc.block_type.shape[1]
    a_bufs = gl.allocate_shared_memory(dy_desc.dtype, [2 * STAGES, BLOCK_K, 64], dy_desc.layout)
    b_bufs = gl.allocate_shared_memory(x_desc.dtype, [STAGES, BLOCK_K, BLOCK_N], x_desc.layout)
    out_bufs = gl.allocate_shared_memory(gl.float32, [2, 1, 64, BLOCK_N], out_desc.layout)
    full, empty = ring(STAGES)
    loaded = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for half in gl.static_range(2):
        mbarrier.init(loaded.index(half), count=1)
    gl.warp_specialize(
        [
            (
                _accumulate_samples,
                (
                    out_desc, a_bufs, b_bufs, out_bufs.index(0), full, empty, loaded.index(0), cu_ptr,
                    samples, tiles_m, tiles_n, leaves, 0, GROUP_M, BLOCK_N, BLOCK_K, STAGES,
                ),
            ),
            (
                _accumulate_samples,
                (
                    out_desc, a_bufs, b_bufs, out_bufs.index(1), full, empty, loaded.index(1), cu_ptr,
                    samples, tiles_m, tiles_n, leaves, 1, GROUP_M, BLOCK_N, BLOCK_K, STAGES,
                ),
            ),
            (
                _load_samples,
                (
                    dy_desc, x_desc, a_bufs, b_bufs, full, empty, cu_ptr,
                    samples, tiles_m, tiles_n, leaves, x_leaf, GROUP_M, BLOCK_N, BLOCK_K, STAGES,
                ),
            ),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


def weight_grad(dy: Tensor, x: Tensor, spans: Spans, out: Tensor, *, tile: GemmTile, programs: int) -> None:
    """gemm.weight_grad for bf16 dy [T, N] and x [T, L, k]."""
    leaves, rows, columns = out.shape
    tiles_m, tiles_n = triton.cdiv(rows, BLOCK_M), triton.cdiv(columns, tile.n)
    weight_grad_kernel[(min(programs, tiles_m * tiles_n * leaves),)](
        matrix(dy, dy.shape[0], rows, dy.stride(0), [tile.k, HALF]),
        matrix(x, x.shape[0], leaves * columns, x.stride(0), [tile.k, tile.n]),
        stack(out, [1, HALF, tile.n]),
        spans.cu_seqlens, len(spans), tiles_m, tiles_n, leaves, columns,
        GROUP_M=tile.group_m, STAGES=tile.stages,
        num_warps=4, maxnreg=REGISTERS,
    )  # fmt: skip
