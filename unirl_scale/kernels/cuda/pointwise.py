"""RoPE, SwiGLU and the residual addition: fp32 inside, one rounding at the result."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from unirl_scale.kernels.cuda.chain import follow

ROPE_ELEMENTS = 2048
SWIGLU_BLOCK = 1024
ADD_BLOCK = 2048


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
def rope_to_pages_kernel(
    q_ptr, k_ptr, v_ptr, cos_ptr, sin_ptr, out_ptr, k_pages_ptr, v_pages_ptr, slots_ptr,
    q_token, q_head, k_token, k_head, v_token, v_head, k_row, k_page_head, v_row, v_page_head,
    heads: tl.constexpr, kv_heads: tl.constexpr, half: tl.constexpr, PDL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program a (head of q, k or v, token)."""
    if PDL:
        follow()
    head, token = tl.program_id(0), tl.program_id(1).to(tl.int64)
    col = tl.arange(0, BLOCK)
    mask = col < half
    slot = tl.load(slots_ptr + token)
    if head >= heads + kv_heads:
        at = v_ptr + token * v_token + (head - heads - kv_heads) * v_head + col
        out = v_pages_ptr + slot * v_row + (head - heads - kv_heads) * v_page_head + col
        tl.store(out, tl.load(at, mask=mask, other=0.0), mask=mask)
        tl.store(out + half, tl.load(at + half, mask=mask, other=0.0), mask=mask)
    else:
        if head < heads:
            at = q_ptr + token * q_token + head * q_head + col
            out = out_ptr + (token * heads + head) * (2 * half) + col
        else:
            at = k_ptr + token * k_token + (head - heads) * k_head + col
            out = k_pages_ptr + slot * k_row + (head - heads) * k_page_head + col
        c = tl.load(cos_ptr + token * half + col, mask=mask, other=0.0)
        s = tl.load(sin_ptr + token * half + col, mask=mask, other=0.0)
        a = tl.load(at, mask=mask, other=0.0).to(tl.float32)
        b = tl.load(at + half, mask=mask, other=0.0).to(tl.float32)
        tl.store(out, (a * c - b * s).to(out_ptr.dtype.element_ty), mask=mask)
        tl.store(out + half, (b * c + a * s).to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def add_kernel(x_ptr, delta_ptr, y_ptr, elements, PDL: tl.constexpr, BLOCK: tl.constexpr):
    if PDL:
        follow()
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < elements
    x = tl.load(x_ptr + at, mask=mask, other=0.0)
    delta = tl.load(delta_ptr + at, mask=mask, other=0.0).to(x.dtype)
    tl.store(y_ptr + at, (x.to(tl.float32) + delta.to(tl.float32)).to(x.dtype), mask=mask)


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def swiglu_kernel(gate_up_ptr, y_ptr, width, PDL: tl.constexpr, BLOCK: tl.constexpr):
    """One program a block of columns of one (token, leaf) row."""
    if PDL:
        follow()
    row = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = col < width
    gate = tl.load(gate_up_ptr + row * 2 * width + col, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * 2 * width + width + col, mask=mask, other=0.0).to(tl.float32)
    y = gate * _sigmoid(gate) * up
    tl.store(y_ptr + row * width + col, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def swiglu_dx_kernel(dy_ptr, gate_up_ptr, dx_ptr, y_ptr, width, BLOCK: tl.constexpr):
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
    y = gate * sig * up  # as in the forward kernel
    tl.store(y_ptr + row * width + col, y.to(y_ptr.dtype.element_ty), mask=mask)


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


def rope_to_pages(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    slots: Tensor,
    *,
    pdl: bool,
) -> Tensor:
    """See OpTable.rope_to_pages; consecutive pages are adjacent, so a slot is a row of all of them."""
    tokens, heads, width = q.shape
    kv_heads = k.shape[1]
    out = torch.empty(tokens, heads, width, dtype=q.dtype, device=q.device)
    if tokens:
        rope_to_pages_kernel[(heads + 2 * kv_heads, tokens)](
            q, k, v, cos, sin, out, k_pages, v_pages, slots,
            q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1),
            k_pages.stride(1), k_pages.stride(2), v_pages.stride(1), v_pages.stride(2),
            heads=heads, kv_heads=kv_heads, half=width // 2, BLOCK=triton.next_power_of_2(width // 2),
            PDL=pdl, launch_pdl=pdl, num_warps=1,
        )  # fmt: skip
    return out


def add(x: Tensor, delta: Tensor, *, pdl: bool) -> Tensor:
    """x, delta contiguous, of one shape -> x + delta, delta rounded to x's dtype first."""
    y = torch.empty_like(x)
    if x.numel():
        grid = (triton.cdiv(x.numel(), ADD_BLOCK),)
        add_kernel[grid](x, delta, y, x.numel(), PDL=pdl, BLOCK=ADD_BLOCK, launch_pdl=pdl)
    return y


def _grid(rows: int, width: int) -> tuple[int, int]:
    return rows, triton.cdiv(width, SWIGLU_BLOCK)


def swiglu(gate_up: Tensor, *, pdl: bool) -> Tensor:
    """[T, L, 2, f] contiguous -> [T, L, f]."""
    tokens, leaves, _, width = gate_up.shape
    y = torch.empty(tokens, leaves, width, dtype=gate_up.dtype, device=gate_up.device)
    if tokens:
        grid = _grid(tokens * leaves, width)
        swiglu_kernel[grid](gate_up, y, width, PDL=pdl, BLOCK=SWIGLU_BLOCK, launch_pdl=pdl)
    return y


def swiglu_dx(dy: Tensor, gate_up: Tensor) -> tuple[Tensor, Tensor]:
    """[T, L, f], [T, L, 2, f] contiguous -> (gradient [T, L, 2, f], swiglu(gate_up) [T, L, f])."""
    tokens, leaves, _, width = gate_up.shape
    dx, y = torch.empty_like(gate_up), torch.empty_like(dy)
    if tokens:
        swiglu_dx_kernel[_grid(tokens * leaves, width)](dy, gate_up, dx, y, width, BLOCK=SWIGLU_BLOCK)
    return dx, y
