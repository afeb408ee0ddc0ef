"""RMSNorm, forward and backward. A row is reduced by one program in an order that depends on H alone."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE_ELEMENTS = 4096  # rows share a program until a tile holds this many elements


@triton.jit(do_not_specialize=["rows"])
def rmsnorm_kernel(
    x_ptr, w_ptr, y_ptr, rstd_ptr, rows, x_row, eps,
    width: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    col = tl.arange(0, BLOCK)
    mask = (row < rows)[:, None] & (col < width)[None, :]
    x = tl.load(x_ptr + row[:, None] * x_row + col[None, :], mask=mask, other=0.0).to(tl.float32)
    w = tl.load(w_ptr + col, mask=col < width, other=0.0).to(tl.float32)
    rstd = 1.0 / tl.sqrt(tl.sum(x * x, axis=1) / width + eps)
    y = x * rstd[:, None] * w[None, :]
    tl.store(y_ptr + row[:, None] * width + col[None, :], y.to(y_ptr.dtype.element_ty), mask=mask)
    tl.store(rstd_ptr + row, rstd, mask=row < rows)


@triton.jit(do_not_specialize=["rows"])
def rmsnorm_dx_kernel(
    dy_ptr, x_ptr, w_ptr, rstd_ptr, dx_ptr, dw_ptr, rows, dy_row, x_row,
    width: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    col = tl.arange(0, BLOCK)
    mask = (row < rows)[:, None] & (col < width)[None, :]
    dy = tl.load(dy_ptr + row[:, None] * dy_row + col[None, :], mask=mask, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + row[:, None] * x_row + col[None, :], mask=mask, other=0.0).to(tl.float32)
    w = tl.load(w_ptr + col, mask=col < width, other=0.0).to(tl.float32)
    rstd = tl.load(rstd_ptr + row, mask=row < rows, other=0.0)[:, None]
    dyw = dy * w[None, :]
    mean = (tl.sum(dyw * x, axis=1) / width)[:, None]
    dx = dyw * rstd - x * (rstd * rstd * rstd * mean)
    at = row[:, None] * width + col[None, :]
    tl.store(dx_ptr + at, dx.to(dx_ptr.dtype.element_ty), mask=mask)
    tl.store(dw_ptr + at, dy * (x * rstd), mask=mask)


def _launch(width: int) -> dict[str, int]:
    block = triton.next_power_of_2(width)
    return {
        "width": width,
        "BLOCK": block,
        "ROWS": max(1, TILE_ELEMENTS // block),
        "num_warps": 4 if block <= 4096 else 8 if block <= 8192 else 16,
    }


def rmsnorm(x: Tensor, w: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x [R, H] rows of any stride -> (y [R, H] of x's dtype, rstd fp32 [R])."""
    rows, width = x.shape
    y = torch.empty(rows, width, dtype=x.dtype, device=x.device)
    rstd = torch.empty(rows, dtype=torch.float32, device=x.device)
    if rows:
        launch = _launch(width)
        grid = (triton.cdiv(rows, launch["ROWS"]),)
        rmsnorm_kernel[grid](x, w, y, rstd, rows, x.stride(0), eps, **launch)
    return y, rstd


def rmsnorm_dx(dy: Tensor, x: Tensor, w: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    """dy, x [R, H] rows of any stride -> (dx [R, H] of x's dtype, dy * x * rstd fp32 [R, H])."""
    rows, width = x.shape
    dx = torch.empty(rows, width, dtype=x.dtype, device=x.device)
    dw = torch.empty(rows, width, dtype=torch.float32, device=x.device)
    if rows:
        launch = _launch(width)
        grid = (triton.cdiv(rows, launch["ROWS"]),)
        rmsnorm_dx_kernel[grid](dy, x, w, rstd, dx, dw, rows, dy.stride(0), x.stride(0), **launch)
    return dx, dw
