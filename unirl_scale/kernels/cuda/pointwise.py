"""RoPE and SwiGLU: fp32 inside, one rounding at the result."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

ROPE_ELEMENTS = 2048
SWIGLU_BLOCK = 1024


@triton.jit(do_not_specialize=["tokens"])
def rope_kernel(
    x_ptr, cos_ptr, sin_ptr, y_ptr, tokens, x_token, x_head,
    heads: tl.constexpr, half: tl.constexpr, INVERSE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Rows are (token, head) pairs; one program rotates ROWS of them."""
    pair = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    col = tl.arange(0, BLOCK)
    token, head = pair // heads, pair % heads
    mask = (token < tokens)[:, None] & (col < half)[None, :]
    angle = token[:, None] * half + col[None, :]
    c = tl.load(cos_ptr + angle, mask=mask, other=0.0)
    s = tl.load(sin_ptr + angle, mask=mask, other=0.0)
    if INVERSE:
        s = -s
    at = x_ptr + token[:, None] * x_token + head[:, None] * x_head + col[None, :]
    a = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(at + half, mask=mask, other=0.0).to(tl.float32)
    out = y_ptr + pair[:, None] * (2 * half) + col[None, :]
    tl.store(out, (a * c - b * s).to(y_ptr.dtype.element_ty), mask=mask)
    tl.store(out + half, (b * c + a * s).to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def swiglu_kernel(gate_up_ptr, y_ptr, width, BLOCK: tl.constexpr):
    """One program a block of columns of one (token, leaf) row."""
    row = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = col < width
    gate = tl.load(gate_up_ptr + row * 2 * width + col, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * 2 * width + width + col, mask=mask, other=0.0).to(tl.float32)
    y = gate * _sigmoid(gate) * up
    tl.store(y_ptr + row * width + col, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def swiglu_dx_kernel(dy_ptr, gate_up_ptr, dx_ptr, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = col < width
    dy = tl.load(dy_ptr + row * width + col, mask=mask, other=0.0).to(tl.float32)
    gate = tl.load(gate_up_ptr + row * 2 * width + col, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * 2 * width + width + col, mask=mask, other=0.0).to(tl.float32)
    sig = _sigmoid(gate)
    dgate = dy * up * (sig * (1.0 + gate * (1.0 - sig)))
    tl.store(dx_ptr + row * 2 * width + col, dgate.to(dx_ptr.dtype.element_ty), mask=mask)
    dup = dy * (gate * sig)
    tl.store(dx_ptr + row * 2 * width + width + col, dup.to(dx_ptr.dtype.element_ty), mask=mask)


def rope(x: Tensor, cos: Tensor, sin: Tensor, *, inverse: bool) -> Tensor:
    """x [T, h, d], last dim contiguous; cos, sin fp32 [T, d/2] -> [T, h, d] contiguous."""
    tokens, heads, width = x.shape
    y = torch.empty(tokens, heads, width, dtype=x.dtype, device=x.device)
    if tokens:
        block = triton.next_power_of_2(width // 2)
        rows = max(1, ROPE_ELEMENTS // block)
        rope_kernel[(triton.cdiv(tokens * heads, rows),)](
            x, cos, sin, y, tokens, x.stride(0), x.stride(1),
            heads=heads, half=width // 2, INVERSE=inverse, ROWS=rows, BLOCK=block,
        )  # fmt: skip
    return y


def _grid(rows: int, width: int) -> tuple[int, int]:
    return rows, triton.cdiv(width, SWIGLU_BLOCK)


def swiglu(gate_up: Tensor) -> Tensor:
    """[T, L, 2, f] contiguous -> [T, L, f]."""
    tokens, leaves, _, width = gate_up.shape
    y = torch.empty(tokens, leaves, width, dtype=gate_up.dtype, device=gate_up.device)
    if tokens:
        swiglu_kernel[_grid(tokens * leaves, width)](gate_up, y, width, BLOCK=SWIGLU_BLOCK)
    return y


def swiglu_dx(dy: Tensor, gate_up: Tensor) -> Tensor:
    """[T, L, f], [T, L, 2, f] contiguous -> [T, L, 2, f]."""
    tokens, leaves, _, width = gate_up.shape
    dx = torch.empty_like(gate_up)
    if tokens:
        swiglu_dx_kernel[_grid(tokens * leaves, width)](dy, gate_up, dx, width, BLOCK=SWIGLU_BLOCK)
    return dx
