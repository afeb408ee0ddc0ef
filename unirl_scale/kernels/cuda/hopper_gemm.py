"""Matrix products for Hopper (compute capability 9.0), bf16: a producer warp and two consumer warpgroups.

The producer streams tiles through shared memory with the bulk copy engine and runs ahead across leaves,
samples and output tiles, so that starting an accumulator from zero drains nothing. Each consumer owns 64
rows of the tile and adds tensor-core instructions of 16 columns of K in order, as gemm.py does: the bits
are the same.
"""

from __future__ import annotations

from functools import lru_cache

import torch
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
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from unirl_scale.kernels.cuda.hopper_tiles import ring
from unirl_scale.kernels.cuda.tiles import GemmTile

HALF = 64  # rows of a consumer warpgroup
BLOCK_M = 2 * HALF
BLOCK_K = 64
REGISTERS = 168  # a thread at entry: 384 threads share 65536
CONSUMER_REGISTERS = 240
PRODUCER_REGISTERS = 24


@gluon.jit
def tile_at(tile, tiles_m, tiles_n, GROUP_M: gl.constexpr):
    """Tile number -> (row tile, column tile), in bands of GROUP_M row tiles that share columns in L2."""
    band = GROUP_M * tiles_n
    first = tile // band * GROUP_M
    height = min(tiles_m - first, GROUP_M)
    return first + tile % band % height, tile % band // height


@gluon.jit
def _load_leaves(
    a_desc, b_desc, a_bufs, b_bufs, full, empty,
    tiles_m, tiles_n, groups, k_steps, first, a_leaf, b_leaf,
    LEAVES: gl.constexpr, TRANS_B: gl.constexpr, GROUP_M: gl.constexpr, BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Producer. a_leaf: columns of `a` between leaves; b_leaf: rows of `b` between leaves."""
    i = 0
    for tile in range(gl.program_id(0), tiles_m * tiles_n * groups, gl.num_programs(0)):
        tile_m, tile_gn = tile_at(tile, tiles_m, tiles_n * groups, GROUP_M)
        row = tile_m * 128
        col = tile_gn % tiles_n * BLOCK_N
        for i_leaf in range(LEAVES):
            leaf = tile_gn // tiles_n + first + i_leaf
            a_col = leaf * a_leaf
            b_row = leaf * b_leaf
            for step in range(k_steps):
                slot = i % STAGES
                mbarrier.wait(empty.index(slot), (i // STAGES & 1) ^ 1)
                ready = full.index(slot)
                mbarrier.expect(ready, 2 * a_desc.block_type.nbytes + b_desc.block_type.nbytes)
                k = step * BLOCK_K
                tma.async_copy_global_to_shared(a_desc, [row, a_col + k], ready, a_bufs.index(2 * slot))
                tma.async_copy_global_to_shared(
                    a_desc, [row + 64, a_col + k], ready, a_bufs.index(2 * slot + 1)
                )
                if TRANS_B:
                    tma.async_copy_global_to_shared(b_desc, [b_row + col, k], ready, b_bufs.index(slot))
                else:
                    tma.async_copy_global_to_shared(b_desc, [b_row + k, col], ready, b_bufs.index(slot))
                i += 1


@gluon.jit
def _multiply_leaf(
    a_bufs, b_bufs, full, empty, i, k_steps,
    HALF_INDEX: gl.constexpr, TRANS_B: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """One leaf's [64, BLOCK_N] product, accumulated from zero; one instruction group stays in flight."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    acc = gl.zeros([64, BLOCK_N], gl.float32, layout)
    for step in range(k_steps):
        slot = i % STAGES
        mbarrier.wait(full.index(slot), i // STAGES & 1)
        b = b_bufs.index(slot)
        if TRANS_B:
            b = b.permute((1, 0))
        acc = warpgroup_mma(a_bufs.index(2 * slot + HALF_INDEX), b, acc, use_acc=step > 0, is_async=True)
        acc = warpgroup_mma_wait(1, (acc,))
        mbarrier.arrive(empty.index((i + STAGES - 1) % STAGES), pred=step > 0)
        i += 1
    acc = warpgroup_mma_wait(0, (acc,))
    mbarrier.arrive(empty.index((i + STAGES - 1) % STAGES))
    return acc, i


@gluon.jit
def _store_tile(c_desc, c_buf, total, group, row, col, BLOCK_N: gl.constexpr, CHUNK: gl.constexpr):
    """Hand the tile to the copy engine, which clips it; the next tile's products overlap the store."""
    flat = c_buf.reshape([64, CHUNK])
    if CHUNK == BLOCK_N:
        tma.store_wait(0)
        flat.store(total.to(c_desc.dtype))
        fence_async_shared()
        tma.async_copy_shared_to_global(c_desc, [group, row, col], c_buf)
    else:
        left, right = total.reshape([64, 2, CHUNK]).permute((0, 2, 1)).split()
        tma.store_wait(0)
        flat.store(left.to(c_desc.dtype))
        fence_async_shared()
        tma.async_copy_shared_to_global(c_desc, [group, row, col], c_buf)
        tma.store_wait(0)
        flat.store(right.to(c_desc.dtype))
        fence_async_shared()
        tma.async_copy_shared_to_global(c_desc, [group, row, col + CHUNK], c_buf)


@gluon.jit
def _multiply_leaves(
    c_desc, bias_ptr, a_bufs, b_bufs, c_buf, full, empty,
    tiles_m, tiles_n, groups, k_steps, columns,
    HALF_INDEX: gl.constexpr, LEAVES: gl.constexpr, TRANS_B: gl.constexpr, ROUND_LEAF: gl.constexpr,
    HAS_BIAS: gl.constexpr, GROUP_M: gl.constexpr, BLOCK_N: gl.constexpr, CHUNK: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """Consumer of rows HALF_INDEX * 64 onwards of each tile."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    i = 0
    for tile in range(gl.program_id(0), tiles_m * tiles_n * groups, gl.num_programs(0)):
        tile_m, tile_gn = tile_at(tile, tiles_m, tiles_n * groups, GROUP_M)
        row = tile_m * 128 + HALF_INDEX * 64
        col = tile_gn % tiles_n * BLOCK_N
        total, i = _multiply_leaf(
            a_bufs, b_bufs, full, empty, i, k_steps, HALF_INDEX, TRANS_B, BLOCK_N, STAGES
        )
        if ROUND_LEAF:
            total = total.to(gl.bfloat16).to(gl.float32)
        if LEAVES >= 2:
            leaf, i = _multiply_leaf(
                a_bufs, b_bufs, full, empty, i, k_steps, HALF_INDEX, TRANS_B, BLOCK_N, STAGES
            )
            total += leaf.to(gl.bfloat16).to(gl.float32) if ROUND_LEAF else leaf
        if LEAVES >= 3:
            # Three fp32 tiles do not fit in registers: the left node waits in the store buffer.
            stash = c_buf.reshape([64, BLOCK_N])
            tma.store_wait(0)
            stash.store(total)
            right, i = _multiply_leaf(
                a_bufs, b_bufs, full, empty, i, k_steps, HALF_INDEX, TRANS_B, BLOCK_N, STAGES
            )
            if ROUND_LEAF:
                right = right.to(gl.bfloat16).to(gl.float32)
            if LEAVES == 4:
                leaf, i = _multiply_leaf(
                    a_bufs, b_bufs, full, empty, i, k_steps, HALF_INDEX, TRANS_B, BLOCK_N, STAGES
                )
                right += leaf.to(gl.bfloat16).to(gl.float32) if ROUND_LEAF else leaf
            total = stash.load(layout) + right
        if HAS_BIAS:
            n = col + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, layout))
            total += gl.load(bias_ptr + n, mask=n < columns, other=0.0).to(gl.float32).expand_dims(0)
        _store_tile(c_desc, c_buf, total, tile_gn // tiles_n, row, col, BLOCK_N, CHUNK)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["tiles_m", "tiles_n", "groups", "k_steps", "first", "columns"])
def leaf_products_kernel(
    a_desc, b_desc, c_desc, bias_ptr,
    tiles_m, tiles_n, groups, k_steps, first, columns, a_leaf, b_leaf,
    LEAVES: gl.constexpr, TRANS_B: gl.constexpr, ROUND_LEAF: gl.constexpr, HAS_BIAS: gl.constexpr,
    GROUP_M: gl.constexpr, STAGES: gl.constexpr, BLOCK_N: gl.constexpr,
):  # fmt: skip
    """c[g] = tree over i < LEAVES of a[g + first + i] @ b[g + first + i], in persistent programs."""
    BLOCK_K: gl.constexpr = a_desc.block_type.shape[1]
    CHUNK: gl.constexpr = c_desc.block_type.shape[2]
    B_ROWS: gl.constexpr = b_desc.block_type.shape[0]
    B_COLUMNS: gl.constexpr = b_desc.block_type.shape[1]
    a_bufs = gl.allocate_shared_memory(a_desc.dtype, [2 * STAGES, 64, BLOCK_K], a_desc.layout)
    b_bufs = gl.allocate_shared_memory(b_desc.dtype, [STAGES, B_ROWS, B_COLUMNS], b_desc.layout)
    c_bufs = gl.allocate_shared_memory(c_desc.dtype, [2, 1, 64, CHUNK], c_desc.layout)
    full, empty = ring(STAGES)
    gl.warp_specialize(
        [
            (
                _multiply_leaves,
                (
                    c_desc, bias_ptr, a_bufs, b_bufs, c_bufs.index(0), full, empty,
                    tiles_m, tiles_n, groups, k_steps, columns,
                    0, LEAVES, TRANS_B, ROUND_LEAF, HAS_BIAS, GROUP_M, BLOCK_N, CHUNK, STAGES,
                ),
            ),
            (
                _multiply_leaves,
                (
                    c_desc, bias_ptr, a_bufs, b_bufs, c_bufs.index(1), full, empty,
                    tiles_m, tiles_n, groups, k_steps, columns,
                    1, LEAVES, TRANS_B, ROUND_LEAF, HAS_BIAS, GROUP_M, BLOCK_N, CHUNK, STAGES,
                ),
            ),
            (
                _load_leaves,
                (
                    a_desc, b_desc, a_bufs, b_bufs, full, empty,
                    tiles_m, tiles_n, groups, k_steps, first, a_leaf, b_leaf,
                    LEAVES, TRANS_B, GROUP_M, BLOCK_N, BLOCK_K, STAGES,
                ),
            ),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


@lru_cache(maxsize=256)
def shared_layout(shape: tuple[int, ...], dtype: torch.dtype) -> gl.NVMMASharedLayout:
    """How a block lies in shared memory; working it out costs more than a launch, so it is kept."""
    kind = gl.bfloat16 if dtype == torch.bfloat16 else gl.float32
    return gl.NVMMASharedLayout.get_default_for(list(shape), kind)


def matrix(base: Tensor, rows: int, columns: int, stride: int, block: list[int]) -> TensorDescriptor:
    """Descriptor of a matrix of contiguous rows, `stride` elements apart."""
    return TensorDescriptor(
        base, [rows, columns], [stride, 1], block, shared_layout(tuple(block), base.dtype)
    )


def stack(base: Tensor, block: list[int]) -> TensorDescriptor:
    """Descriptor of a [G, M, N] view; the copy engine clips M and N for each g."""
    return TensorDescriptor(
        base, list(base.shape), list(base.stride()), block, shared_layout(tuple(block), base.dtype)
    )


def leaf_products(
    a: Tensor,
    b: Tensor,
    out: Tensor,
    *,
    first: int,
    leaves: int,
    round_leaf: bool,
    bias: Tensor | None,
    tile: GemmTile,
    programs: int,
) -> None:
    """gemm.leaf_products for bf16 a [LA, M, K] and b [LB, K, N]; see `fits` for the layouts it takes."""
    groups, rows, columns = out.shape
    k = a.shape[2]
    trans_b = b.stride(1) == 1
    shared_a = a.stride(0) == 0
    a_columns = k if shared_a else a.shape[0] * k
    if trans_b:
        b_desc = matrix(b, b.shape[0] * columns, k, b.stride(2), [tile.n, BLOCK_K])
    else:
        b_desc = matrix(b, b.shape[0] * k, columns, b.stride(1), [BLOCK_K, tile.n])
    tiles_m, tiles_n = triton.cdiv(rows, BLOCK_M), triton.cdiv(columns, tile.n)
    leaf_products_kernel[(min(programs, tiles_m * tiles_n * groups),)](
        matrix(a, rows, a_columns, a.stride(1), [HALF, BLOCK_K]),
        b_desc,
        stack(out, [1, HALF, tile.store]),
        out if bias is None else bias,
        tiles_m, tiles_n, groups, triton.cdiv(k, BLOCK_K), first, columns,
        0 if shared_a else k, columns if trans_b else k,
        LEAVES=leaves, TRANS_B=trans_b, ROUND_LEAF=round_leaf, HAS_BIAS=bias is not None,
        GROUP_M=tile.group_m, STAGES=tile.stages, BLOCK_N=tile.n,
        num_warps=4, maxnreg=REGISTERS,
    )  # fmt: skip
