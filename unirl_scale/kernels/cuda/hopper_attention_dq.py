"""The dq pass of hopper_attention_dx.py: a program owns 128 query rows and adds over KV blocks."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from unirl_scale.kernels.cuda.hopper_attention import stat_start, store_rows, zero_rows_from
from unirl_scale.kernels.cuda.hopper_tiles import banded, draw_tile, ring, take_tile, tile_slots


@gluon.jit
def _load_keys(
    q_desc, do_desc, k_desc, v_desc, q_bufs, k_bufs, v_bufs, q_full, q_empty, full, empty,
    counter_ptr, slots, drawn, taken, cu_ptr, samples, tiles,
    heads: gl.constexpr, group: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    HEAD_BAND: gl.constexpr,
):  # fmt: skip
    """Producer of the dq pass: q and do once a tile, then KV blocks in order."""
    i = 0
    done = 0
    turn = 0
    tile = draw_tile(counter_ptr, slots, drawn, taken, turn)
    while tile < tiles * heads * samples:
        rank, flat_head = banded(tile, tiles, HEAD_BAND)
        sample = flat_head // heads
        head = flat_head % heads
        start = gl.load(cu_ptr + sample)
        length = gl.load(cu_ptr + sample + 1) - start
        first = (tiles - 1 - rank) * 128
        if first < length:
            mbarrier.wait(q_empty, (done & 1) ^ 1)
            mbarrier.expect(q_full, 4 * q_desc.block_type.nbytes)
            tma.async_copy_global_to_shared(q_desc, [head, start + first, 0], q_full, q_bufs.index(0))
            tma.async_copy_global_to_shared(q_desc, [head, start + first + 64, 0], q_full, q_bufs.index(1))
            tma.async_copy_global_to_shared(do_desc, [head, start + first, 0], q_full, q_bufs.index(2))
            tma.async_copy_global_to_shared(do_desc, [head, start + first + 64, 0], q_full, q_bufs.index(3))
            done += 1
            for j in range(0, min(first + 128, length), BLOCK_N):
                slot = i % STAGES
                ready = full.index(slot)
                mbarrier.wait(empty.index(slot), (i // STAGES & 1) ^ 1)
                mbarrier.expect(ready, 2 * k_desc.block_type.nbytes)
                kv_head = head // group
                tma.async_copy_global_to_shared(k_desc, [kv_head, start + j, 0], ready, k_bufs.index(slot))
                tma.async_copy_global_to_shared(v_desc, [kv_head, start + j, 0], ready, v_bufs.index(slot))
                i += 1
        turn += 1
        tile = draw_tile(counter_ptr, slots, drawn, taken, turn)


@gluon.jit
def _accumulate_dq(
    q_bufs, k_bufs, v_bufs, q_full, q_empty, full, empty, lse_ptr, delta_ptr, dq_ptr,
    slots, drawn, taken, cu_ptr, samples, tiles, padded, scale, scale_log2,
    HALF_INDEX: gl.constexpr, WIDTH: gl.constexpr, heads: gl.constexpr, BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr, HEAD_BAND: gl.constexpr,
):  # fmt: skip
    """Consumer of 64 query rows."""
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    d_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, d_layout, 2)
    q = q_bufs.index(HALF_INDEX).reshape([64, WIDTH])
    do = q_bufs.index(2 + HALF_INDEX).reshape([64, WIDTH])
    zeros = gl.zeros([64, BLOCK_N], gl.float32, s_layout)
    i = 0
    done = 0
    turn = 0
    tile = take_tile(slots, drawn, taken, turn)
    while tile < tiles * heads * samples:
        rank, flat_head = banded(tile, tiles, HEAD_BAND)
        sample = flat_head // heads
        head = flat_head % heads
        start = gl.load(cu_ptr + sample)
        length = gl.load(cu_ptr + sample + 1) - start
        top = (tiles - 1 - rank) * 128
        if top < length:
            first = top + HALF_INDEX * 64
            row = first + gl.arange(0, 64, layout=gl.SliceLayout(1, s_layout))
            col = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, s_layout))
            stat = head.to(gl.int64) * padded + stat_start(start, sample) + row
            lse = gl.load(lse_ptr + stat, mask=row < length, other=float("inf")).expand_dims(1)
            delta = gl.load(delta_ptr + stat, mask=row < length, other=0.0).expand_dims(1)
            dq = gl.zeros([64, WIDTH], gl.float32, d_layout)
            mbarrier.wait(q_full, done & 1)
            stop = min(top + 128, length)
            for j in range(0, stop, BLOCK_N):
                slot = i % STAGES
                mbarrier.wait(full.index(slot), i // STAGES & 1)
                k = k_bufs.index(slot).reshape([BLOCK_N, WIDTH])
                v = v_bufs.index(slot).reshape([BLOCK_N, WIDTH])
                if j + BLOCK_N > length:
                    zero_rows_from(k, length - j, BLOCK_N, WIDTH)
                scores = warpgroup_mma(q, k.permute((1, 0)), zeros, use_acc=False, is_async=True)
                dp = warpgroup_mma(do, v.permute((1, 0)), zeros, use_acc=False, is_async=True)
                scores = warpgroup_mma_wait(1, (scores,))
                p = gl.exp2(scores * scale_log2 - lse)
                dp = warpgroup_mma_wait(0, (dp,))
                ds = p * (dp - delta)
                if j + BLOCK_N > first:
                    ds = gl.where((j + col).expand_dims(0) <= row.expand_dims(1), ds, 0.0)
                ds_operand = gl.convert_layout(ds.to(gl.bfloat16), operand)
                dq = warpgroup_mma(ds_operand, k, dq, is_async=True)
                dq, ds_operand = warpgroup_mma_wait(0, (dq, ds_operand))
                mbarrier.arrive(empty.index(slot))
                i += 1
            mbarrier.arrive(q_empty)
            done += 1
            store_rows(dq_ptr, dq * scale, start, first, length, heads, head, WIDTH)
        turn += 1
        tile = take_tile(slots, drawn, taken, turn)


@gluon.jit(do_not_specialize=["samples", "tiles", "padded"])
def attention_dq_kernel(
    q_desc, do_desc, k_desc, v_desc, lse_ptr, delta_ptr, dq_ptr, counter_ptr, cu_ptr,
    samples, tiles, padded, scale, scale_log2,
    heads: gl.constexpr, group: gl.constexpr, STAGES: gl.constexpr, HEAD_BAND: gl.constexpr,
):  # fmt: skip
    BLOCK_N: gl.constexpr = k_desc.block_type.shape[1]
    WIDTH: gl.constexpr = k_desc.block_type.shape[2]
    q_bufs = gl.allocate_shared_memory(q_desc.dtype, [4, 1, 64, WIDTH], q_desc.layout)
    k_bufs = gl.allocate_shared_memory(k_desc.dtype, [STAGES, 1, BLOCK_N, WIDTH], k_desc.layout)
    v_bufs = gl.allocate_shared_memory(k_desc.dtype, [STAGES, 1, BLOCK_N, WIDTH], k_desc.layout)
    q_full, q_empty = ring(1)
    full, empty = ring(STAGES)
    slots, drawn, taken = tile_slots()
    gl.warp_specialize(
        [
            (
                _accumulate_dq,
                (
                    q_bufs, k_bufs, v_bufs, q_full.index(0), q_empty.index(0), full, empty,
                    lse_ptr, delta_ptr, dq_ptr, slots, drawn, taken, cu_ptr, samples, tiles, padded,
                    scale, scale_log2,
                    0, WIDTH, heads, BLOCK_N, STAGES, HEAD_BAND,
                ),
            ),
            (
                _accumulate_dq,
                (
                    q_bufs, k_bufs, v_bufs, q_full.index(0), q_empty.index(0), full, empty,
                    lse_ptr, delta_ptr, dq_ptr, slots, drawn, taken, cu_ptr, samples, tiles, padded,
                    scale, scale_log2,
                    1, WIDTH, heads, BLOCK_N, STAGES, HEAD_BAND,
                ),
            ),
            (
                _load_keys,
                (
                    q_desc, do_desc, k_desc, v_desc, q_bufs, k_bufs, v_bufs,
                    q_full.index(0), q_empty.index(0), full, empty,
                    counter_ptr, slots, drawn, taken, cu_ptr, samples, tiles,
                    heads, group, BLOCK_N, STAGES, HEAD_BAND,
                ),
            ),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
