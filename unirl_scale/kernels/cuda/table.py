"""CudaOps: the op table of NVIDIA GPUs. Checks shapes and picks the kernel."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from unirl_scale.kernels.cuda import attention as attention_kernels
from unirl_scale.kernels.cuda import attention_dx as attention_dx_kernels
from unirl_scale.kernels.cuda import (
    hopper_attention,
    hopper_attention_dx,
    norm,
    optimizer,
    pointwise,
    sampling,
    sums,
    vocab,
)
from unirl_scale.kernels.cuda.device import Device
from unirl_scale.kernels.cuda.gemm import REGISTER_LEAVES
from unirl_scale.kernels.cuda.products import Products, copyable
from unirl_scale.kernels.cuda.shapes import (
    expect,
    expect_attention,
    expect_delta,
    expect_dtype,
    expect_fp32,
    expect_heads,
    expect_rope_to_pages,
    expect_vocab,
)
from unirl_scale.kernels.pages import check_pages
from unirl_scale.kernels.spans import Spans
from unirl_scale.kernels.table import SAMPLE_SCALE, Nodes


def _rows(x: Tensor) -> Tensor:
    """[..., H] as [R, H] without a copy where the strides allow it."""
    flat = x.reshape(-1, x.shape[-1])
    return flat if flat.stride(-1) == 1 else flat.contiguous()


class CudaOps:
    """OpTable in Triton. dt is fp32 or bf16.

    Args:
        device: what to tune for; None takes the current CUDA device.

    Raises:
        ConfigError: the GPU lacks bf16 tensor cores.
    """

    def __init__(self, device: Device | None = None) -> None:
        self.device = Device.current() if device is None else device
        self.products = Products(self.device)
        self.name = "cuda-hopper" if self.device.hopper else "cuda-portable"
        self._valid: dict[tuple[torch.device, tuple[int, ...]], Tensor] = {}

    # ---- GEMM -------------------------------------------------------------------------------------
    def linear(self, x: Tensor, w: Tensor, bias: Tensor | None = None, *, out_fp32: bool = False) -> Tensor:
        expect(
            x.dim() == 2 and w.dim() == 3 and x.shape[1] == w.shape[2],
            "linear",
            "x [M, K], w [L, n, K]",
            x,
            w,
        )
        expect_dtype("linear", x, w, *(() if bias is None else (bias,)))
        leaves, n, width = w.shape
        out = torch.empty(
            x.shape[0], leaves * n, dtype=torch.float32 if out_fp32 else x.dtype, device=x.device
        )
        flat_bias = None if bias is None else bias.reshape(leaves * n)
        flat_w = w.reshape(1, leaves * n, width)
        self.products.sum_leaves(
            x.unsqueeze(0), flat_w.transpose(1, 2), out.unsqueeze(0), first=0, leaves=1, bias=flat_bias
        )
        return out

    def linear_dx_nodes(self, dy: Tensor, w: Tensor, nodes: Nodes, *, round_leaf: bool = False) -> Tensor:
        expect(
            dy.dim() == 2 and w.dim() == 3 and dy.shape[1] == w.shape[0] * w.shape[1],
            "linear_dx_nodes",
            "dy [M, L*n], w [L, n, K]",
            dy,
            w,
        )
        expect_dtype("linear_dx_nodes", dy, w)
        leaves, n, width = w.shape
        a = dy.view(dy.shape[0], leaves, n).transpose(0, 1)
        return self._nodes(a, w, width, nodes, round_leaf)

    def row_linear_nodes(self, x: Tensor, w: Tensor, nodes: Nodes, *, round_leaf: bool = False) -> Tensor:
        expect(
            x.dim() == 2 and w.dim() == 3 and x.shape[1] == w.shape[0] * w.shape[2],
            "row_linear_nodes",
            "x [M, L*k], w [L, N, k]",
            x,
            w,
        )
        expect_dtype("row_linear_nodes", x, w)
        leaves, width, k = w.shape
        a = x.view(x.shape[0], leaves, k).transpose(0, 1)
        return self._nodes(a, w.transpose(1, 2), width, nodes, round_leaf)

    def _nodes(self, a: Tensor, b: Tensor, width: int, nodes: Nodes, round_leaf: bool) -> Tensor:
        """a [L, M, k], b [L, k, width] -> fp32 [len(nodes), M, width]."""
        out = torch.empty(len(nodes), a.shape[1], width, dtype=torch.float32, device=a.device)
        for i, (start, stop) in enumerate(nodes):
            count = stop - start
            if count > 1 and self.products.few_tiles(a.shape[1], width, count):
                # Every leaf is a program's work of its own, and the tree joins them afterwards.
                single = torch.empty(count, a.shape[1], width, dtype=torch.float32, device=a.device)
                shifted = (a[start:stop], b[start:stop])
                self.products.sum_leaves(*shifted, single, first=0, leaves=1, round_leaf=round_leaf)
                out[i] = sums.tree_sum(single)
            elif count <= REGISTER_LEAVES:
                self.products.sum_leaves(
                    a, b, out[i : i + 1], first=start, leaves=count, round_leaf=round_leaf
                )
            else:
                # A power of two of leaves a group: the tree over the groups is canonical again.
                groups = [(j, min(j + REGISTER_LEAVES, stop)) for j in range(start, stop, REGISTER_LEAVES)]
                out[i] = sums.tree_sum(self._nodes(a, b, width, groups, round_leaf))
        return out

    def row_linear_dx(self, dy: Tensor, w: Tensor) -> Tensor:
        expect(
            dy.dim() == 2 and w.dim() == 3 and dy.shape[1] == w.shape[1],
            "row_linear_dx",
            "dy [M, N], w [L, N, k]",
            dy,
            w,
        )
        expect_dtype("row_linear_dx", dy, w)
        leaves, _, k = w.shape
        out = torch.empty(dy.shape[0], leaves * k, dtype=dy.dtype, device=dy.device)
        slices = out.view(-1, leaves, k).transpose(0, 1)
        self.products.sum_leaves(dy.expand(leaves, -1, -1), w, slices, first=0, leaves=1)
        return out

    def linear_dw(self, dy: Tensor, x: Tensor, spans: Spans, out: Tensor) -> None:
        leaves, n, k = out.shape
        expect(
            dy.shape == (spans.total, leaves * n) and x.shape == (spans.total, k),
            "linear_dw",
            f"dy [T, L*n], x [T, K], out [L, n, K] with T = {spans.total} of spans",
            dy,
            x,
            out,
        )
        expect_dtype("linear_dw", dy, x)
        expect_fp32("linear_dw (out)", out)
        self.products.weight_grad(dy, x.unsqueeze(1), spans, out.view(1, leaves * n, k))

    def row_linear_dw(self, dy: Tensor, x: Tensor, spans: Spans, out: Tensor) -> None:
        leaves, n, k = out.shape
        expect(
            dy.shape == (spans.total, n) and x.shape == (spans.total, leaves * k),
            "row_linear_dw",
            f"dy [T, N], x [T, L*k], out [L, N, k] with T = {spans.total} of spans",
            dy,
            x,
            out,
        )
        expect_dtype("row_linear_dw", dy, x)
        expect_fp32("row_linear_dw (out)", out)
        self.products.weight_grad(dy, x.view(-1, leaves, k), spans, out)

    # ---- sums -------------------------------------------------------------------------------------
    def tree_sum(self, leaves: Tensor) -> Tensor:
        expect(leaves.dim() >= 1 and leaves.shape[0] >= 1, "tree_sum", "takes [n, ...] with n >= 1", leaves)
        expect_fp32("tree_sum", leaves)
        return sums.tree_sum(leaves)

    def sum_tokens(self, x: Tensor, spans: Spans, out: Tensor) -> None:
        expect(
            x.shape == (spans.total, *out.shape) and x.stride(-1) == 1,
            "sum_tokens",
            f"x [T, N], out [N] with T = {spans.total} of spans",
            x,
            out,
        )
        expect_fp32("sum_tokens (out)", out)
        sums.sum_tokens(x, spans, out)

    # ---- pointwise, norm, rope --------------------------------------------------------------------
    def rmsnorm(self, x: Tensor, w: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        expect(w.shape == x.shape[-1:], "rmsnorm", "x [..., H], w [H]", x, w)
        expect_dtype("rmsnorm", x)
        y, rstd = norm.rmsnorm(_rows(x), w, eps, pdl=self.device.hopper)
        return y.view(x.shape), rstd.view(x.shape[:-1])

    def add(self, x: Tensor, delta: Tensor) -> Tensor:
        expect_delta("add", x, delta)
        return pointwise.add(x.contiguous(), delta.contiguous(), pdl=self.device.hopper)

    def add_rmsnorm(self, x: Tensor, delta: Tensor, w: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
        expect(w.shape == x.shape[-1:], "add_rmsnorm", "x [..., H], w [H]", x, w)
        expect_delta("add_rmsnorm", x, delta)
        total, y, rstd = norm.add_rmsnorm(_rows(x), _rows(delta), w, eps, pdl=self.device.hopper)
        return total.view(x.shape), y.view(x.shape), rstd.view(x.shape[:-1])

    def rmsnorm_dx(
        self, dy: Tensor, x: Tensor, w: Tensor, rstd: Tensor, residual: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        expect(
            w.shape == x.shape[-1:] and dy.shape == x.shape and rstd.shape == x.shape[:-1],
            "rmsnorm_dx",
            "dy, x [..., H], w [H], rstd [...]",
            dy,
            x,
            w,
            rstd,
        )
        expect_delta("rmsnorm_dx", x, dy)
        if residual is not None:
            expect(residual.shape == x.shape, "rmsnorm_dx", "residual and x of one shape", residual, x)
            expect_dtype("rmsnorm_dx (residual)", x, residual)
        beside = None if residual is None else _rows(residual)
        dx, dw = norm.rmsnorm_dx(_rows(dy), _rows(x), w, rstd.reshape(-1), beside)
        return dx.view(x.shape), dw.view(x.shape)

    def rope(self, x: Tensor, cos: Tensor, sin: Tensor, *, inverse: bool = False) -> Tensor:
        expect(
            x.dim() == 3
            and x.shape[2] % 2 == 0
            and x.stride(2) == 1
            and cos.shape == sin.shape == (x.shape[0], x.shape[2] // 2),
            "rope",
            "x [T, h, d] with d even, cos and sin [T, d/2]",
            x,
            cos,
            sin,
        )
        expect_dtype("rope", x)
        expect_fp32("rope (cos, sin)", cos, sin)
        return pointwise.rope(x, cos, sin, inverse=inverse)

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
        expect_rope_to_pages(q, k, v, cos, sin, k_pages, v_pages, slots)
        return pointwise.rope_to_pages(q, k, v, cos, sin, k_pages, v_pages, slots, pdl=self.device.hopper)

    def swiglu(self, gate_up: Tensor) -> Tensor:
        expect(
            gate_up.dim() == 4 and gate_up.shape[2] == 2 and gate_up.is_contiguous(),
            "swiglu",
            "takes contiguous [T, L, 2, f]",
            gate_up,
        )
        expect_dtype("swiglu", gate_up)
        return pointwise.swiglu(gate_up, pdl=self.device.hopper)

    def swiglu_dx(self, dy: Tensor, gate_up: Tensor) -> tuple[Tensor, Tensor]:
        tokens, leaves, _, width = gate_up.shape
        expect(
            dy.shape == (tokens, leaves, width) and dy.is_contiguous() and gate_up.is_contiguous(),
            "swiglu_dx",
            "takes contiguous dy [T, L, f], gate_up [T, L, 2, f]",
            dy,
            gate_up,
        )
        expect_dtype("swiglu_dx", dy, gate_up)
        return pointwise.swiglu_dx(dy, gate_up)

    # ---- attention --------------------------------------------------------------------------------
    def attention(self, q: Tensor, k: Tensor, v: Tensor, spans: Spans, scale: float) -> tuple[Tensor, Tensor]:
        expect_attention("attention", q, k, v)
        expect(q.shape[0] == spans.total, "attention", f"spans hold {spans.total} tokens", q)
        if self._fits_hopper_attention(q, k, v):
            return hopper_attention.attention(q, k, v, spans, scale, device=self.device)
        return attention_kernels.attention(q, k, v, spans, scale)

    def attention_dx(
        self, do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, spans: Spans, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        expect_attention("attention_dx", q, k, v)
        expect(
            do.shape == o.shape == q.shape and lse.shape == q.shape[:2] and o.is_contiguous(),
            "attention_dx",
            "do, o [T, h, d] and lse [T, h] as q",
            do,
            o,
            lse,
            q,
        )
        do = do.contiguous()
        if self._fits_hopper_attention(q, k, v):
            return hopper_attention_dx.attention_dx(do, q, k, v, o, lse, spans, scale, device=self.device)
        return attention_dx_kernels.attention_dx(do, q, k, v, o, lse, spans, scale)

    def attention_decode(
        self,
        q: Tensor,
        k_pages: Tensor,
        v_pages: Tensor,
        block_table: Tensor,
        lengths: Tensor,
        scale: float,
    ) -> Tensor:
        tile = attention_kernels.kv_block(q.dtype, q.shape[-1])
        check_pages(q, k_pages, v_pages, block_table, lengths, tile)
        expect_heads("attention_decode", q, k_pages, v_pages)
        return attention_kernels.attention_decode(
            q, k_pages, v_pages, block_table, lengths, scale, pdl=self.device.hopper
        )

    def _fits_hopper_attention(self, q: Tensor, k: Tensor, v: Tensor) -> bool:
        return (
            self.device.hopper
            and q.dtype == torch.bfloat16
            and q.shape[2] in hopper_attention.WIDTHS
            and copyable(q, k, v)
        )

    # ---- vocabulary -------------------------------------------------------------------------------
    def vocab_stats(
        self, logits: Tensor, leaves: int, valid: Sequence[int], targets: Tensor
    ) -> tuple[Tensor, Tensor]:
        expect_vocab("vocab_stats", logits, leaves, valid, targets)
        return vocab.vocab_stats(logits, self._valid_columns(valid, logits.device), targets)

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
        expect_vocab("vocab_dlogits", logits, leaves, valid, targets)
        expect_fp32("vocab_dlogits", lse, entropy, grad_logprob, grad_entropy)
        columns = self._valid_columns(valid, logits.device)
        return vocab.vocab_dlogits(
            logits, columns, targets, lse, entropy, grad_logprob, grad_entropy, scale, dtype
        )

    def _valid_columns(self, valid: Sequence[int], device: torch.device) -> Tensor:
        key = (device, tuple(valid))
        if key not in self._valid:
            self._valid[key] = vocab.valid_columns(valid, device)
        return self._valid[key]

    def sample(self, logits: Tensor, uniforms: Tensor) -> Tensor:
        expect(
            logits.dim() == 2
            and logits.dtype == torch.float32
            and logits.stride(1) == 1
            and uniforms.shape == logits.shape[:1]
            and uniforms.dtype == torch.float64
            and uniforms.is_contiguous(),
            "sample",
            "takes logits fp32 [B, V] with contiguous rows, uniforms fp64 [B]",
            logits,
            uniforms,
        )
        return sampling.sample(logits, uniforms, SAMPLE_SCALE)

    def embedding_dw(self, dy: Tensor, ids: Tensor, out: Tensor) -> None:
        expect(
            dy.dim() == 2
            and ids.shape == dy.shape[:1]
            and out.shape[1:] == dy.shape[1:]
            and dy.stride(1) == 1,
            "embedding_dw",
            "dy [T, H], ids [T], out [rows, H]",
            dy,
            ids,
            out,
        )
        expect_fp32("embedding_dw (out)", out)
        vocab.embedding_dw(dy, ids, out)

    # ---- optimizer --------------------------------------------------------------------------------
    def block_sumsq(self, blocks: Tensor) -> Tensor:
        expect_fp32("block_sumsq", blocks)
        width = blocks.shape[-1]
        expect(
            blocks.dim() == 2 and width > 0 and width & (width - 1) == 0,
            "block_sumsq",
            "takes [n, BLOCK] with BLOCK a power of two",
            blocks,
        )
        return optimizer.block_sumsq(blocks)

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
        expect_fp32("adamw", master, exp_avg, exp_avg_sq, grad)
        expect(
            master.shape == exp_avg.shape == exp_avg_sq.shape == grad.shape,
            "adamw",
            "takes four tensors of one shape",
            master,
            exp_avg,
            exp_avg_sq,
            grad,
        )
        optimizer.adamw(
            master,
            exp_avg,
            exp_avg_sq,
            grad,
            lr=lr,
            beta1=beta1,
            beta2=beta2,
            eps=eps,
            weight_decay=weight_decay,
            bias_correction1=bias_correction1,
            bias_correction2=bias_correction2,
            grad_scale=grad_scale,
        )
