"""One transformer block: forward, hand-written backward, prefill and decode, over the same pieces.

Gradients are written by hand rather than taped, because every sum that a layout can split (row-parallel
forward, column-parallel dX, weight gradients) must go through the canonical tree and the per-sample
accumulation.
Shapes: T packed rows (T / tp under sequence parallelism, written t), H hidden, L leaves here.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from unirl_scale.core.config import ModelConfig
from unirl_scale.kernels.spans import Spans
from unirl_scale.parallel.context import ParallelContext
from unirl_scale.parallel.kv_cache import CachedRows, LayerPages
from unirl_scale.parallel.packing import Packed

Tensors = dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary tables (Su et al. 2021, eq. 34), fp32 [rows, d/2]: of all positions, or of the rows at hand."""

    cos: Tensor
    sin: Tensor

    @classmethod
    def table(cls, model: ModelConfig, positions: int, device: torch.device) -> Rope:
        """Angles in fp64 on the host, so that they are the same for every vendor; rounded once."""
        half = model.head_dim // 2
        exponent = torch.arange(half, dtype=torch.float64) / half
        angle = torch.arange(positions, dtype=torch.float64).unsqueeze(1) * model.rope_theta**-exponent
        return cls(angle.cos().float().to(device), angle.sin().float().to(device))

    def at(self, positions: Tensor) -> Rope:
        return Rope(self.cos[positions], self.sin[positions])


@dataclass(slots=True)
class Qkv:
    """What attention reads, and what its backward needs to return to the fused projection."""

    raw_q: Tensor  # before qk-norm and rope; only kept for qk_norm
    raw_k: Tensor
    q_rstd: Tensor | None
    k_rstd: Tensor | None
    q: Tensor
    k: Tensor
    v: Tensor


@dataclass(slots=True)
class Saved:
    """Activations of one block kept for its backward."""

    x: Tensor
    rstd1: Tensor
    n1: Tensor  # full rows
    qkv: Qkv
    o: Tensor
    lse: Tensor
    x2: Tensor
    rstd2: Tensor
    n2: Tensor  # full rows
    gate_up: Tensor


class Block:
    """A transformer layer on one rank.

    Args:
        weights: name (without the "layers.i." prefix) -> tensor as parallel/spec.py lays it out.
    """

    def __init__(self, model: ModelConfig, context: ParallelContext, weights: Tensors) -> None:
        self.model, self.ctx, self.w = model, context, weights
        self.ops = context.ops
        leaves = context.leaves
        self.q_heads, self.kv_heads = model.num_heads // leaves, model.num_kv_heads // leaves
        self.scale = model.head_dim**-0.5

    # ---- forward ----------------------------------------------------------------------------------
    def forward(self, x: Tensor, packed: Packed, rope: Rope) -> tuple[Tensor, Saved]:
        """x [T or t, H] -> (y, what backward needs)."""
        n1_own, rstd1 = self.ops.rmsnorm(x, self.w["attn_norm"], self.model.norm_eps)
        n1 = self._gather(n1_own, packed)
        qkv = self.project_qkv(n1, rope)
        o, lse = self.ops.attention(qkv.q, qkv.k, qkv.v, packed.spans, self.scale)
        x2, n2_own, rstd2 = self._add_norm(x, self._reduce(self.attention_out(o), packed))
        n2 = self._gather(n2_own, packed)
        gate_up, act = self.feed_forward(n2)
        y = self.ops.add(x2, self._reduce(self._down(act), packed))
        return y, Saved(x, rstd1, n1, qkv, o, lse, x2, rstd2, n2, gate_up)

    def prefill(self, x: Tensor, spans: Spans, rope: Rope) -> tuple[Tensor, Tensor, Tensor]:
        """Rollout over whole prompts: x [T, H] -> (y, k, v [T, kv heads here, d])."""
        n1, _ = self.ops.rmsnorm(x, self.w["attn_norm"], self.model.norm_eps)
        qkv = self.project_qkv(n1, rope)
        o, _ = self.ops.attention(qkv.q, qkv.k, qkv.v, spans, self.scale)
        return self._finish_rows(x, o), qkv.k, qkv.v

    def decode(self, x: Tensor, rope: Rope, pages: LayerPages, at: CachedRows) -> Tensor:
        """One new token of each of B samples, x [B, H]; writes its k and v to the cache."""
        n1, _ = self.ops.rmsnorm(x, self.w["attn_norm"], self.model.norm_eps)
        qkv = self._normed_qkv(n1)
        q = self.ops.rope_to_pages(qkv.q, qkv.k, qkv.v, rope.cos, rope.sin, pages.k, pages.v, at.slots)
        o = self.ops.attention_decode(q, pages.k, pages.v, at.table, at.lengths, self.scale)
        return self._finish_rows(x, o)

    def _finish_rows(self, x: Tensor, o: Tensor) -> Tensor:
        x2, n2, _ = self._add_norm(x, self.ctx.all_reduce(self.attention_out(o)))
        _, act = self.feed_forward(n2)
        return self.ops.add(x2, self.ctx.all_reduce(self._down(act)))

    def _add_norm(self, x: Tensor, delta: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The first residual connection and the norm before the feed-forward: (x2, n2, rstd2)."""
        return self.ops.add_rmsnorm(x, delta, self.w["ffn_norm"], self.model.norm_eps)

    def project_qkv(self, n1: Tensor, rope: Rope) -> Qkv:
        """[T, H] -> q [T, heads here, d], k and v [T, kv heads here, d], normed and rotated."""
        qkv = self._normed_qkv(n1)
        qkv.q, qkv.k = (self.ops.rope(t, rope.cos, rope.sin) for t in (qkv.q, qkv.k))
        return qkv

    def _normed_qkv(self, n1: Tensor) -> Qkv:
        """`project_qkv` before the rotation."""
        rows, d = n1.shape[0], self.model.head_dim
        fused = self.ops.linear(n1, self.w["qkv"], self.w.get("qkv_bias"))
        fused = fused.view(rows, -1, self.q_heads + 2 * self.kv_heads, d)
        raw_q, raw_k, v = (
            t.reshape(rows, -1, d) for t in fused.split([self.q_heads, self.kv_heads, self.kv_heads], dim=2)
        )
        q, k, q_rstd, k_rstd = raw_q, raw_k, None, None
        if self.model.qk_norm:
            q, q_rstd = self.ops.rmsnorm(raw_q, self.w["q_norm"], self.model.norm_eps)
            k, k_rstd = self.ops.rmsnorm(raw_k, self.w["k_norm"], self.model.norm_eps)
        return Qkv(raw_q, raw_k, q_rstd, k_rstd, q, k, v)

    def attention_out(self, o: Tensor) -> Tensor:
        return self.ops.row_linear_nodes(
            o.flatten(1), self.w["attn_out"], self.ctx.nodes, round_leaf=self.ctx.round_leaf
        )

    def feed_forward(self, n2: Tensor) -> tuple[Tensor, Tensor]:
        """[T, H] -> (gate and up [T, L, 2, f], silu(gate) * up [T, L * f])."""
        fused = self.ops.linear(n2, self.w["gate_up"])
        gate_up = fused.view(n2.shape[0], self.w["gate_up"].shape[0], 2, -1)
        return gate_up, self.ops.swiglu(gate_up).flatten(1)

    def _down(self, act: Tensor) -> Tensor:
        return self.ops.row_linear_nodes(
            act, self.w["ffn_down"], self.ctx.nodes, round_leaf=self.ctx.round_leaf
        )

    # ---- backward ---------------------------------------------------------------------------------
    def backward(self, dy: Tensor, saved: Saved, packed: Packed, rope: Rope, grads: Tensors) -> Tensor:
        """dy [T or t, H] -> dx; adds this micro-batch's weight gradients into `grads` (fp32, `weights`'
        shapes)."""
        dn2 = self._ffn_backward(dy, saved, packed, grads)
        dx2 = self._norm_backward(dn2, dy, saved.x2, saved.rstd2, "ffn_norm", packed, grads)
        dn1 = self._attention_backward(dx2, saved, packed, rope, grads)
        return self._norm_backward(dn1, dx2, saved.x, saved.rstd1, "attn_norm", packed, grads)

    def _ffn_backward(self, dy: Tensor, saved: Saved, packed: Packed, grads: Tensors) -> Tensor:
        full = self._gather(dy, packed)
        dact = self.ops.row_linear_dx(full, self.w["ffn_down"])
        rows, leaves, _, width = saved.gate_up.shape
        dgu, act = self.ops.swiglu_dx(dact.view(rows, leaves, width), saved.gate_up)
        self.ops.row_linear_dw(full, act.flatten(1), packed.spans, grads["ffn_down"])
        dgu = dgu.flatten(1)
        self.ops.linear_dw(dgu, saved.n2, packed.spans, grads["gate_up"])
        return self._dx(dgu, "gate_up", packed)

    def _attention_backward(
        self, dy: Tensor, saved: Saved, packed: Packed, rope: Rope, grads: Tensors
    ) -> Tensor:
        full, qkv = self._gather(dy, packed), saved.qkv
        do = self.ops.row_linear_dx(full, self.w["attn_out"]).view(saved.o.shape)
        self.ops.row_linear_dw(full, saved.o.flatten(1), packed.spans, grads["attn_out"])
        dq, dk, dv = self.ops.attention_dx(
            do, qkv.q, qkv.k, qkv.v, saved.o, saved.lse, packed.spans, self.scale
        )
        dq = self.ops.rope(dq, rope.cos, rope.sin, inverse=True)
        dk = self.ops.rope(dk, rope.cos, rope.sin, inverse=True)
        if qkv.q_rstd is not None and qkv.k_rstd is not None:
            dq = self._head_norm_backward(dq, qkv.raw_q, qkv.q_rstd, "q_norm", packed, grads)
            dk = self._head_norm_backward(dk, qkv.raw_k, qkv.k_rstd, "k_norm", packed, grads)
        rows, leaves, d = dq.shape[0], len(self.ctx.local_leaves), self.model.head_dim
        fused = torch.cat([t.view(rows, leaves, -1, d) for t in (dq, dk, dv)], dim=2).flatten(1)
        self.ops.linear_dw(fused, saved.n1, packed.spans, grads["qkv"])
        if "qkv_bias" in self.w:
            self.ops.sum_tokens(fused, packed.spans, grads["qkv_bias"].view(-1))
        return self._dx(fused, "qkv", packed)

    def _dx(self, dy: Tensor, name: str, packed: Packed) -> Tensor:
        nodes = self.ops.linear_dx_nodes(dy, self.w[name], self.ctx.nodes, round_leaf=self.ctx.round_leaf)
        return self._reduce(nodes, packed)

    def _norm_backward(
        self, dn: Tensor, beside: Tensor, x: Tensor, rstd: Tensor, name: str, packed: Packed, grads: Tensors
    ) -> Tensor:
        """Gradient of the residual stream before a norm: `beside`, which passes it by, plus what passes
        through."""
        dx, rows = self.ops.rmsnorm_dx(dn, x, self.w[name], rstd, beside)
        add_token_blocks(self.ctx, rows, packed, grads[name])
        return dx

    def _head_norm_backward(
        self, dn: Tensor, x: Tensor, rstd: Tensor, name: str, packed: Packed, grads: Tensors
    ) -> Tensor:
        """qk-norm: one weight [d] for all heads; leaf w adds its own heads, tokens first, sample by
        sample."""
        dx, rows = self.ops.rmsnorm_dx(dn, x, self.w[name], rstd)
        leaves = len(self.ctx.local_leaves)
        for start, stop in zip(packed.spans.offsets, packed.spans.offsets[1:]):
            by_head = self.ops.tree_sum(rows[start:stop]).view(leaves, -1, self.model.head_dim)
            grads[name] += self.ops.tree_sum(by_head.transpose(0, 1).contiguous())
        return dx

    # ---- tensor-parallel edges --------------------------------------------------------------------
    def _gather(self, x: Tensor, packed: Packed) -> Tensor:
        return gather_rows(self.ctx, x, packed)

    def _reduce(self, nodes: Tensor, packed: Packed) -> Tensor:
        if not self.ctx.sequence_parallel:
            return self.ctx.all_reduce(nodes)
        if packed.scatter_index is not None:
            nodes = nodes.index_select(1, packed.scatter_index)
        return self.ctx.reduce_scatter(nodes)


def gather_rows(context: ParallelContext, x: Tensor, packed: Packed) -> Tensor:
    """Under sequence parallelism, this rank's rows -> all rows in packed order; otherwise x itself."""
    if not context.sequence_parallel:
        return x
    full = context.all_gather_rows(x)
    return full if packed.gather_index is None else full.index_select(0, packed.gather_index)


def own_rows(context: ParallelContext, x: Tensor, packed: Packed) -> Tensor:
    """Inverse of `gather_rows`: all rows -> under sequence parallelism this rank's, otherwise x itself."""
    if not context.sequence_parallel or packed.own_rows is None:
        return x
    return x.index_select(0, packed.own_rows)


def add_token_blocks(context: ParallelContext, rows: Tensor, packed: Packed, out: Tensor) -> None:
    """Per-row weight gradients fp32, of all rows [T, H] or under sequence parallelism of this rank's token
    blocks [T / tp, H] -> out [L, H], sample by sample."""
    if not context.sequence_parallel and packed.own_rows is not None:
        rows = rows.index_select(0, packed.own_rows)
    leaves, start = len(context.local_leaves), 0
    for n in packed.own_lengths:
        blocks = rows[start : start + n].view(leaves, n // leaves, -1)
        out += context.ops.tree_sum(blocks.transpose(0, 1).contiguous())
        start += n
