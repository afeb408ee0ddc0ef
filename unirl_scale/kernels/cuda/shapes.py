"""Argument checks shared by the CUDA ops: a wrong shape or dtype raises before any kernel is launched."""

from __future__ import annotations

import torch
from torch import Tensor

from unirl_scale.core.errors import ShapeError

ACTIVATION_DTYPES = (torch.bfloat16, torch.float32)


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
