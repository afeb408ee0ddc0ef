"""The fast mode on NVIDIA GPUs (`invariance.mode: off`): cuBLAS and cuDNN attention. Kept to measure the
price."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from unirl_scale.kernels.cuda.table import CudaOps
from unirl_scale.kernels.fast import pack_batch, pad_batch
from unirl_scale.kernels.spans import Spans
from unirl_scale.kernels.table import Nodes

# cuDNN first: on Hopper it is the fastest attention that torch ships.
_BACKENDS = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]


class FastCudaOps(CudaOps):
    """cuBLAS picks its own K order and split-K; dW is one product over all tokens of a micro-batch. Pointwise
    ops, norms and the optimizer are the kernels of `layout` mode, which cost it nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.name = "cuda-fast"

    def linear(self, x: Tensor, w: Tensor, bias: Tensor | None = None, *, out_fp32: bool = False) -> Tensor:
        flat = w.flatten(0, 1).t()
        if out_fp32:
            out = _mm_fp32(x, flat)
            return out if bias is None else out + bias.reshape(-1).float()
        return torch.mm(x, flat) if bias is None else torch.addmm(bias.reshape(-1).to(x.dtype), x, flat)

    def linear_dx_nodes(self, dy: Tensor, w: Tensor, nodes: Nodes, *, round_leaf: bool = False) -> Tensor:
        return _mm_fp32(dy, w.flatten(0, 1)).unsqueeze(0)

    def row_linear_nodes(self, x: Tensor, w: Tensor, nodes: Nodes, *, round_leaf: bool = False) -> Tensor:
        return _mm_fp32(x, w[0].t()).unsqueeze(0)

    def row_linear_dx(self, dy: Tensor, w: Tensor) -> Tensor:
        return torch.mm(dy, w[0])

    def linear_dw(self, dy: Tensor, x: Tensor, spans: Spans, out: Tensor) -> None:
        out.view(-1, out.shape[2]).add_(_mm_fp32(dy.t(), x))

    def row_linear_dw(self, dy: Tensor, x: Tensor, spans: Spans, out: Tensor) -> None:
        out[0].add_(_mm_fp32(dy.t(), x))

    def attention(self, q: Tensor, k: Tensor, v: Tensor, spans: Spans, scale: float) -> tuple[Tensor, Tensor]:
        """The graph that torch's backward needs rides on the output tensor; there is no lse to return."""
        inputs = [t.detach().requires_grad_() for t in (q, k, v)]
        with torch.enable_grad(), sdpa_kernel(_BACKENDS, set_priority=True):
            batched = (pad_batch(t, spans, q.shape[1]) for t in inputs)
            out = torch.nn.functional.scaled_dot_product_attention(*batched, is_causal=True, scale=scale)
            packed = pack_batch(out.transpose(1, 2), spans)
        o: Any = packed.detach()
        o.graph = (packed, inputs)
        return o, torch.empty(0, device=q.device)

    def attention_dx(
        self, do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Any, lse: Tensor, spans: Spans, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        packed, inputs = o.graph
        dq, dk, dv = torch.autograd.grad(packed, inputs, do)
        return dq, dk, dv


def _mm_fp32(a: Tensor, b: Tensor) -> Tensor:
    if a.dtype == torch.float32:
        return torch.mm(a, b)
    return torch.mm(a, b, out_dtype=torch.float32)
