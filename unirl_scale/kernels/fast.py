"""The fast mode on CPU (`invariance.mode: off`): what one would write without the contract. Kept to measure
its price."""

from __future__ import annotations

import torch
from torch import Tensor

from unirl_scale.kernels.reference import ReferenceOps
from unirl_scale.kernels.spans import Spans
from unirl_scale.kernels.table import Nodes


class FastOps(ReferenceOps):
    """Whole-matrix GEMMs, one dW over all tokens, torch's own attention and reductions."""

    def __init__(self) -> None:
        super().__init__("whole")
        self.name = "fast"

    def linear(self, x: Tensor, w: Tensor, bias: Tensor | None = None, *, out_fp32: bool = False) -> Tensor:
        flat = w.flatten(0, 1)
        out = torch.nn.functional.linear(x, flat, None if bias is None else bias.reshape(-1).to(x.dtype))
        return out.float() if out_fp32 else out

    def linear_dx_nodes(self, dy: Tensor, w: Tensor, nodes: Nodes, *, round_leaf: bool = False) -> Tensor:
        return (dy @ w.flatten(0, 1)).float().unsqueeze(0)

    def row_linear_nodes(self, x: Tensor, w: Tensor, nodes: Nodes, *, round_leaf: bool = False) -> Tensor:
        return (x @ w[0].t()).float().unsqueeze(0)

    def row_linear_dx(self, dy: Tensor, w: Tensor) -> Tensor:
        return dy @ w[0]

    def linear_dw(self, dy: Tensor, x: Tensor, spans: Spans, out: Tensor) -> None:
        out.view(-1, out.shape[2]).add_(dy.t() @ x)

    def row_linear_dw(self, dy: Tensor, x: Tensor, spans: Spans, out: Tensor) -> None:
        out[0].add_(dy.t() @ x)

    def tree_sum(self, leaves: Tensor) -> Tensor:
        return leaves.sum(0)

    def sum_tokens(self, x: Tensor, spans: Spans, out: Tensor) -> None:
        out.add_(x.float().sum(0))

    def swiglu(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.unbind(-2)
        return torch.nn.functional.silu(gate) * up

    def attention(self, q: Tensor, k: Tensor, v: Tensor, spans: Spans, scale: float) -> tuple[Tensor, Tensor]:
        o, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            *(pad_batch(t, spans, q.shape[1]) for t in (q, k, v)), 0.0, True, scale=scale
        )
        return pack_batch(o.transpose(1, 2), spans), pack_batch(lse.transpose(1, 2), spans)

    def attention_dx(
        self, do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, spans: Spans, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        heads, kv_heads = q.shape[1], k.shape[1]
        batched = [pad_batch(t, spans, heads) for t in (do, q, k, v, o)]
        grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *batched, pad_batch(lse.unsqueeze(-1), spans, heads).squeeze(-1), 0.0, True, scale=scale
        )
        dq, dk, dv = (pack_batch(g.transpose(1, 2), spans) for g in grads)
        if kv_heads != heads:
            dk, dv = (g.unflatten(1, (kv_heads, -1)).sum(2) for g in (dk, dv))
        return dq, dk, dv


def pad_batch(x: Tensor, spans: Spans, heads: int) -> Tensor:
    """[T, h, d] packed -> [B, heads, S, d], zero-padded, kv heads repeated; a view when lengths are equal."""
    if len(set(spans.lengths)) == 1:
        out = x.view(len(spans), spans.max_length, *x.shape[1:])
    else:
        parts = x.split(list(spans.lengths))
        out = torch.stack(
            [torch.nn.functional.pad(p, (0, 0, 0, 0, 0, spans.max_length - len(p))) for p in parts]
        )
    if x.shape[1] != heads:
        out = out.repeat_interleave(heads // x.shape[1], dim=2)
    return out.transpose(1, 2)


def pack_batch(x: Tensor, spans: Spans) -> Tensor:
    """[B, S, ...] -> [T, ...], without the padding."""
    if len(set(spans.lengths)) == 1:
        return x.reshape(spans.total, *x.shape[2:])
    return torch.cat([x[b, :length] for b, length in enumerate(spans.lengths)])
