"""The start-up proof passes on this device, and names a tuned kernel that is off by an order of addition."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from unirl_scale.kernels.check import ProbeShapes, failures

pytestmark = pytest.mark.cuda

SHAPES = ProbeShapes(
    hidden=512, widths=(192, 1000), inner=(128, 256), heads=2, kv_heads=1, head_dim=64, leaves=4
)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_table_holds_the_contract_at_a_models_shapes(ops: Any, dtype: torch.dtype) -> None:
    from unirl_scale.kernels.cuda.check import tuned_failures

    assert tuned_failures(ops, SHAPES, dtype) == []
    assert failures(ops, SHAPES, dtype, torch.device("cuda")) == []


def test_a_product_that_splits_k_is_named(ops: Any) -> None:
    from unirl_scale.kernels.cuda.check import tuned_failures
    from unirl_scale.kernels.cuda.table import CudaOps

    class SplitK(CudaOps):
        def linear(
            self, x: Tensor, w: Tensor, bias: Tensor | None = None, *, out_fp32: bool = False
        ) -> Tensor:
            first, second = (
                super(SplitK, self).linear(a.contiguous(), b.contiguous(), out_fp32=True)
                for a, b in zip(x.chunk(2, -1), w.chunk(2, -1))
            )
            return first + second

    assert tuned_failures(SplitK(), SHAPES, torch.bfloat16) == ["linear"]
