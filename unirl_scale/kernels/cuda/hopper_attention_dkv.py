"""The dk, dv pass of hopper_attention_dx.py: a program owns 128 KV rows and adds over its heads' queries."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from unirl_scale.kernels.cuda.hopper_attention import stat_start, store_rows, zero_rows_from
from unirl_scale.kernels.cuda.hopper_tiles import banded, draw_tile, ring, take_tile, tile_slots


@gluon.jit
def _load_queries(
    q_desc, do_desc, k_desc, v_desc, lse_desc, delta_desc,
    q_bufs, do_bufs, kv_bufs, stat_bufs, kv_full, kv_empty, full, empty,
    counter_ptr, slots, drawn, taken, cu_ptr, samples, tiles,
    kv_heads: gl.constexpr, group: gl.constexpr, STAGES: gl.constexpr, HEAD_BAND: gl.constexpr,
):  # fmt: skip
    """Producer of the dk, dv pass: K and V once a tile, then query blocks of 64 rows, head by head."""
    i = 0
    done = 0
    turn = 0
    tile = draw_tile(counter_ptr, slots, drawn, taken, turn)
    while tile < tiles * kv_heads * samples:
        rank, flat_head = banded(tile, tiles, HEAD_BAND)
        sample = flat_head // kv_heads
        kv_head = flat_head % kv_heads
        start = gl.load(cu_ptr + sample)
        length = gl.load(cu_ptr + sample + 1) - start
        first = rank * 128  # longest first
        if first < length:
            mbarrier.wait(kv_empty, (done & 1) ^ 1)
            mbarrier.expect(kv_full, 4 * k_desc.block_type.nbytes)
            tma.async_copy_global_to_shared(k_desc, [kv_head, start + first, 0], kv_full, kv_bufs.index(0))
            tma.async_copy_global_to_shared(
                k_desc, [kv_head, start + first + 64, 0], kv_full, kv_bufs.index(1)
            )
            tma.async_copy_global_to_shared(v_desc, [kv_head, start + first, 0], kv_full, kv_bufs.index(2))
            tma.async_copy_global_to_shared(
                v_desc, [kv_head, start + first + 64, 0], kv_full, kv_bufs.index(3)
            )
            done += 1
            stats = stat_start(start, sample)
            for head in range(kv_head * group, kv_head * group + group):
                for row in range(first, length, 64):
                    slot = i % STAGES
                    ready = full.index(slot)
                    mbarrier.wait(empty.index(slot), (i // STAGES & 1) ^ 1)
                    mbarrier.expect(ready, 2 * q_desc.block_type.nbytes + 2 * lse_desc.block_type.nbytes)
                    tma.async_copy_global_to_shared(q_desc, [head, start + row, 0], ready, q_bufs.index(slot))
                    tma.async_copy_global_to_shared(
                        do_desc, [head, start + row, 0], ready, do_bufs.index(slot)
                    )
                    tma.async_copy_global_to_shared(
                        lse_desc, [head, stats + row], ready, stat_bufs.index(2 * slot)
                    )
                    tma.async_copy_global_to_shared(
                        delta_desc, [head, stats + row], ready, stat_bufs.index(2 * slot + 1)
                    )
                    i += 1
        turn += 1
        tile = draw_tile(counter_ptr, slots, drawn, taken, turn)


@gluon.jit
def _accumulate_dkv(
    q_bufs, do_bufs, kv_bufs, stat_bufs, kv_full, kv_empty, full, empty, dk_ptr, dv_ptr,
    slots, drawn, taken, cu_ptr, samples, tiles, scale, scale_log2,
    HALF_INDEX: gl.constexpr, WIDTH: gl.constexpr, kv_heads: gl.constexpr, group: gl.constexpr,
    STAGES: gl.constexpr, HEAD_BAND: gl.constexpr,
):  # fmt: skip
    """Consumer of 64 KV rows. Tiles are [KV, query]: p and ds feed their products from registers."""
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    d_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, d_layout, 2)
    query_layout: gl.constexpr = gl.SliceLayout(0, s_layout)
    k = kv_bufs.index(HALF_INDEX).reshape([64, WIDTH])
    v = kv_bufs.index(2 + HALF_INDEX).reshape([64, WIDTH])
    zeros = gl.zeros([64, 64], gl.float32, s_layout)
    i = 0
    done = 0
    turn = 0
    tile = take_tile(slots, drawn, taken, turn)
    while tile < tiles * kv_heads * samples:
        rank, flat_head = banded(tile, tiles, HEAD_BAND)
        sample = flat_head // kv_heads
        kv_head = flat_head % kv_heads
        start = gl.load(cu_ptr + sample)
        length = gl.load(cu_ptr + sample + 1) - start
        first = rank * 128 + HALF_INDEX * 64
        if rank * 128 < length:
            col = first + gl.arange(0, 64, layout=gl.SliceLayout(1, s_layout))
            dk = gl.zeros([64, WIDTH], gl.float32, d_layout)
            dv = gl.zeros([64, WIDTH], gl.float32, d_layout)
            mbarrier.wait(kv_full, done & 1)
            for _ in range(group):
                for begin in range(rank * 128, length, 64):
                    slot = i % STAGES
                    mbarrier.wait(full.index(slot), i // STAGES & 1)
                    if begin >= first:
                        q = q_bufs.index(slot).reshape([64, WIDTH])
                        do = do_bufs.index(slot).reshape([64, WIDTH])
                        if begin + 64 > length:
                            zero_rows_from(q, length - begin, 64, WIDTH)
                            zero_rows_from(do, length - begin, 64, WIDTH)
                        scores = warpgroup_mma(k, q.permute((1, 0)), zeros, use_acc=False, is_async=True)
                        dp = warpgroup_mma(v, do.permute((1, 0)), zeros, use_acc=False, is_async=True)
                        row = begin + gl.arange(0, 64, layout=query_layout)
                        lse = stat_bufs.index(2 * slot).reshape([64]).load(query_layout)
                        lse = gl.where(row < length, lse, float("inf"))
                        scores = warpgroup_mma_wait(1, (scores,))
                        p = gl.exp2(scores * scale_log2 - lse.expand_dims(0))
                        if begin == first:
                            p = gl.where(col.expand_dims(1) <= row.expand_dims(0), p, 0.0)
                        p_operand = gl.convert_layout(p.to(gl.bfloat16), operand)
                        dv = warpgroup_mma(p_operand, do, dv, is_async=True)
                        delta = stat_bufs.index(2 * slot + 1).reshape([64]).load(query_layout)
                        delta = gl.where(row < length, delta, 0.0)
                        dp = warpgroup_mma_wait(1, (dp,))
                        ds = p * (dp - delta.expand_dims(0))
                        ds_operand = gl.convert_layout(ds.to(gl.bfloat16), operand)
                        dk = warpgroup_mma(ds_operand, q, dk, is_async=True)
                        dv, dk, p_operand, ds_operand = warpgroup_mma_wait(0, (dv, dk, p_operand, ds_operand))
                    mbarrier.arrive(empty.index(slot))
                    i += 1
            mbarrier.arrive(kv_empty)
            done += 1
            store_rows(dk_ptr, dk * scale, start, first, length, kv_heads, kv_head, WIDTH)
            store_rows(dv_ptr, dv, start, first, length, kv_heads, kv_head, WIDTH)
        turn += 1
        tile = take_tile(slots, drawn, taken, turn)


@gluon.jit(do_not_specialize=["samples", "tiles"])
def attention_dkv_kernel(
    q_desc, do_desc, k_desc, v_desc, lse_desc, delta_desc, dk_ptr, dv_ptr, counter_ptr, cu_ptr,
    samples, tiles, scale, scale_log2,
    kv_heads: gl.constexpr, group: gl.constexpr, STAGES: gl.constexpr, HEAD_BAND: gl.constexpr,
):  # fmt: skip
    WIDTH: gl.constexpr = k_desc.block_type.shape[2]
    q_bufs = gl.allocate_shared_memory(q_desc.dtype, [STAGES, 1, 64, WIDTH], q_desc.layout)
    do_bufs = gl.allocate_shared_memory(q_desc.dtype, [STAGES, 1, 64, WIDTH], q_desc.layout)
    kv_bufs = gl.allocate_shared_memory(q_desc.dtype, [4, 1, 64, WIDTH], q_desc.layout)
    stat_bufs = gl.allocate_shared_memory(gl.float32, [2 * STAGES, 1, 64], lse_desc.layout)
    kv_full, kv_empty = ring(1)
    full, empty = ring(STAGES)
    slots, drawn, taken = tile_slots()
    gl.warp_specialize(
        [
            (
                _accumulate_dkv,
                (
                    q_bufs, do_bufs, kv_bufs, stat_bufs, kv_full.index(0), kv_empty.index(0), full, empty,
                    dk_ptr, dv_ptr, slots, drawn, taken, cu_ptr, samples, tiles, scale, scale_log2,
                    0, WIDTH, kv_heads, group, STAGES, HEAD_BAND,
                ),
            ),
            (
                _accumulate_dkv,
                (
                    q_bufs, do_bufs, kv_bufs, stat_bufs, kv_full.index(0), kv_empty.index(0), full, empty,
                    dk_ptr, dv_ptr, slots, drawn, taken, cu_ptr, samples, tiles, scale, scale_log2,
                    1, WIDTH, kv_heads, group, STAGES, HEAD_BAND,
                ),
            ),
            (
                _load_queries,
                (
                    q_desc, do_desc, k_desc, v_desc, lse_desc, delta_desc,
                    q_bufs, do_bufs, kv_bufs, stat_bufs, kv_full.index(0), kv_empty.index(0), full, empty,
                    counter_ptr, slots, drawn, taken, cu_ptr, samples, tiles,
                    kv_heads, group, STAGES, HEAD_BAND,
                ),
            ),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
