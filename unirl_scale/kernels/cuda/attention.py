"""Causal attention of any head size, forward and decode, in one schedule of KV blocks from position 0.

A query row meets the KV blocks of its sample in order; each step rescales the running sum and adds one
block (online softmax: Milakov & Gimelshein 2018; Dao et al. 2022). Blocks have one size, so a row's
arithmetic depends on its position alone: a wholly masked block multiplies by exp2(0) = 1 and adds exact
zeros. Decode runs the same step with the query heads of a group as the rows of the tile, and so gives
training's bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from unirl_scale.kernels.cuda.chain import follow
from unirl_scale.kernels.spans import Spans

LOG2_E = 1.4426950408889634


def kv_block(dtype: torch.dtype, width: int) -> int:
    """Rows of a KV block, the one size that training, prefill and decode share."""
    if dtype == torch.float32:
        return 32
    return 128 if width <= 128 else 64


def query_block(dtype: torch.dtype) -> int:
    """Rows of a query tile: a tensor-core instruction is 64 high; fp32 has none."""
    return 64 if dtype == torch.bfloat16 else 32


@triton.jit
def online_step(acc, total, top, scores, v, scale_log2):
    """Absorb a KV block. scores fp32 [M, N], -inf where masked; v [N, D]; acc [M, D]; total, top [M]."""
    new_top = tl.maximum(top, tl.max(scores, 1) * scale_log2)
    p = tl.exp2(scores * scale_log2 - new_top[:, None])
    shrink = tl.exp2(top - new_top)
    total = total * shrink + tl.sum(p, 1)
    acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
    return acc, total, new_top


@triton.jit
def attention_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr, cu_ptr, scale_log2,
    q_token, q_head, k_token, k_head, v_token, v_head,
    heads: tl.constexpr, group: tl.constexpr, width: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One program a (query tile, head, sample); the longest tiles start first."""
    start = tl.load(cu_ptr + tl.program_id(2)).to(tl.int64)
    length = (tl.load(cu_ptr + tl.program_id(2) + 1).to(tl.int64) - start).to(tl.int32)
    head = tl.program_id(1)
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_M
    if first < length:
        row, col, dim = first + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
        q_at = q_ptr + (start + row)[:, None] * q_token + head * q_head + dim[None, :]
        q = tl.load(q_at, mask=(row < length)[:, None] & (dim < width)[None, :], other=0.0)
        k_at = k_ptr + (start + col)[:, None] * k_token + (head // group) * k_head + dim[None, :]
        v_at = v_ptr + (start + col)[:, None] * v_token + (head // group) * v_head + dim[None, :]
        acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
        total = tl.zeros((BLOCK_M,), tl.float32)
        top = tl.full((BLOCK_M,), float("-inf"), tl.float32)
        for j in range(0, tl.minimum(first + BLOCK_M, length), BLOCK_N):
            inside = (j + col < length)[:, None] & (dim < width)[None, :]
            k = tl.load(k_at, mask=inside, other=0.0)
            v = tl.load(v_at, mask=inside, other=0.0)
            scores = tl.dot(q, tl.trans(k), input_precision="ieee")
            scores = tl.where((j + col)[None, :] <= row[:, None], scores, float("-inf"))
            acc, total, top = online_step(acc, total, top, scores, v, scale_log2)
            k_at += BLOCK_N * k_token
            v_at += BLOCK_N * v_token
        o_at = o_ptr + ((start + row)[:, None] * heads + head) * width + dim[None, :]
        mask = (row < length)[:, None] & (dim < width)[None, :]
        tl.store(o_at, (acc / total[:, None]).to(o_ptr.dtype.element_ty), mask=mask)
        lse = (top + tl.log2(total)) * 0.6931471805599453
        tl.store(lse_ptr + (start + row) * heads + head, lse, mask=row < length)


@triton.jit
def cached_rows(
    table_ptr, first, col, length, page_stride, token_stride, PAGE: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    """Offsets of the cache rows of positions first + col. A tile is inside a page or made of whole pages, so
    a page is looked up once; those past `length` are not."""
    if PAGE >= BLOCK_N:
        page = tl.load(table_ptr + first // PAGE).to(tl.int64)
        return page * page_stride + (first % PAGE + col) * token_stride
    else:  # noqa: RET505 - not compiled when the condition holds
        start = tl.zeros((BLOCK_N,), tl.int64)
        for i in tl.static_range(BLOCK_N // PAGE):
            entry = table_ptr + first // PAGE + i
            page = tl.load(entry, mask=first + i * PAGE < length, other=0).to(tl.int64)
            start = tl.where(col // PAGE == i, page * page_stride, start)
        return start + (col % PAGE) * token_stride


@triton.jit
def attention_decode_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, table_ptr, lengths_ptr, scale_log2,
    q_token, q_head, table_row, page_stride, token_stride, head_stride,
    heads: tl.constexpr, group: tl.constexpr, width: tl.constexpr, PAGE: tl.constexpr, PDL: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One program a (kv head, sample); its rows are the query heads of the group."""
    if PDL:
        follow()
    batch = tl.program_id(1).to(tl.int64)
    kv_head = tl.program_id(0)
    length = tl.load(lengths_ptr + batch).to(tl.int32)
    row, col, dim = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    head = kv_head * group + row
    mask = (row < group)[:, None] & (dim < width)[None, :]
    q = tl.load(q_ptr + batch * q_token + head[:, None] * q_head + dim[None, :], mask=mask, other=0.0)
    k_at = k_ptr + kv_head * head_stride + dim[None, :]
    v_at = v_ptr + kv_head * head_stride + dim[None, :]
    table_at = table_ptr + batch * table_row
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    top = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    rows = cached_rows(table_at, 0, col, length, page_stride, token_stride, PAGE, BLOCK_N)
    for j in range(0, length, BLOCK_N):
        inside = j + col < length
        loaded = inside[:, None] & (dim < width)[None, :]
        # One tile ahead, so that no load of keys waits for the load of its page number.
        following = tl.minimum(j + BLOCK_N, (length - 1) // BLOCK_N * BLOCK_N)
        next_rows = cached_rows(table_at, following, col, length, page_stride, token_stride, PAGE, BLOCK_N)
        k = tl.load(k_at + rows[:, None], mask=loaded, other=0.0)
        v = tl.load(v_at + rows[:, None], mask=loaded, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        scores = tl.where(inside[None, :], scores, float("-inf"))
        acc, total, top = online_step(acc, total, top, scores, v, scale_log2)
        rows = next_rows
    o_at = o_ptr + (batch * heads + head)[:, None] * width + dim[None, :]
    tl.store(o_at, (acc / total[:, None]).to(o_ptr.dtype.element_ty), mask=mask)


def _blocks(q: Tensor) -> dict[str, int]:
    width = q.shape[2]
    return {
        "width": width,
        "BLOCK_M": query_block(q.dtype),
        "BLOCK_N": kv_block(q.dtype, width),
        "BLOCK_D": max(16, triton.next_power_of_2(width)),
        "num_warps": 4,
        "num_stages": 2,
    }


def attention(q: Tensor, k: Tensor, v: Tensor, spans: Spans, scale: float) -> tuple[Tensor, Tensor]:
    """q [T, h, d], k/v [T, hk, d], last dims contiguous -> (o [T, h, d], lse fp32 [T, h])."""
    tokens, heads, width = q.shape
    o = torch.empty(tokens, heads, width, dtype=q.dtype, device=q.device)
    lse = torch.empty(tokens, heads, dtype=torch.float32, device=q.device)
    if spans.max_length:
        blocks = _blocks(q)
        grid = (triton.cdiv(spans.max_length, blocks["BLOCK_M"]), heads, len(spans))
        attention_kernel[grid](
            q, k, v, o, lse, spans.cu_seqlens, scale * LOG2_E,
            q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1),
            heads=heads, group=heads // k.shape[1], **blocks,
        )  # fmt: skip
    return o, lse


def attention_decode(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    block_table: Tensor,
    lengths: Tensor,
    scale: float,
    *,
    pdl: bool,
) -> Tensor:
    """q [B, h, d], pages [P, page, hk, d] of equal strides, block_table int32 [B, N], lengths int64 [B]
    -> [B, h, d]."""
    batch, heads, width = q.shape
    o = torch.empty(batch, heads, width, dtype=q.dtype, device=q.device)
    if batch:
        _, page, kv_heads, _ = k_pages.shape
        attention_decode_kernel[(kv_heads, batch)](
            q, k_pages, v_pages, o, block_table, lengths, scale * LOG2_E,
            q.stride(0), q.stride(1), block_table.stride(0),
            k_pages.stride(0), k_pages.stride(1), k_pages.stride(2),
            heads=heads, group=heads // kv_heads, PAGE=page, PDL=pdl, launch_pdl=pdl,
            **(_blocks(q) | {"num_stages": 3}),  # tiles in flight; more would leave room for fewer programs
        )  # fmt: skip
    return o
