"""Causal attention forward for Hopper, bf16, head sizes 64 and 128, with the bits of attention.py.

Each program takes 128 query rows, 64 a consumer warpgroup, while a producer warp streams KV blocks. A
consumer starts the scores of the next block before it adds the current one, so that exponentials overlap
tensor-core work (Shah et al. 2024); the sums are those of `attention.online_step`, in the same order.
"""

from __future__ import annotations

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

from unirl_scale.kernels.cuda.attention import LOG2_E, kv_block
from unirl_scale.kernels.cuda.device import Device
from unirl_scale.kernels.cuda.hopper_gemm import REGISTERS, shared_layout
from unirl_scale.kernels.cuda.hopper_tiles import banded, draw_tile, head_band, ring, take_tile, tile_slots
from unirl_scale.kernels.spans import Spans

WIDTHS = (64, 128)
HALF = 64
BLOCK_M = 2 * HALF


@gluon.jit
def _load_blocks(
    q_desc, k_desc, v_desc, q_bufs, k_bufs, v_bufs, q_full, q_empty, k_full, k_empty, v_full, v_empty,
    counter_ptr, slots, drawn, taken, cu_ptr, samples, tiles, heads,
    group: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, HEAD_BAND: gl.constexpr,
):  # fmt: skip
    """Producer: q once a tile, then K and V block by block."""
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
        first = (tiles - 1 - rank) * 128  # longest first
        if first < length:
            mbarrier.wait(q_empty, (done & 1) ^ 1)
            mbarrier.expect(q_full, 2 * q_desc.block_type.nbytes)
            tma.async_copy_global_to_shared(q_desc, [head, start + first, 0], q_full, q_bufs.index(0))
            tma.async_copy_global_to_shared(q_desc, [head, start + first + 64, 0], q_full, q_bufs.index(1))
            done += 1
            for j in range(0, min(first + 128, length), BLOCK_N):
                slot = i % STAGES
                phase = (i // STAGES & 1) ^ 1
                mbarrier.wait(k_empty.index(slot), phase)
                mbarrier.expect(k_full.index(slot), k_desc.block_type.nbytes)
                tma.async_copy_global_to_shared(
                    k_desc, [head // group, start + j, 0], k_full.index(slot), k_bufs.index(slot)
                )
                mbarrier.wait(v_empty.index(slot), phase)
                mbarrier.expect(v_full.index(slot), v_desc.block_type.nbytes)
                tma.async_copy_global_to_shared(
                    v_desc, [head // group, start + j, 0], v_full.index(slot), v_bufs.index(slot)
                )
                i += 1
        turn += 1
        tile = draw_tile(counter_ptr, slots, drawn, taken, turn)


@gluon.jit
def _probabilities(scores, top, total, scale_log2, o_layout: gl.constexpr):
    """Online softmax of a block -> (p bf16 as an operand, new top, new sum, factor of the old acc)."""
    new_top = gl.maximum(top, gl.max(scores, 1) * scale_log2)
    p = gl.exp2(scores * scale_log2 - new_top.expand_dims(1))
    shrink = gl.exp2(top - new_top)
    total = total * shrink + gl.sum(p, 1)
    operand: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    return gl.convert_layout(p.to(gl.bfloat16), operand), new_top, total, shrink


@gluon.jit
def zero_rows_from(buf, rows, BLOCK_N: gl.constexpr, WIDTH: gl.constexpr):
    """Zero the rows of a [BLOCK_N, WIDTH] tile that belong to the next sample: 0 * NaN would be NaN."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 // (WIDTH // 8), WIDTH // 8], [4, 1], [1, 0])
    row = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, layout)).expand_dims(1)
    values = buf.load(layout)
    buf.store(gl.where(row < rows, values, gl.zeros_like(values)))
    fence_async_shared()


@gluon.jit
def stat_start(start, sample):
    """attention_dx.stat_start: the copy engine takes boxes that begin at multiples of 16 bytes only."""
    return (start + 3) // 4 * 4 + 4 * sample


@gluon.jit
def store_rows(out_ptr, values, start, first, length, heads, head, WIDTH: gl.constexpr):
    """values fp32 [64, WIDTH] -> rows first.. of this sample and head, those inside the sample only."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 // (WIDTH // 8), WIDTH // 8], [4, 1], [1, 0])
    rounded = gl.convert_layout(values.to(gl.bfloat16), layout)
    row = first + gl.arange(0, 64, layout=gl.SliceLayout(1, layout))
    dim = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, layout))
    at = ((start + row).to(gl.int64) * heads + head) * WIDTH
    gl.store(out_ptr + at.expand_dims(1) + dim.expand_dims(0), rounded, mask=(row < length).expand_dims(1))


@gluon.jit
def _attend(
    q_bufs, k_bufs, v_bufs, q_full, q_empty, k_full, k_empty, v_full, v_empty, o_ptr, lse_ptr,
    slots, drawn, taken, cu_ptr, samples, tiles, heads, scale_log2,
    HALF_INDEX: gl.constexpr, BLOCK_N: gl.constexpr, WIDTH: gl.constexpr, STAGES: gl.constexpr,
    HEAD_BAND: gl.constexpr,
):  # fmt: skip
    """Consumer of 64 query rows."""
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    row_layout: gl.constexpr = gl.SliceLayout(1, s_layout)
    q = q_bufs.index(HALF_INDEX).reshape([64, WIDTH])
    i = 0
    done = 0
    turn = 0
    tile = take_tile(slots, drawn, taken, turn)
    while tile < tiles * heads * samples:
        rank, flat_head = banded(tile, tiles, HEAD_BAND)
        q_tile = tiles - 1 - rank
        sample = flat_head // heads
        head = flat_head % heads
        start = gl.load(cu_ptr + sample)
        length = gl.load(cu_ptr + sample + 1) - start
        first = q_tile * 128 + HALF_INDEX * 64
        if q_tile * 128 < length:
            blocks = (min(q_tile * 128 + 128, length) + BLOCK_N - 1) // BLOCK_N
            row = first + gl.arange(0, 64, layout=row_layout)
            col = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, s_layout))
            top = gl.full([64], float("-inf"), gl.float32, row_layout)
            total = gl.zeros([64], gl.float32, row_layout)
            acc = gl.zeros([64, WIDTH], gl.float32, o_layout)
            zeros = gl.zeros([64, BLOCK_N], gl.float32, s_layout)

            mbarrier.wait(q_full, done & 1)
            slot = i % STAGES
            mbarrier.wait(k_full.index(slot), i // STAGES & 1)
            k = k_bufs.index(slot).reshape([BLOCK_N, WIDTH]).permute((1, 0))
            scores = warpgroup_mma(q, k, zeros, use_acc=False, is_async=True)
            scores = warpgroup_mma_wait(0, (scores,))
            mbarrier.arrive(k_empty.index(slot))
            if blocks == 1:
                scores = gl.where(col.expand_dims(0) <= row.expand_dims(1), scores, float("-inf"))
            p, top, total, shrink = _probabilities(scores, top, total, scale_log2, o_layout)
            for j in range(1, blocks):
                old = i % STAGES
                old_phase = i // STAGES & 1
                i += 1
                slot = i % STAGES
                mbarrier.wait(k_full.index(slot), i // STAGES & 1)
                k = k_bufs.index(slot).reshape([BLOCK_N, WIDTH]).permute((1, 0))
                scores = warpgroup_mma(q, k, zeros, use_acc=False, is_async=True)
                mbarrier.wait(v_full.index(old), old_phase)
                v = v_bufs.index(old).reshape([BLOCK_N, WIDTH])
                acc = warpgroup_mma(p, v, acc, use_acc=j > 1, is_async=True)
                scores = warpgroup_mma_wait(1, (scores,))
                mbarrier.arrive(k_empty.index(slot))
                if j == blocks - 1:
                    scores = gl.where(
                        (j * BLOCK_N + col).expand_dims(0) <= row.expand_dims(1), scores, float("-inf")
                    )
                next_p, top, total, shrink = _probabilities(scores, top, total, scale_log2, o_layout)
                # p stays an operand of the product in flight until here.
                acc, p = warpgroup_mma_wait(0, (acc, p))
                mbarrier.arrive(v_empty.index(old))
                p = next_p
                acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, o_layout)).expand_dims(1)
            mbarrier.arrive(q_empty)
            slot = i % STAGES
            mbarrier.wait(v_full.index(slot), i // STAGES & 1)
            v = v_bufs.index(slot).reshape([BLOCK_N, WIDTH])
            if length < blocks * BLOCK_N:
                zero_rows_from(v, length - (blocks - 1) * BLOCK_N, BLOCK_N, WIDTH)
            acc = warpgroup_mma(p, v, acc, use_acc=blocks > 1, is_async=True)
            acc, p = warpgroup_mma_wait(0, (acc, p))
            mbarrier.arrive(v_empty.index(slot))
            i += 1
            done += 1

            o = acc / gl.convert_layout(total, gl.SliceLayout(1, o_layout)).expand_dims(1)
            store_rows(o_ptr, o, start, first, length, heads, head, WIDTH)
            lse = (top + gl.log2(total)) * 0.6931471805599453
            gl.store(lse_ptr + (start + row).to(gl.int64) * heads + head, lse, mask=row < length)
        turn += 1
        tile = take_tile(slots, drawn, taken, turn)


@gluon.jit(do_not_specialize=["samples", "tiles"])
def attention_kernel(
    q_desc, k_desc, v_desc, o_ptr, lse_ptr, counter_ptr, cu_ptr, samples, tiles, scale_log2,
    heads: gl.constexpr, group: gl.constexpr, STAGES: gl.constexpr, HEAD_BAND: gl.constexpr,
):  # fmt: skip
    BLOCK_N: gl.constexpr = k_desc.block_type.shape[1]
    WIDTH: gl.constexpr = k_desc.block_type.shape[2]
    q_bufs = gl.allocate_shared_memory(q_desc.dtype, [2, 1, 64, WIDTH], q_desc.layout)
    k_bufs = gl.allocate_shared_memory(k_desc.dtype, [STAGES, 1, BLOCK_N, WIDTH], k_desc.layout)
    v_bufs = gl.allocate_shared_memory(v_desc.dtype, [STAGES, 1, BLOCK_N, WIDTH], v_desc.layout)
    q_full, q_empty = ring(1)
    k_full, k_empty = ring(STAGES)
    v_full, v_empty = ring(STAGES)
    slots, drawn, taken = tile_slots()
    gl.warp_specialize(
        [
            (
                _attend,
                (
                    q_bufs, k_bufs, v_bufs,
                    q_full.index(0), q_empty.index(0), k_full, k_empty, v_full, v_empty,
                    o_ptr, lse_ptr, slots, drawn, taken, cu_ptr, samples, tiles, heads, scale_log2,
                    0, BLOCK_N, WIDTH, STAGES, HEAD_BAND,
                ),
            ),
            (
                _attend,
                (
                    q_bufs, k_bufs, v_bufs,
                    q_full.index(0), q_empty.index(0), k_full, k_empty, v_full, v_empty,
                    o_ptr, lse_ptr, slots, drawn, taken, cu_ptr, samples, tiles, heads, scale_log2,
                    1, BLOCK_N, WIDTH, STAGES, HEAD_BAND,
                ),
            ),
            (
                _load_blocks,
                (
                    q_desc, k_desc, v_desc, q_bufs, k_bufs, v_bufs, q_full.index(0), q_empty.index(0),
                    k_full, k_empty, v_full, v_empty, counter_ptr, slots, drawn, taken,
                    cu_ptr, samples, tiles, heads,
                    group, BLOCK_N, STAGES, HEAD_BAND,
                ),
            ),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


def heads_first(x: Tensor, rows: int) -> TensorDescriptor:
    """Descriptor of x [T, h, d] seen as [h, T, d], in blocks of `rows` tokens of one head."""
    block = [1, rows, x.shape[2]]
    layout = shared_layout(tuple(block), x.dtype)
    return TensorDescriptor(
        x, [x.shape[1], x.shape[0], x.shape[2]], [x.stride(1), x.stride(0), 1], block, layout
    )


def attention(
    q: Tensor, k: Tensor, v: Tensor, spans: Spans, scale: float, *, device: Device
) -> tuple[Tensor, Tensor]:
    """attention.attention for bf16 and d of 64 or 128."""
    tokens, heads, width = q.shape
    o = torch.empty(tokens, heads, width, dtype=q.dtype, device=q.device)
    lse = torch.empty(tokens, heads, dtype=torch.float32, device=q.device)
    if spans.max_length:
        group = heads // k.shape[1]
        block_n = kv_block(q.dtype, width)
        tiles = triton.cdiv(spans.max_length, BLOCK_M)
        counter = torch.zeros(1, dtype=torch.int32, device=q.device)
        attention_kernel[(min(device.programs, tiles * heads * len(spans)),)](
            heads_first(q, HALF), heads_first(k, block_n), heads_first(v, block_n),
            o, lse, counter, spans.cu_seqlens, len(spans), tiles, scale * LOG2_E,
            heads=heads, group=group, STAGES=2 if width == 128 else 4,
            HEAD_BAND=head_band(heads, group, 2 * width, spans.max_length, device.l2_bytes),
            num_warps=4, maxnreg=REGISTERS,
        )  # fmt: skip
    return o, lse
