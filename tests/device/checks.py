"""Comparisons of the device tests."""

from __future__ import annotations

import torch
from torch import Tensor

# Relative Frobenius error against fp64. bf16: one rounding of the result is 1.7e-3, attention rounds p too.
TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 4e-3}


def relative_error(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


def assert_close(got: Tensor, want: Tensor, dtype: torch.dtype) -> None:
    error = relative_error(got, want)
    assert error <= TOLERANCE[dtype], f"relative error {error:.2e} > {TOLERANCE[dtype]:.0e}"


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal shapes, dtypes and bit patterns: -0 differs from +0 and NaN equals itself."""
    return (
        a.shape == b.shape
        and a.dtype == b.dtype
        and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
    )
