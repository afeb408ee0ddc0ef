"""Backward of causal attention for Hopper, bf16, head sizes 64 and 128, with the bits of attention_dx.py.

The same two passes, each with a producer warp and two consumer warpgroups of 64 rows. Products of a block
stay in flight while the next block's scores start.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from unirl_scale.kernels.cuda.attention import LOG2_E
from unirl_scale.kernels.cuda.attention_dx import row_stats
from unirl_scale.kernels.cuda.device import Device
from unirl_scale.kernels.cuda.hopper_attention import heads_first, zero_rows_from
from unirl_scale.kernels.cuda.hopper_gemm import shared_layout
from unirl_scale.kernels.cuda.hopper_tiles import banded, draw_tile, head_band, take_tile
from unirl_scale.kernels.spans import Spans

HALF = 64
BLOCK = 2 * HALF  # rows a program owns
KV_BLOCK = 128  # rows of K and V a step of the dq pass


@gluon.jit
def _stat_start(start, sample):
    """attention_dx.stat_start: the copy engine takes boxes that begin at multiples of 16 bytes only."""
    return (start + 3) // 4 * 4 + 4 * sample


@gluon.jit
def _store_rows(out_ptr, values, start, first, length, heads, head, WIDTH: gl.constexpr):
    """values fp32 [64, WIDTH] -> rows first.. of this sample and head, those inside the sample only."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 // (WIDTH // 8), WIDTH // 8], [4, 1], [1, 0])
    rounded = gl.convert_layout(values.to(gl.bfloat16), layout)
    row = first + gl.arange(0, 64, layout=gl.SliceLayout(1, layout))
    dim = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, layout))
    at = ((start + row).to(gl.int64) * heads + head) * WIDTH
    gl.store(out_ptr + at.expand_dims(1) + dim.expand_dims(0), rounded, mask=(row < length).expand_dims(1))


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
            stats = _stat_start(start, sample)
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
            _store_rows(dk_ptr, dk * scale, start, first, length, kv_heads, kv_head, WIDTH)
            _store_rows(dv_ptr, dv, start, first, length, kv_heads, kv_head, WIDTH)
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
    kv_bars = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(kv_bars.index(0), count=1)
    mbarrier.init(kv_bars.index(1), count=2)
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), count=1)
        mbarrier.init(empty.index(s), count=2)
    slots = gl.allocate_shared_memory(gl.int32, [2, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    drawn = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    taken = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(2):
        mbarrier.init(drawn.index(s), count=1)
        mbarrier.init(taken.index(s), count=2)
    gl.warp_specialize(
        [
            (
                _accumulate_dkv,
                (
                    q_bufs, do_bufs, kv_bufs, stat_bufs, kv_bars.index(0), kv_bars.index(1), full, empty,
                    dk_ptr, dv_ptr, slots, drawn, taken, cu_ptr, samples, tiles, scale, scale_log2,
                    0, WIDTH, kv_heads, group, STAGES, HEAD_BAND,
                ),
            ),
            (
                _accumulate_dkv,
                (
                    q_bufs, do_bufs, kv_bufs, stat_bufs, kv_bars.index(0), kv_bars.index(1), full, empty,
                    dk_ptr, dv_ptr, slots, drawn, taken, cu_ptr, samples, tiles, scale, scale_log2,
                    1, WIDTH, kv_heads, group, STAGES, HEAD_BAND,
                ),
            ),
            (
                _load_queries,
                (
                    q_desc, do_desc, k_desc, v_desc, lse_desc, delta_desc,
                    q_bufs, do_bufs, kv_bufs, stat_bufs, kv_bars.index(0), kv_bars.index(1), full, empty,
                    counter_ptr, slots, drawn, taken, cu_ptr, samples, tiles,
                    kv_heads, group, STAGES, HEAD_BAND,
                ),
            ),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


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
            stat = head.to(gl.int64) * padded + _stat_start(start, sample) + row
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
            _store_rows(dq_ptr, dq * scale, start, first, length, heads, head, WIDTH)
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
    q_bars = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(q_bars.index(0), count=1)
    mbarrier.init(q_bars.index(1), count=2)
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), count=1)
        mbarrier.init(empty.index(s), count=2)
    slots = gl.allocate_shared_memory(gl.int32, [2, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    drawn = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    taken = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(2):
        mbarrier.init(drawn.index(s), count=1)
        mbarrier.init(taken.index(s), count=2)
    gl.warp_specialize(
        [
            (
                _accumulate_dq,
                (
                    q_bufs, k_bufs, v_bufs, q_bars.index(0), q_bars.index(1), full, empty,
                    lse_ptr, delta_ptr, dq_ptr, slots, drawn, taken, cu_ptr, samples, tiles, padded,
                    scale, scale_log2,
                    0, WIDTH, heads, BLOCK_N, STAGES, HEAD_BAND,
                ),
            ),
            (
                _accumulate_dq,
                (
                    q_bufs, k_bufs, v_bufs, q_bars.index(0), q_bars.index(1), full, empty,
                    lse_ptr, delta_ptr, dq_ptr, slots, drawn, taken, cu_ptr, samples, tiles, padded,
                    scale, scale_log2,
                    1, WIDTH, heads, BLOCK_N, STAGES, HEAD_BAND,
                ),
            ),
            (
                _load_keys,
                (
                    q_desc, do_desc, k_desc, v_desc, q_bufs, k_bufs, v_bufs, q_bars.index(0), q_bars.index(1),
                    full, empty, counter_ptr, slots, drawn, taken, cu_ptr, samples, tiles,
                    heads, group, BLOCK_N, STAGES, HEAD_BAND,
                ),
            ),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


def _stat_rows(stat: Tensor) -> TensorDescriptor:
    layout = shared_layout((1, HALF), stat.dtype)
    return TensorDescriptor(stat, list(stat.shape), [stat.stride(0), 1], [1, HALF], layout)


def attention_dx(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    spans: Spans,
    scale: float,
    *,
    device: Device,
) -> tuple[Tensor, Tensor, Tensor]:
    """attention_dx.attention_dx for bf16 and d of 64 or 128."""
    tokens, heads, width = q.shape
    kv_heads = k.shape[1]
    group = heads // kv_heads
    dq = torch.empty(tokens, heads, width, dtype=q.dtype, device=q.device)
    dk, dv = (torch.empty(tokens, kv_heads, width, dtype=q.dtype, device=q.device) for _ in range(2))
    if spans.max_length == 0:
        return dq, dk, dv
    delta, lse2 = row_stats(o, do, lse, spans)
    samples, longest = len(spans), spans.max_length
    counters = torch.zeros(2, dtype=torch.int32, device=q.device)
    tiles = triton.cdiv(longest, BLOCK)
    attention_dkv_kernel[(min(device.programs, tiles * kv_heads * samples),)](
        heads_first(q, HALF), heads_first(do, HALF), heads_first(k, HALF), heads_first(v, HALF),
        _stat_rows(lse2), _stat_rows(delta),
        dk, dv, counters, spans.cu_seqlens, samples, tiles, scale, scale * LOG2_E,
        kv_heads=kv_heads, group=group, STAGES=3 if width == 128 else 6,
        HEAD_BAND=head_band(kv_heads, 1, 2 * width * group, longest, device.l2_bytes),
        num_warps=4, maxnreg=168,
    )  # fmt: skip
    attention_dq_kernel[(min(device.programs, tiles * heads * samples),)](
        heads_first(q, HALF), heads_first(do, HALF), heads_first(k, KV_BLOCK), heads_first(v, KV_BLOCK),
        lse2, delta, dq, counters[1:], spans.cu_seqlens, samples, tiles, delta.stride(0),
        scale, scale * LOG2_E,
        heads=heads, group=group, STAGES=2 if width == 128 else 4,
        HEAD_BAND=head_band(heads, group, 2 * width, longest, device.l2_bytes),
        num_warps=4, maxnreg=168,
    )  # fmt: skip
    return dq, dk, dv
