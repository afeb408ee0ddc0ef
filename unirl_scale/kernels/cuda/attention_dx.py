"""Backward of causal attention without atomics, so that neither heads nor batch can move a bit.

Two passes recompute the probabilities from lse (Dao et al. 2022): one owns a KV block and adds over the
query heads of its group and their query blocks, in that order; the other owns a query block and adds over
KV blocks. Seven block products instead of five is the price of a fixed order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from unirl_scale.kernels.cuda.attention import LOG2_E
from unirl_scale.kernels.spans import Spans


@triton.jit
def stat_start(start, sample):
    """Where a sample's row statistics begin: multiples of four, 16 bytes, which the copy engine asks for."""
    return (start + 3) // 4 * 4 + 4 * sample


@triton.jit(do_not_specialize=["padded"])
def row_stats_kernel(
    o_ptr, do_ptr, lse_ptr, delta_ptr, lse2_ptr, cu_ptr, padded,
    heads: tl.constexpr, width: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """delta = sum over d of o * do, and lse in powers of two; both head-major [h, padded]."""
    sample, head = tl.program_id(2), tl.program_id(1)
    start = tl.load(cu_ptr + sample).to(tl.int64)
    length = tl.load(cu_ptr + sample + 1).to(tl.int64) - start
    if tl.program_id(0) * ROWS < length:
        row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        dim = tl.arange(0, BLOCK_D)
        mask = (row < length)[:, None] & (dim < width)[None, :]
        at = ((start + row)[:, None] * heads + head) * width + dim[None, :]
        o = tl.load(o_ptr + at, mask=mask, other=0.0).to(tl.float32)
        do = tl.load(do_ptr + at, mask=mask, other=0.0).to(tl.float32)
        lse = tl.load(lse_ptr + (start + row) * heads + head, mask=row < length, other=0.0)
        out = head * padded + stat_start(start, sample) + row
        tl.store(delta_ptr + out, tl.sum(o * do, axis=1), mask=row < length)
        tl.store(lse2_ptr + out, lse * 1.4426950408889634, mask=row < length)


def row_stats(o: Tensor, do: Tensor, lse: Tensor, spans: Spans) -> tuple[Tensor, Tensor]:
    """o, do [T, h, d], lse fp32 [T, h] -> (delta, lse * log2(e)), fp32 [h, .], samples at `stat_start`."""
    tokens, heads, width = o.shape
    padded = triton.cdiv(tokens, 4) * 4 + 4 * len(spans)
    delta, lse2 = (torch.empty(heads, padded, dtype=torch.float32, device=o.device) for _ in range(2))
    block_d = max(16, triton.next_power_of_2(width))
    rows = max(1, 4096 // block_d)
    row_stats_kernel[(triton.cdiv(spans.max_length, rows), heads, len(spans))](
        o,
        do,
        lse,
        delta,
        lse2,
        spans.cu_seqlens,
        padded,
        heads=heads,
        width=width,
        ROWS=rows,
        BLOCK_D=block_d,
    )
    return delta, lse2


@triton.jit
def attention_dkv_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, lse2_ptr, delta_ptr, dk_ptr, dv_ptr, cu_ptr, padded, scale, scale_log2,
    q_token, q_head, k_token, k_head, v_token, v_head,
    heads: tl.constexpr, group: tl.constexpr, width: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One program a (KV block, kv head, sample). Tiles are transposed, [KV, query], so that p and ds feed the
    second products from registers."""
    start = tl.load(cu_ptr + tl.program_id(2)).to(tl.int64)
    length = (tl.load(cu_ptr + tl.program_id(2) + 1).to(tl.int64) - start).to(tl.int32)
    kv_head = tl.program_id(1)
    first = tl.program_id(0) * BLOCK_N
    if first < length:
        col, dim = first + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
        kv_mask = (col < length)[:, None] & (dim < width)[None, :]
        k_at = k_ptr + (start + col)[:, None] * k_token + kv_head * k_head + dim[None, :]
        v_at = v_ptr + (start + col)[:, None] * v_token + kv_head * v_head + dim[None, :]
        k = tl.load(k_at, mask=kv_mask, other=0.0)
        v = tl.load(v_at, mask=kv_mask, other=0.0)
        dk = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
        dv = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
        for head in range(kv_head * group, kv_head * group + group):
            for i in range(first // BLOCK_M * BLOCK_M, length, BLOCK_M):
                row = i + tl.arange(0, BLOCK_M)
                mask = (row < length)[:, None] & (dim < width)[None, :]
                q_at = q_ptr + (start + row)[:, None] * q_token + head * q_head + dim[None, :]
                do_at = do_ptr + ((start + row)[:, None] * heads + head) * width + dim[None, :]
                q = tl.load(q_at, mask=mask, other=0.0)
                do = tl.load(do_at, mask=mask, other=0.0)
                stat = head * padded + stat_start(start, tl.program_id(2)) + row
                lse = tl.load(lse2_ptr + stat, mask=row < length, other=float("inf"))
                delta = tl.load(delta_ptr + stat, mask=row < length, other=0.0)
                scores = tl.dot(k, tl.trans(q), input_precision="ieee")
                p = tl.exp2(scores * scale_log2 - lse[None, :])
                p = tl.where(col[:, None] <= row[None, :], p, 0.0)
                dv = tl.dot(p.to(do.dtype), do, dv, input_precision="ieee")
                dp = tl.dot(v, tl.trans(do), input_precision="ieee")
                ds = p * (dp - delta[None, :])
                dk = tl.dot(ds.to(q.dtype), q, dk, input_precision="ieee")
        out = ((start + col)[:, None] * (heads // group) + kv_head) * width + dim[None, :]
        tl.store(dk_ptr + out, (dk * scale).to(dk_ptr.dtype.element_ty), mask=kv_mask)
        tl.store(dv_ptr + out, dv.to(dv_ptr.dtype.element_ty), mask=kv_mask)


@triton.jit
def attention_dq_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, lse2_ptr, delta_ptr, dq_ptr, cu_ptr, padded, scale, scale_log2,
    q_token, q_head, k_token, k_head, v_token, v_head,
    heads: tl.constexpr, group: tl.constexpr, width: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One program a (query block, head, sample)."""
    start = tl.load(cu_ptr + tl.program_id(2)).to(tl.int64)
    length = (tl.load(cu_ptr + tl.program_id(2) + 1).to(tl.int64) - start).to(tl.int32)
    head = tl.program_id(1)
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_M
    if first < length:
        row, col, dim = first + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
        mask = (row < length)[:, None] & (dim < width)[None, :]
        q_at = q_ptr + (start + row)[:, None] * q_token + head * q_head + dim[None, :]
        out = ((start + row)[:, None] * heads + head) * width + dim[None, :]
        q = tl.load(q_at, mask=mask, other=0.0)
        do = tl.load(do_ptr + out, mask=mask, other=0.0)
        stat = head * padded + stat_start(start, tl.program_id(2)) + row
        lse = tl.load(lse2_ptr + stat, mask=row < length, other=float("inf"))
        delta = tl.load(delta_ptr + stat, mask=row < length, other=0.0)
        k_at = k_ptr + (start + col)[:, None] * k_token + (head // group) * k_head + dim[None, :]
        v_at = v_ptr + (start + col)[:, None] * v_token + (head // group) * v_head + dim[None, :]
        dq = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
        for j in range(0, tl.minimum(first + BLOCK_M, length), BLOCK_N):
            inside = (j + col < length)[:, None] & (dim < width)[None, :]
            k = tl.load(k_at, mask=inside, other=0.0)
            v = tl.load(v_at, mask=inside, other=0.0)
            scores = tl.dot(q, tl.trans(k), input_precision="ieee")
            p = tl.exp2(scores * scale_log2 - lse[:, None])
            p = tl.where((j + col)[None, :] <= row[:, None], p, 0.0)
            dp = tl.dot(do, tl.trans(v), input_precision="ieee")
            ds = p * (dp - delta[:, None])
            dq = tl.dot(ds.to(k.dtype), k, dq, input_precision="ieee")
            k_at += BLOCK_N * k_token
            v_at += BLOCK_N * v_token
        tl.store(dq_ptr + out, (dq * scale).to(dq_ptr.dtype.element_ty), mask=mask)


def attention_dx(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, spans: Spans, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """-> (dq [T, h, d], dk, dv [T, hk, d]). do, o, lse are contiguous; q, k, v have a contiguous last dim."""
    tokens, heads, width = q.shape
    kv_heads = k.shape[1]
    dq = torch.empty(tokens, heads, width, dtype=q.dtype, device=q.device)
    dk, dv = (torch.empty(tokens, kv_heads, width, dtype=q.dtype, device=q.device) for _ in range(2))
    if spans.max_length == 0:
        return dq, dk, dv
    delta, lse2 = row_stats(o, do, lse, spans)
    block_d = max(16, triton.next_power_of_2(width))
    block = 64 if q.dtype == torch.bfloat16 else 32
    strides = (q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1))
    tile = {"heads": heads, "group": heads // kv_heads, "width": width, "BLOCK_M": block, "BLOCK_D": block_d}
    shared = (spans.cu_seqlens, delta.stride(0), scale, scale * LOG2_E, *strides)
    blocks = triton.cdiv(spans.max_length, block)
    attention_dkv_kernel[(blocks, kv_heads, len(spans))](
        q, k, v, do, lse2, delta, dk, dv, *shared, BLOCK_N=block, **tile, num_warps=4, num_stages=2
    )
    attention_dq_kernel[(blocks, heads, len(spans))](
        q, k, v, do, lse2, delta, dq, *shared, BLOCK_N=block, **tile, num_warps=4, num_stages=2
    )
    return dq, dk, dv
