"""AdamW and the squared norms of canonical parameter blocks."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from unirl_scale.kernels.cuda.sums import tree_line

ADAMW_BLOCK = 1024
CHUNK = 4096  # elements a program sums


@triton.jit
def chunk_tree_kernel(x_ptr, out_ptr, SQUARE: tl.constexpr, CHUNK: tl.constexpr):
    """out[c] = canonical tree over the CHUNK elements of chunk c, squared first if asked."""
    chunk = tl.program_id(0).to(tl.int64)
    x = tl.load(x_ptr + chunk * CHUNK + tl.arange(0, CHUNK))
    if SQUARE:
        x = x * x
    tl.store(out_ptr + chunk + tl.arange(0, 1), tree_line(x, CHUNK))


@triton.jit
def adamw_kernel(
    master_ptr, exp_avg_ptr, exp_avg_sq_ptr, grad_ptr, count,
    lr, beta1, rest1, beta2, rest2, eps, decay, correction1, correction2, grad_scale,
    DECAY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < count
    g = tl.load(grad_ptr + at, mask=mask, other=0.0) * grad_scale
    m = tl.load(exp_avg_ptr + at, mask=mask, other=0.0) * beta1 + g * rest1
    v = tl.load(exp_avg_sq_ptr + at, mask=mask, other=0.0) * beta2 + g * g * rest2
    p = tl.load(master_ptr + at, mask=mask, other=0.0)
    if DECAY:
        p = p - p * decay
    step = tl.div_rn(tl.div_rn(m, correction1), tl.sqrt_rn(tl.div_rn(v, correction2)) + eps)
    p = p - step * lr
    tl.store(exp_avg_ptr + at, m, mask=mask)
    tl.store(exp_avg_sq_ptr + at, v, mask=mask)
    tl.store(master_ptr + at, p, mask=mask)


def block_sumsq(blocks: Tensor) -> Tensor:
    """fp32 [n, BLOCK], BLOCK a power of two -> fp64 [n]."""
    n, level, square = blocks.shape[0], blocks, True
    while n and (square or level.shape[1] > 1):
        width = min(level.shape[1], CHUNK)
        out = torch.empty(n, level.shape[1] // width, dtype=torch.float32, device=blocks.device)
        # Fused, the first addition would take the square before it is rounded.
        chunk_tree_kernel[(out.numel(),)](
            level, out, SQUARE=square, CHUNK=width, num_warps=4, enable_fp_fusion=False
        )
        level, square = out, False
    return level.reshape(n).double()


def adamw(
    master: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    grad: Tensor,
    *,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    bias_correction1: float,
    bias_correction2: float,
    grad_scale: float,
) -> None:
    """One step in place. Fused multiply-adds are off: every product and sum rounds, as in the truth."""
    count = master.numel()
    if count:
        adamw_kernel[(triton.cdiv(count, ADAMW_BLOCK),)](
            master, exp_avg, exp_avg_sq, grad, count,
            lr, beta1, 1 - beta1, beta2, 1 - beta2, eps, lr * weight_decay,
            bias_correction1, bias_correction2, grad_scale,
            DECAY=weight_decay != 0, BLOCK=ADAMW_BLOCK, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
