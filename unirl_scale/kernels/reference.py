"""The plain-torch truth of every op, and the op table of the CPU.

Two GEMM paths with the same meaning:

* `whole`: one BLAS call over all rows and all leaves. Right only where the BLAS is row- and split-invariant
  (MKL with MKL_CBWR=AVX2,STRICT on processors that honour it); kernels/check.py proves it before use.
* `blocked`: leaf by leaf, rows in blocks of ROW_BLOCK padded with zeros, so that every BLAS call for a given
  weight has one shape. It needs only that equal shapes give equal bits.

torch.sigmoid and silu give other bits in the scalar tail than in the vector body on CPU; exp, sqrt and
division do not, so gates are built from those. Fused multiply-adds (addcmul, lerp, alpha=) are avoided for
the same reason.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor

from unirl_scale.core.errors import ShapeError
from unirl_scale.kernels import reference_attention
from unirl_scale.kernels.pages import check_pages
from unirl_scale.kernels.spans import Spans
from unirl_scale.kernels.table import SAMPLE_SCALE, Nodes

ROW_BLOCK = 64
MIN_SIDE = 16  # rows or columns below which BLAS libraries switch to matrix-vector kernels, whose bits differ


def _expect(condition: bool, op: str, rule: str, *tensors: Tensor) -> None:
    if not condition:
        got = ", ".join(f"{list(t.shape)} {str(t.dtype).removeprefix('torch.')}" for t in tensors)
        raise ShapeError(f"{op}: got {got}; {rule}")


def tree_sum(leaves: Tensor) -> Tensor:
    """Canonical tree over dim 0: neighbours are paired level by level and an odd last one moves up.

    That is the tree that splits at the largest power of two below n (RFC 6962, section 2.1).
    """
    while leaves.shape[0] > 1:
        n = leaves.shape[0]
        paired = leaves[0 : n - 1 : 2] + leaves[1:n:2]
        leaves = torch.cat([paired, leaves[n - 1 :]]) if n % 2 else paired
    return leaves[0]


def _sum_nodes(leaf: Callable[[int], Tensor], nodes: Nodes) -> Tensor:
    return torch.stack([tree_sum(torch.stack([leaf(i) for i in range(a, b)])) for a, b in nodes])


class ReferenceOps:
    """OpTable in plain torch. dt is fp32 or bf16; bf16 operands are multiplied in fp32, where their
    products are exact, so a GEMM has one rounding, at the result."""

    def __init__(self, gemm: Literal["whole", "blocked"] = "blocked") -> None:
        self.gemm = gemm
        self.name = f"reference-{gemm}"

    # ---- GEMM -------------------------------------------------------------------------------------
    def _matmul(self, x: Tensor, b: Tensor, out: Tensor) -> None:
        """out[M, N] = x[M, K] @ b[K, N] in fp32, row-invariantly."""
        rows = x.shape[0]
        if b.shape[1] == 1:  # the value head
            wide = torch.empty(rows, MIN_SIDE, device=x.device)
            self._matmul(x, torch.nn.functional.pad(b, (0, MIN_SIDE - 1)), wide)
            out.copy_(wide[:, :1])
            return
        block = ROW_BLOCK if self.gemm == "blocked" else max(rows, MIN_SIDE)
        full = rows - rows % block
        for i in range(0, full, block):
            torch.mm(x[i : i + block], b, out=out[i : i + block])
        if full < rows:
            tail = torch.zeros(block, x.shape[1], dtype=x.dtype, device=x.device)
            tail[: rows - full] = x[full:]
            out[full:] = torch.mm(tail, b)[: rows - full]

    def linear(self, x: Tensor, w: Tensor, bias: Tensor | None = None, *, out_fp32: bool = False) -> Tensor:
        _expect(
            w.dim() == 3 and x.dim() == 2 and x.shape[1] == w.shape[2],
            "linear",
            "x [M, K], w [L, n, K]",
            x,
            w,
        )
        x32, w32 = x.float(), w.float()
        leaves, n, _ = w.shape
        out = torch.empty(x.shape[0], leaves * n, device=x.device)
        if self.gemm == "whole":
            self._matmul(x32, w32.reshape(leaves * n, -1).t(), out)
        else:
            for i in range(leaves):
                part = torch.empty(x.shape[0], n, device=x.device)
                self._matmul(x32, w32[i].t(), part)
                out[:, i * n : (i + 1) * n] = part
        if bias is not None:
            out = out + bias.float().reshape(-1)
        return out if out_fp32 else out.to(x.dtype)

    def linear_dx_nodes(self, dy: Tensor, w: Tensor, nodes: Nodes, *, round_leaf: bool = False) -> Tensor:
        leaves, n, width = w.shape
        _expect(dy.shape[1] == leaves * n, "linear_dx_nodes", "dy [M, L*n], w [L, n, K]", dy, w)
        return self._leaf_products(dy, w, n, width, nodes, round_leaf)

    def row_linear_nodes(self, x: Tensor, w: Tensor, nodes: Nodes, *, round_leaf: bool = False) -> Tensor:
        leaves, width, k = w.shape
        _expect(x.shape[1] == leaves * k, "row_linear_nodes", "x [M, L*k], w [L, N, k]", x, w)
        return self._leaf_products(x, w.transpose(1, 2), k, width, nodes, round_leaf)

    def _leaf_products(
        self, x: Tensor, b: Tensor, k: int, width: int, nodes: Nodes, round_leaf: bool
    ) -> Tensor:
        """Nodes over leaves x[:, l*k:(l+1)*k] @ b[l]."""
        x32, b32 = x.float(), b.float()

        def leaf(i: int) -> Tensor:
            out = torch.empty(x.shape[0], width, device=x.device)
            self._matmul(x32[:, i * k : (i + 1) * k], b32[i], out)
            return out.bfloat16().float() if round_leaf else out

        return _sum_nodes(leaf, nodes)

    def row_linear_dx(self, dy: Tensor, w: Tensor) -> Tensor:
        leaves, n, k = w.shape
        _expect(dy.shape[1] == n, "row_linear_dx", "dy [M, N], w [L, N, k]", dy, w)
        dy32, out = dy.float(), torch.empty(dy.shape[0], leaves * k, device=dy.device)
        for i in range(leaves):
            part = torch.empty(dy.shape[0], k, device=dy.device)
            self._matmul(dy32, w[i].float(), part)
            out[:, i * k : (i + 1) * k] = part
        return out.to(dy.dtype)

    def linear_dw(self, dy: Tensor, x: Tensor, spans: Spans, out: Tensor) -> None:
        leaves, n, k = out.shape
        _expect(
            dy.shape[1] == leaves * n and x.shape[1] == k, "linear_dw", "dy [T, L*n], x [T, K]", dy, x, out
        )
        dy32, x32 = dy.float(), x.float()
        for start, stop in zip(spans.offsets, spans.offsets[1:]):
            if stop == start:
                continue
            if self.gemm == "whole":
                out += torch.mm(dy32[start:stop].t(), x32[start:stop]).view(leaves, n, k)
                continue
            for i in range(leaves):
                out[i] += torch.mm(dy32[start:stop, i * n : (i + 1) * n].t(), x32[start:stop])

    def row_linear_dw(self, dy: Tensor, x: Tensor, spans: Spans, out: Tensor) -> None:
        leaves, n, k = out.shape
        _expect(
            dy.shape[1] == n and x.shape[1] == leaves * k,
            "row_linear_dw",
            "dy [T, N], x [T, L*k]",
            dy,
            x,
            out,
        )
        dy32, x32 = dy.float(), x.float()
        for start, stop in zip(spans.offsets, spans.offsets[1:]):
            for i in range(leaves) if stop > start else ():
                out[i] += torch.mm(dy32[start:stop].t(), x32[start:stop, i * k : (i + 1) * k])

    # ---- sums -------------------------------------------------------------------------------------
    def tree_sum(self, leaves: Tensor) -> Tensor:
        return tree_sum(leaves)

    def sum_tokens(self, x: Tensor, spans: Spans, out: Tensor) -> None:
        x32 = x.float()
        for start, stop in zip(spans.offsets, spans.offsets[1:]):
            if stop > start:
                out += tree_sum(x32[start:stop])

    # ---- pointwise, norm, rope --------------------------------------------------------------------
    def rmsnorm(self, x: Tensor, w: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        x32 = x.float()
        rstd = torch.rsqrt((x32 * x32).sum(-1) / x.shape[-1] + eps)
        return (x32 * rstd.unsqueeze(-1) * w.float()).to(x.dtype), rstd

    def rmsnorm_dx(
        self, dy: Tensor, x: Tensor, w: Tensor, rstd: Tensor, residual: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        dy32, x32, r = dy.to(x.dtype).float(), x.float(), rstd.unsqueeze(-1)
        dyw = dy32 * w.float()
        mean = (dyw * x32).sum(-1, keepdim=True) / x.shape[-1]
        dx = (dyw * r - x32 * (r * r * r * mean)).to(x.dtype)
        return dx if residual is None else residual + dx, dy32 * (x32 * r)

    def add(self, x: Tensor, delta: Tensor) -> Tensor:
        return x + delta.to(x.dtype)

    def add_rmsnorm(self, x: Tensor, delta: Tensor, w: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
        y = self.add(x, delta)
        return y, *self.rmsnorm(y, w, eps)

    def rope(self, x: Tensor, cos: Tensor, sin: Tensor, *, inverse: bool = False) -> Tensor:
        a, b = x.float().chunk(2, dim=-1)
        c, s = cos.unsqueeze(1), sin.unsqueeze(1)
        if inverse:
            s = -s
        return torch.cat([a * c - b * s, b * c + a * s], dim=-1).to(x.dtype)

    def rope_to_pages(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cos: Tensor,
        sin: Tensor,
        k_pages: Tensor,
        v_pages: Tensor,
        slots: Tensor,
    ) -> Tensor:
        k_pages.flatten(0, 1).index_copy_(0, slots, self.rope(k, cos, sin))
        v_pages.flatten(0, 1).index_copy_(0, slots, v)
        return self.rope(q, cos, sin)

    def swiglu(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.float().unbind(-2)
        return (gate / (1 + torch.exp(-gate)) * up).to(gate_up.dtype)

    def swiglu_dx(self, dy: Tensor, gate_up: Tensor) -> tuple[Tensor, Tensor]:
        dy32 = dy.float()
        gate, up = gate_up.float().unbind(-2)
        sig = 1 / (1 + torch.exp(-gate))
        dgate = dy32 * up * (sig * (1 + gate * (1 - sig)))
        dx = torch.stack([dgate, dy32 * (gate * sig)], dim=-2).to(gate_up.dtype)
        return dx, self.swiglu(gate_up)

    # ---- attention --------------------------------------------------------------------------------
    def attention(self, q: Tensor, k: Tensor, v: Tensor, spans: Spans, scale: float) -> tuple[Tensor, Tensor]:
        _expect(q.shape[1] % k.shape[1] == 0, "attention", "query heads are a multiple of kv heads", q, k)
        return reference_attention.forward(q, k, v, spans, scale)

    def attention_dx(
        self, do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, spans: Spans, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        return reference_attention.backward(do, q, k, v, o, lse, spans, scale)

    def attention_decode(
        self,
        q: Tensor,
        k_pages: Tensor,
        v_pages: Tensor,
        block_table: Tensor,
        lengths: Tensor,
        scale: float,
    ) -> Tensor:
        check_pages(q, k_pages, v_pages, block_table, lengths, reference_attention.TILE)
        return reference_attention.decode(q, k_pages, v_pages, block_table, lengths, scale)

    # ---- vocabulary -------------------------------------------------------------------------------
    def vocab_stats(
        self, logits: Tensor, leaves: int, valid: Sequence[int], targets: Tensor
    ) -> tuple[Tensor, Tensor]:
        rows, width = logits.shape[0], logits.shape[1] // leaves
        stats = torch.empty(rows, leaves, 3, device=logits.device)
        for i, columns in enumerate(valid):
            x = logits[:, i * width : i * width + columns].contiguous()
            if columns == 0:
                stats[:, i] = torch.tensor([-torch.inf, 0.0, 0.0], device=logits.device)
                continue
            top = x.max(dim=-1).values
            shifted = x - top.unsqueeze(-1)
            e = torch.exp(shifted)
            stats[:, i] = torch.stack([top, e.sum(-1), (e * shifted).sum(-1)], dim=-1)
        here = targets >= 0
        picked = logits.gather(1, targets.clamp(min=0).unsqueeze(1)).squeeze(1)
        return stats, torch.where(here, picked, torch.zeros_like(picked))

    def vocab_dlogits(
        self,
        logits: Tensor,
        leaves: int,
        valid: Sequence[int],
        targets: Tensor,
        lse: Tensor,
        entropy: Tensor,
        grad_logprob: Tensor,
        grad_entropy: Tensor,
        *,
        scale: float,
        dtype: torch.dtype,
    ) -> Tensor:
        logp = logits - lse.unsqueeze(1)
        p = torch.exp(logp)
        hot = torch.zeros_like(logits)
        hot.scatter_(1, targets.clamp(min=0).unsqueeze(1), (targets >= 0).float().unsqueeze(1))
        grad = grad_logprob.unsqueeze(1) * (hot - p)
        grad = grad - grad_entropy.unsqueeze(1) * (p * (logp + entropy.unsqueeze(1)))
        width = logits.shape[1] // leaves
        for i, columns in enumerate(valid):
            grad[:, i * width + columns : (i + 1) * width] = 0
        return (grad * scale).to(dtype)

    def sample(self, logits: Tensor, uniforms: Tensor) -> Tensor:
        _expect(
            logits.dim() == 2
            and logits.dtype == torch.float32
            and uniforms.shape == logits.shape[:1]
            and uniforms.dtype == torch.float64,
            "sample",
            "takes logits fp32 [B, V], uniforms fp64 [B]",
            logits,
            uniforms,
        )
        likely = torch.exp(logits - logits.amax(dim=-1, keepdim=True))
        cumulative = (likely * SAMPLE_SCALE).to(torch.int64).cumsum(dim=-1)
        total = cumulative[:, -1:]
        threshold = torch.minimum((uniforms.unsqueeze(1) * total.double()).to(torch.int64), total - 1)
        return (cumulative <= threshold).sum(dim=-1)

    def embedding_dw(self, dy: Tensor, ids: Tensor, out: Tensor) -> None:
        rows = torch.nonzero(ids >= 0).squeeze(1)
        # index_add_ on CPU visits the rows one after another, which is the order the contract asks for.
        out.index_add_(0, ids[rows], dy[rows].float())

    # ---- optimizer --------------------------------------------------------------------------------
    def block_sumsq(self, blocks: Tensor) -> Tensor:
        return tree_sum((blocks * blocks).t().contiguous()).double()

    def adamw(
        self,
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
        g = grad * grad_scale
        exp_avg.mul_(beta1).add_(g * (1 - beta1))
        exp_avg_sq.mul_(beta2).add_(g * g * (1 - beta2))
        denominator = (exp_avg_sq / bias_correction2).sqrt_().add_(eps)
        if weight_decay:
            master.sub_(master * (lr * weight_decay))
        master.sub_((exp_avg / bias_correction1).div_(denominator).mul_(lr))
