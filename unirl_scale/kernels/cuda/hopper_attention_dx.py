"""Backward of causal attention for Hopper, bf16, head sizes 64 and 128, with the bits of attention_dx.py.

The same two passes, each with a producer warp and two consumer warpgroups of 64 rows.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from unirl_scale.kernels.cuda.attention import LOG2_E
from unirl_scale.kernels.cuda.attention_dx import row_stats
from unirl_scale.kernels.cuda.device import Device
from unirl_scale.kernels.cuda.hopper_attention import heads_first
from unirl_scale.kernels.cuda.hopper_attention_dkv import attention_dkv_kernel
from unirl_scale.kernels.cuda.hopper_attention_dq import attention_dq_kernel
from unirl_scale.kernels.cuda.hopper_gemm import REGISTERS, shared_layout
from unirl_scale.kernels.cuda.hopper_tiles import head_band
from unirl_scale.kernels.spans import Spans

HALF = 64
BLOCK = 2 * HALF  # rows a program owns
KV_BLOCK = 128  # rows of K and V a step of the dq pass


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
        num_warps=4, maxnreg=REGISTERS,
    )  # fmt: skip
    attention_dq_kernel[(min(device.programs, tiles * heads * samples),)](
        heads_first(q, HALF), heads_first(do, HALF), heads_first(k, KV_BLOCK), heads_first(v, KV_BLOCK),
        lse2, delta, dq, counters[1:], spans.cu_seqlens, samples, tiles, delta.stride(0),
        scale, scale * LOG2_E,
        heads=heads, group=group, STAGES=2 if width == 128 else 4,
        HEAD_BAND=head_band(heads, group, 2 * width, longest, device.l2_bytes),
        num_warps=4, maxnreg=REGISTERS,
    )  # fmt: skip
    return dq, dk, dv
