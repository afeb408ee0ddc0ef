"""Sums whose bits do not depend on padding, on the micro-batch or on how many other rows there are.

Inside a row: the canonical tree over the token dimension. Across rows: a correctly rounded sum of the row
totals, so that a row with nothing in it changes no bit, and neither does the order of the rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor


def _tree(x: Tensor) -> Tensor:
    """[n, ...] -> [...]: pairs neighbours bottom-up, an odd last one is promoted."""
    if x.shape[0] == 0:
        return x.new_zeros(x.shape[1:])
    while x.shape[0] > 1:
        paired = x[0:-1:2] + x[1::2]
        x = torch.cat([paired, x[-1:]]) if x.shape[0] % 2 else paired
    return x[0]


class _TreeSum(torch.autograd.Function):
    """The derivative of a sum is one whatever its order; recording the tree would keep every level alive."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int) -> Tensor:
        ctx.shape, ctx.dim = x.shape, dim
        return _tree(x.movedim(dim, 0))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.unsqueeze(ctx.dim).expand(ctx.shape), None


def tree_sum(x: Tensor, dim: int) -> Tensor:
    """Sum over `dim` by the canonical tree: split at the largest power of two below n (RFC 6962).

    Pairing neighbours bottom-up and promoting the odd one builds the same tree. Trailing `+0` entries change
    no bit of the result, except that a sum that is `-0` becomes `+0`.

    Args:
        x: any shape, any floating dtype.
        dim: dimension to sum over; may have size 0, the sum is then +0.

    Returns:
        x's shape without `dim`, x's dtype.
    """
    return cast(Tensor, _TreeSum.apply(x, dim % x.dim()))  # type: ignore[no-untyped-call]


def select(x: Tensor, mask: Tensor) -> Tensor:
    """x where the mask is set, +0 elsewhere. A NaN in a masked slot is gone, forward and backward."""
    return torch.where(mask, x, 0.0)


def row_sums(x: Tensor, mask: Tensor) -> Tensor:
    """Masked sum of each row by the canonical tree: [B, S], bool [B, S] -> [B].

    The bits do not depend on the padded length S: adding +0 at the end also turns a `-0` total into `+0`.
    """
    return tree_sum(select(x, mask), -1) + 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Moments:
    """Mean and unbiased variance over the `count` kept tokens of a batch, in float64."""

    mean: float
    var: float
    count: int


def token_mean(x: Tensor, mask: Tensor) -> float:
    """Mean of x [B, S] over the kept tokens of the whole batch, in float64; 0.0 when nothing is kept."""
    count = int(mask.sum())
    return math.fsum(row_sums(x.double(), mask).tolist()) / count if count else 0.0


def moments(x: Tensor, mask: Tensor) -> Moments:
    """Two-pass moments of x [B, S] over the kept tokens of the whole batch.

    The variance has Bessel's correction and is 0 for fewer than two tokens. A one-pass variance loses every
    digit when the mean is large, so it is not used anywhere.
    """
    count = int(mask.sum())
    mean = token_mean(x, mask)
    if count < 2:
        return Moments(mean=mean, var=0.0, count=count)
    centred = x.double() - mean
    squares = math.fsum(row_sums(centred * centred, mask).tolist())
    return Moments(mean=mean, var=squares / (count - 1), count=count)
