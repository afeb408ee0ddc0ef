"""RMSNorm, forward and backward, with the residual connection beside it. One program reduces a row, in an
order that depends on H alone."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from unirl_scale.kernels.cuda.chain import follow

TILE_ELEMENTS = 4096  # rows share a program until a tile holds this many elements


@triton.jit(do_not_specialize=["rows"])
def rmsnorm_kernel(
    x_ptr, delta_ptr, w_ptr, sum_ptr, y_ptr, rstd_ptr, rows, x_row, delta_row, eps,
    ADD: tl.constexpr, PDL: tl.constexpr, width: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Norm of x, or with ADD of x + delta, which goes to sum_ptr; the norm sees it rounded."""
    if PDL:
        follow()
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    col = tl.arange(0, BLOCK)
    mask = (row < rows)[:, None] & (col < width)[None, :]
    dtype = y_ptr.dtype.element_ty
    x = tl.load(x_ptr + row[:, None] * x_row + col[None, :], mask=mask, other=0.0).to(tl.float32)
    if ADD:
        delta = tl.load(delta_ptr + row[:, None] * delta_row + col[None, :], mask=mask, other=0.0)
        total = (x + delta.to(dtype).to(tl.float32)).to(dtype)
        tl.store(sum_ptr + row[:, None] * width + col[None, :], total, mask=mask)
        x = total.to(tl.float32)
    w = tl.load(w_ptr + col, mask=col < width, other=0.0).to(tl.float32)
    rstd = 1.0 / tl.sqrt(tl.sum(x * x, axis=1) / width + eps)
    y = x * rstd[:, None] * w[None, :]
    tl.store(y_ptr + row[:, None] * width + col[None, :], y.to(dtype), mask=mask)
    tl.store(rstd_ptr + row, rstd, mask=row < rows)


@triton.jit(do_not_specialize=["rows"])
def rmsnorm_dx_kernel(
    dy_ptr, x_ptr, w_ptr, rstd_ptr, residual_ptr, dx_ptr, dw_ptr, rows, dy_row, x_row, residual_row,
    ADD: tl.constexpr, width: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    col = tl.arange(0, BLOCK)
    mask = (row < rows)[:, None] & (col < width)[None, :]
    dtype = dx_ptr.dtype.element_ty
    dy = tl.load(dy_ptr + row[:, None] * dy_row + col[None, :], mask=mask, other=0.0)
    dy = dy.to(dtype).to(tl.float32)
    x = tl.load(x_ptr + row[:, None] * x_row + col[None, :], mask=mask, other=0.0).to(tl.float32)
    w = tl.load(w_ptr + col, mask=col < width, other=0.0).to(tl.float32)
    rstd = tl.load(rstd_ptr + row, mask=row < rows, other=0.0)[:, None]
    dyw = dy * w[None, :]
    mean = (tl.sum(dyw * x, axis=1) / width)[:, None]
    dx = (dyw * rstd - x * (rstd * rstd * rstd * mean)).to(dtype)
    if ADD:
        beside = tl.load(residual_ptr + row[:, None] * residual_row + col[None, :], mask=mask, other=0.0)
        dx = (beside.to(tl.float32) + dx.to(tl.float32)).to(dtype)
    at = row[:, None] * width + col[None, :]
    tl.store(dx_ptr + at, dx, mask=mask)
    tl.store(dw_ptr + at, dy * (x * rstd), mask=mask)


def _launch(width: int) -> dict[str, int]:
    block = triton.next_power_of_2(width)
    return {
        "width": width,
        "BLOCK": block,
        "ROWS": max(1, TILE_ELEMENTS // block),
        "num_warps": 4 if block <= 4096 else 8 if block <= 8192 else 16,
    }


def rmsnorm(x: Tensor, w: Tensor, eps: float, *, pdl: bool) -> tuple[Tensor, Tensor]:
    """x [R, H] rows of any stride -> (y [R, H] of x's dtype, rstd fp32 [R])."""
    return _rmsnorm(x, None, w, x, eps, pdl)


def add_rmsnorm(
    x: Tensor, delta: Tensor, w: Tensor, eps: float, *, pdl: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """x, delta [R, H] rows of any stride -> (x + delta, its norm [R, H] of x's dtype, rstd fp32 [R])."""
    total = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    return total, *_rmsnorm(x, delta, w, total, eps, pdl)


def _rmsnorm(
    x: Tensor, delta: Tensor | None, w: Tensor, total: Tensor, eps: float, pdl: bool
) -> tuple[Tensor, Tensor]:
    rows, width = x.shape
    y = torch.empty(rows, width, dtype=x.dtype, device=x.device)
    rstd = torch.empty(rows, dtype=torch.float32, device=x.device)
    if rows:
        launch = _launch(width)
        grid = (triton.cdiv(rows, launch["ROWS"]),)
        add = x if delta is None else delta
        rmsnorm_kernel[grid](
            x, add, w, total, y, rstd, rows, x.stride(0), add.stride(0), eps,
            ADD=delta is not None, PDL=pdl, launch_pdl=pdl, **launch,
        )  # fmt: skip
    return y, rstd


def rmsnorm_dx(
    dy: Tensor, x: Tensor, w: Tensor, rstd: Tensor, residual: Tensor | None
) -> tuple[Tensor, Tensor]:
    """dy, x, residual [R, H] rows of any stride -> (dx [R, H] of x's dtype, dy * x * rstd fp32 [R, H])."""
    rows, width = x.shape
    dx = torch.empty(rows, width, dtype=x.dtype, device=x.device)
    dw = torch.empty(rows, width, dtype=torch.float32, device=x.device)
    if rows:
        launch = _launch(width)
        grid = (triton.cdiv(rows, launch["ROWS"]),)
        beside = x if residual is None else residual
        rmsnorm_dx_kernel[grid](
            dy, x, w, rstd, beside, dx, dw, rows, dy.stride(0), x.stride(0), beside.stride(0),
            ADD=residual is not None, **launch,
        )  # fmt: skip
    return dx, dw
