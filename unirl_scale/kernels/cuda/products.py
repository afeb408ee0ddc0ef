"""Which implementation computes each matrix product; all of them give the same bits."""

from __future__ import annotations

from torch import Tensor

from unirl_scale.kernels.cuda import gemm
from unirl_scale.kernels.spans import Spans


class Products:
    """Sums of leaf products and weight gradients."""

    def __init__(self) -> None:
        self.name = "portable"

    def sum_leaves(
        self,
        a: Tensor,
        b: Tensor,
        out: Tensor,
        *,
        first: int,
        leaves: int,
        round_leaf: bool = False,
        bias: Tensor | None = None,
    ) -> None:
        gemm.leaf_products(a, b, out, first=first, leaves=leaves, round_leaf=round_leaf, bias=bias)

    def weight_grad(self, dy: Tensor, x: Tensor, spans: Spans, out: Tensor) -> None:
        gemm.weight_grad(dy, x, spans, out)
