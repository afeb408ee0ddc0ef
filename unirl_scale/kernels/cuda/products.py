"""Which kernel computes each matrix product. All of them give the same bits, so the choice is free."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from unirl_scale.kernels.cuda import decode, gemm, hopper_gemm, hopper_weight_grad
from unirl_scale.kernels.cuda.device import Device
from unirl_scale.kernels.cuda.tiles import (
    GEMM_ROWS,
    NARROW_COLUMNS,
    decode_tile,
    gemm_tile,
    weight_grad_tile,
)
from unirl_scale.kernels.spans import Spans

BLOCK_K = 64


def copyable(*tensors: Tensor) -> bool:
    """Tiles begin at multiples of 16 bytes, as the copy engine asks, when the base and all strides do."""
    return all(
        t.data_ptr() % 16 == 0
        and t.stride(-1) == 1
        and all(stride * t.element_size() % 16 == 0 for stride in t.stride()[:-1])
        for t in tensors
    )


def _stacked(b: Tensor) -> bool:
    """b [L, R, C] with a contiguous last dim is one tall matrix of L*R rows."""
    return b.shape[0] == 1 or b.stride(0) == b.shape[1] * b.stride(1)


class Products:
    """Sums of leaf products and weight gradients on one device."""

    def __init__(self, device: Device) -> None:
        self.device = device

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
        """out[g] = canonical tree over i < leaves of a[g + first + i] @ b[g + first + i], plus bias.

        Args:
            a: [LA, M, K] view, stride 0 over dim 0 when the leaves share it.
            b: [LB, K, N] view.
            out: [G, M, N] view of the result's dtype; leaves <= gemm.REGISTER_LEAVES.
        """
        groups, rows, columns = out.shape
        if rows == 0:
            return
        weight = b.transpose(1, 2) if b.stride(1) == 1 else b
        if not self._fits_hopper(a, weight, out):
            gemm.leaf_products(a, b, out, first=first, leaves=leaves, round_leaf=round_leaf, bias=bias)
        elif rows <= decode.MAX_ROWS and weight is not b and leaves == 1:
            tile = decode_tile(rows, columns * groups, self.device.programs)
            decode.products(a, weight, out, first=first, round_leaf=round_leaf, bias=bias, tile=tile)
        else:
            hopper_gemm.leaf_products(
                a,
                b,
                out,
                first=first,
                leaves=leaves,
                round_leaf=round_leaf,
                bias=bias,
                tile=gemm_tile(rows, columns, groups, leaves, out.element_size(), self.device.programs),
                programs=self.device.programs,
            )

    def few_tiles(self, rows: int, columns: int, leaves: int) -> bool:
        """Whether adding leaves in registers would leave programs idle that leaves side by side keep busy."""
        tiles = triton.cdiv(rows, GEMM_ROWS) * triton.cdiv(columns, NARROW_COLUMNS)
        return rows <= decode.MAX_ROWS or tiles * leaves <= self.device.programs

    def _fits_hopper(self, a: Tensor, weight: Tensor, out: Tensor) -> bool:
        leaves, _, k = a.shape
        adjacent = leaves == 1 or a.stride(0) in (0, k)
        whole_steps = k % BLOCK_K == 0 or (leaves == 1 and weight.shape[0] == 1)
        return (
            self.device.hopper
            and a.dtype == torch.bfloat16
            and adjacent
            and whole_steps
            and _stacked(weight)
            and copyable(a, weight, out)
        )

    def weight_grad(self, dy: Tensor, x: Tensor, spans: Spans, out: Tensor) -> None:
        """out[l] += dy_s.T @ x_s[:, l] for each sample; dy [T, N], x [T, L, k] view, out fp32 [L, N, k]."""
        if spans.total == 0:
            return
        leaves, rows, columns = out.shape
        fits = (
            self.device.hopper
            and dy.dtype == torch.bfloat16
            and (leaves == 1 or x.stride(1) == columns)
            and copyable(dy, x, out)
        )
        if fits:
            tile = weight_grad_tile(rows, columns, leaves, self.device.programs)
            hopper_weight_grad.weight_grad(dy, x, spans, out, tile=tile, programs=self.device.programs)
        else:
            gemm.weight_grad(dy, x, spans, out)
