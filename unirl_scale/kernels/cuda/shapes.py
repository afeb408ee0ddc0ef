"""Argument checks shared by the CUDA ops: a wrong shape or dtype raises before any kernel is launched."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from unirl_scale.core.errors import ShapeError
from unirl_scale.kernels.cuda.attention import query_block

ACTIVATION_DTYPES = (torch.bfloat16, torch.float32)
MAX_HEAD_DIM = 256


def expect(condition: bool, op: str, rule: str, *tensors: Tensor) -> None:
    """Raise ShapeError naming the op, what it got and the rule, unless `condition` holds."""
    if not condition:
        got = ", ".join(f"{list(t.shape)} {str(t.dtype).removeprefix('torch.')}" for t in tensors)
        raise ShapeError(f"{op}: got {got}; {rule}")


def expect_dtype(op: str, *tensors: Tensor) -> None:
    """All of one activation dtype: fp32 or bf16."""
    expect(
        tensors[0].dtype in ACTIVATION_DTYPES and all(t.dtype == tensors[0].dtype for t in tensors),
        op,
        "takes fp32 or bf16, the same for all.\nhint: cast to the run's `precision` first",
        *tensors,
    )


def expect_fp32(op: str, *tensors: Tensor) -> None:
    """All fp32 and contiguous."""
    expect(
        all(t.dtype == torch.float32 and t.is_contiguous() for t in tensors),
        op,
        "takes contiguous fp32 tensors",
        *tensors,
    )


def expect_delta(op: str, x: Tensor, delta: Tensor) -> None:
    """delta of x's shape, and of its dtype or fp32: the root of a sum, not rounded yet."""
    expect_dtype(op, x)
    fits = delta.shape == x.shape and delta.dtype in (x.dtype, torch.float32)
    expect(fits, op, "takes two tensors of one shape, the second of the first's dtype or fp32", x, delta)


def expect_rope_to_pages(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    slots: Tensor,
) -> None:
    """As OpTable.rope_to_pages; pages lie end to end, whatever the strides of k and v."""
    op = "rope_to_pages"
    expect_dtype(op, q, k, v, k_pages, v_pages)
    expect_fp32(f"{op} (cos, sin)", cos, sin)
    fits = (
        q.dim() == 3
        and q.shape[2] % 2 == 0
        and k.shape == v.shape == (q.shape[0], k.shape[1], q.shape[2])
        and cos.shape == sin.shape == (q.shape[0], q.shape[2] // 2)
        and k_pages.dim() == 4
        and k_pages.shape == v_pages.shape
        and k_pages.shape[2:] == k.shape[1:]
        and slots.shape == q.shape[:1]
        and slots.dtype == torch.int64
    )
    expect(
        fits, op, "q [B, h, d], k and v [B, hk, d], pages [P, page, hk, d], slots [B]", q, k, k_pages, slots
    )
    dense = all(t.stride(-1) == 1 and t.stride(0) == t.shape[1] * t.stride(1) for t in (k_pages, v_pages))
    last = q.stride(2) == k.stride(2) == v.stride(2) == 1 and slots.is_contiguous()
    expect(dense and last, op, "takes pages that lie end to end, contiguous d and slots", q, k, k_pages)


def expect_attention(op: str, q: Tensor, k: Tensor, v: Tensor) -> None:
    """q [T, h, d], k and v [T, hk, d] with hk dividing h."""
    fits = (
        q.dim() == 3 and k.shape == v.shape and k.shape[::2] == q.shape[::2] and q.shape[1] % k.shape[1] == 0
    )
    expect(fits, op, "q [T, h, d], k and v [T, hk, d] with hk dividing h", q, k, v)
    expect_heads(op, q, k, v)


def expect_heads(op: str, q: Tensor, k: Tensor, v: Tensor) -> None:
    """Dtype, head size and group size that the attention kernels take; the head dim is contiguous."""
    expect_dtype(op, q, k, v)
    limit = query_block(q.dtype)
    fits = q.shape[-1] <= MAX_HEAD_DIM and q.shape[1] // k.shape[-2] <= limit
    expect(
        fits and q.stride(-1) == k.stride(-1) == v.stride(-1) == 1,
        op,
        f"takes d <= {MAX_HEAD_DIM}, at most {limit} query heads a kv head and contiguous d",
        q,
        k,
        v,
    )


def expect_vocab(op: str, logits: Tensor, leaves: int, valid: Sequence[int], targets: Tensor) -> None:
    """logits fp32 [T, L*v], valid columns of each of L leaves, targets [T]."""
    expect_fp32(op, logits)
    fits = (
        logits.dim() == 2
        and len(valid) == leaves
        and logits.shape[1] % leaves == 0
        and all(0 <= n <= logits.shape[1] // leaves for n in valid)
        and targets.shape == logits.shape[:1]
    )
    rule = f"takes logits [T, L*v] for L = {leaves} leaves of valid columns {list(valid)}, targets [T]"
    expect(fits, op, rule, logits, targets)
