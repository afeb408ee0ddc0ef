"""Vocabulary-parallel log-softmax, its gradient, and the gradient of an embedding table."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

WHOLE_LEAF = 16384  # widest leaf that a program holds in registers
BLOCK = 4096  # columns it holds of a wider one
GRAD_BLOCK = 4096
EMBEDDING_BLOCK = 512


@triton.jit
def vocab_stats_kernel(
    logits_ptr, valid_ptr, targets_ptr, stats_ptr, picked_ptr, width, leaves,
    WHOLE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program a (row, leaf). A leaf that fits in registers is read once, a wider one in two passes."""
    row, leaf = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns = tl.load(valid_ptr + leaf)
    base = logits_ptr + (row * leaves + leaf) * width
    col = tl.arange(0, BLOCK)
    tops = tl.load(base + col, mask=col < columns, other=float("-inf"))
    if not WHOLE:
        for start in range(BLOCK, columns, BLOCK):
            x = tl.load(base + start + col, mask=col < columns - start, other=float("-inf"))
            tops = tl.maximum(tops, x)
    top = tl.max(tops, axis=0)
    if WHOLE:
        shifted = tl.where(col < columns, tops - top, 0.0)
        sums = tl.where(col < columns, tl.exp(shifted), 0.0)
        weighted = sums * shifted
    else:
        sums = tl.zeros((BLOCK,), tl.float32)
        weighted = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, columns, BLOCK):
            mask = col < columns - start
            shifted = tl.load(base + start + col, mask=mask, other=0.0) - top
            e = tl.where(mask, tl.exp(shifted), 0.0)
            sums += e
            weighted += tl.where(mask, e * shifted, 0.0)
    out = stats_ptr + (row * leaves + leaf) * 3
    tl.store(out, top)
    tl.store(out + 1, tl.sum(sums, axis=0))
    tl.store(out + 2, tl.sum(weighted, axis=0))
    if leaf == 0:
        target = tl.load(targets_ptr + row)
        at = logits_ptr + row * leaves * width + target
        tl.store(picked_ptr + row, tl.load(at, mask=target >= 0, other=0.0))


@triton.jit
def vocab_dlogits_kernel(
    logits_ptr, valid_ptr, targets_ptr, lse_ptr, entropy_ptr, grad_logprob_ptr, grad_entropy_ptr, out_ptr,
    width, leaves, scale, SCALED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, leaf = tl.program_id(0).to(tl.int64), tl.program_id(1)
    col = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    at = (row * leaves + leaf) * width + col
    x = tl.load(logits_ptr + at, mask=col < width, other=0.0)
    logp = x - tl.load(lse_ptr + row)
    p = tl.exp(logp)
    hot = tl.where(leaf * width + col == tl.load(targets_ptr + row), 1.0, 0.0)
    grad = tl.load(grad_logprob_ptr + row) * (hot - p)
    grad -= tl.load(grad_entropy_ptr + row) * (p * (logp + tl.load(entropy_ptr + row)))
    if SCALED:
        grad *= scale
    grad = tl.where(col < tl.load(valid_ptr + leaf), grad, 0.0)
    tl.store(out_ptr + at, grad.to(out_ptr.dtype.element_ty), mask=col < width)


@triton.jit
def embedding_dw_kernel(
    dy_ptr, ids_ptr, order_ptr, stop_ptr, out_ptr, width, dy_row, BLOCK: tl.constexpr
):  # fmt: skip
    """The first program of a run of equal ids adds the run's rows, in token order, onto its row of out."""
    at = tl.program_id(0)
    row = tl.load(ids_ptr + at)
    before = tl.load(ids_ptr + at - 1, mask=at > 0, other=-1)
    if (row >= 0) & (row != before):
        col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        mask = col < width
        total = tl.load(out_ptr + row * width + col, mask=mask, other=0.0)
        for i in range(at, tl.load(stop_ptr + at).to(tl.int32)):
            token = tl.load(order_ptr + i)
            total += tl.load(dy_ptr + token * dy_row + col, mask=mask, other=0.0).to(tl.float32)
        tl.store(out_ptr + row * width + col, total, mask=mask)


def vocab_stats(logits: Tensor, valid: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """logits fp32 [T, L*v], valid int32 [L] -> (stats fp32 [T, L, 3], target logit fp32 [T])."""
    rows, leaves = logits.shape[0], valid.shape[0]
    stats = torch.empty(rows, leaves, 3, dtype=torch.float32, device=logits.device)
    picked = torch.empty(rows, dtype=torch.float32, device=logits.device)
    if rows:
        width = logits.shape[1] // leaves
        # The order of the sums follows from the width of a leaf, which no layout changes.
        whole = width <= WHOLE_LEAF
        block = triton.next_power_of_2(width) if whole else BLOCK
        vocab_stats_kernel[(rows, leaves)](
            logits, valid, targets, stats, picked, width, leaves,
            WHOLE=whole, BLOCK=block, num_warps=4 if block <= 4096 else 8 if block <= 8192 else 16,
        )  # fmt: skip
    return stats, picked


def vocab_dlogits(
    logits: Tensor,
    valid: Tensor,
    targets: Tensor,
    lse: Tensor,
    entropy: Tensor,
    grad_logprob: Tensor,
    grad_entropy: Tensor,
    scale: float,
    dtype: torch.dtype,
) -> Tensor:
    """-> dtype [T, L*v]; see OpTable.vocab_dlogits."""
    rows, leaves = logits.shape[0], valid.shape[0]
    out = torch.empty_like(logits, dtype=dtype)
    if rows:
        width = logits.shape[1] // leaves
        vocab_dlogits_kernel[(rows, leaves, triton.cdiv(width, GRAD_BLOCK))](
            logits, valid, targets, lse, entropy, grad_logprob, grad_entropy, out, width, leaves,
            scale, SCALED=scale != 1.0, BLOCK=GRAD_BLOCK, num_warps=8,
        )  # fmt: skip
    return out


def valid_columns(valid: Sequence[int], device: torch.device) -> Tensor:
    """The real columns of each leaf as int32 on the device."""
    return torch.tensor(list(valid), dtype=torch.int32).to(device)


def embedding_dw(dy: Tensor, ids: Tensor, out: Tensor) -> None:
    """out[ids[t]] += dy[t] in token order. The stable sort keeps equal ids in that order; no atomics."""
    tokens, width = dy.shape
    if tokens:
        ordered, order = torch.sort(ids, stable=True)
        stop = torch.searchsorted(ordered, ordered, right=True)
        grid = (tokens, triton.cdiv(width, EMBEDDING_BLOCK))
        embedding_dw_kernel[grid](
            dy, ordered, order, stop, out, width, dy.stride(0), BLOCK=EMBEDDING_BLOCK, num_warps=4
        )
