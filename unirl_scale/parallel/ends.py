"""The two ends of the model: vocabulary-parallel embedding, language-model head, value head.

Log-probabilities: each vocabulary leaf gives (m, s, u) = (max x, sum e^(x-m), sum e^(x-m) (x-m)); every rank
gathers the W triples of a row and finishes with the canonical tree, so that
lse = M + log S, S = sum_w e^(m_w - M) s_w, entropy = log S - U / S, U = sum_w e^(m_w - M) (u_w + (m_w - M)
s_w).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from unirl_scale.core.config import ModelConfig
from unirl_scale.parallel.block import Tensors, add_token_blocks, gather_rows, own_rows
from unirl_scale.parallel.context import ParallelContext
from unirl_scale.parallel.packing import Packed
from unirl_scale.parallel.spec import vocab_rows_per_leaf


class Vocabulary:
    """Which vocabulary rows this rank holds."""

    def __init__(self, model: ModelConfig, context: ParallelContext) -> None:
        rows = vocab_rows_per_leaf(model, context.leaves)
        held = context.local_leaves
        self.first, self.rows = held.start * rows, rows * len(held)
        self.valid = [max(0, min(rows, model.vocab_size - leaf * rows)) for leaf in held]

    def local(self, ids: Tensor) -> Tensor:
        """Global token ids -> rows here, -1 for rows elsewhere and for padding (-1)."""
        here = (ids >= self.first) & (ids < self.first + self.rows)
        return torch.where(here, ids - self.first, torch.full_like(ids, -1))


class Embedding:
    """Vocabulary-parallel lookup. weight [L, v, H] dt."""

    def __init__(self, model: ModelConfig, context: ParallelContext, weight: Tensor) -> None:
        self.ctx, self.weight, self.vocab = context, weight, Vocabulary(model, context)

    def lookup(self, ids: Tensor) -> Tensor:
        """int64 [T] -> [T, H]. Exactly one rank holds each row, so adding the *bit patterns* as integers
        is exact and keeps -0, whatever the order."""
        local = self.vocab.local(ids)
        rows = self.weight.flatten(0, 1).index_select(0, local.clamp(min=0))
        rows = torch.where((local >= 0).unsqueeze(1), rows, torch.zeros_like(rows))
        if self.ctx.tp.size > 1:
            rows = self.ctx.tp.all_reduce_int(rows.view(torch.int32)).view(rows.dtype)
        return rows

    def forward(self, packed: Packed) -> Tensor:
        x = self.lookup(packed.ids)
        return own_rows(self.ctx, x, packed)

    def backward(self, dx: Tensor, packed: Packed, grads: Tensors) -> None:
        full = gather_rows(self.ctx, dx, packed)
        self.ctx.ops.embedding_dw(full, self.vocab.local(packed.ids), grads["embed"].flatten(0, 1))


def _final_norm_backward(
    context: ParallelContext,
    model: ModelConfig,
    dh: Tensor,
    saved: tuple[Tensor, Tensor],
    weight: Tensor,
    packed: Packed,
    grads: Tensors,
) -> Tensor:
    """dh: gradient of the scored rows [R, H]; -> dx of the block output [T or t, H]."""
    x, rstd = saved
    full = torch.zeros(packed.spans.total, model.hidden_size, dtype=dh.dtype, device=dh.device)
    full[packed.score_rows] = dh
    dx, rows = context.ops.rmsnorm_dx(own_rows(context, full, packed), x, weight, rstd)
    add_token_blocks(context, rows, packed, grads["final_norm"])
    return dx


@dataclass(slots=True)
class HeadSaved:
    """What a head keeps for its backward; the scored rows of the normed hidden state are `rows` [R, H]."""

    norm: tuple[Tensor, Tensor]
    rows: Tensor
    logits: Tensor
    lse: Tensor
    entropy: Tensor


class LmHead:
    """Final norm, vocabulary-parallel logits, log-probability and entropy of the scored tokens."""

    def __init__(
        self, model: ModelConfig, context: ParallelContext, norm: Tensor, weight: Tensor, grad_name: str
    ) -> None:
        self.model, self.ctx, self.norm, self.weight = model, context, norm, weight
        self.grad_name, self.vocab = grad_name, Vocabulary(model, context)

    def logits(self, rows: Tensor, inv_temperature: float) -> Tensor:
        """Normed hidden rows [R, H] -> fp32 logits of this rank's columns [R, L * v]."""
        out = self.ctx.ops.linear(rows, self.weight, out_fp32=True)
        return out if inv_temperature == 1.0 else out * inv_temperature

    def normed(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.ctx.ops.rmsnorm(x, self.norm, self.model.norm_eps)

    def score(self, logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """logits [R, L*v] here, targets int64 [R] -> (logprob, entropy, lse), fp32 [R], equal on all tp
        ranks."""
        local = self.vocab.local(targets)
        stats, picked = self.ctx.ops.vocab_stats(logits, len(self.vocab.valid), self.vocab.valid, local)
        stats = self.ctx.all_gather_leaves(stats)
        if self.ctx.tp.size > 1:
            picked = self.ctx.tp.all_reduce_int(picked.view(torch.int32)).view(torch.float32)
        m, s, u = stats.unbind(-1)
        top = m.amax(dim=1)
        shift = m - top.unsqueeze(1)
        grow = torch.exp(shift)
        # A leaf of padding only has shift -inf: its s and u are 0 and must not make 0 * inf.
        carried = torch.where(torch.isinf(shift), torch.zeros_like(shift), shift)
        total = self.ctx.ops.tree_sum((grow * s).t().contiguous())
        moment = self.ctx.ops.tree_sum((grow * (u + carried * s)).t().contiguous())
        log_total = torch.log(total)
        lse = top + log_total
        return picked - lse, log_total - moment / total, lse

    def forward(self, x: Tensor, packed: Packed, inv_temperature: float) -> tuple[Tensor, Tensor, HeadSaved]:
        """x [T or t, H] -> (logprobs [R], entropy [R], saved)."""
        normed, rstd = self.normed(x)
        rows = gather_rows(self.ctx, normed, packed).index_select(0, packed.score_rows)
        logits = self.logits(rows, inv_temperature)
        logprobs, entropy, lse = self.score(logits, packed.score_targets)
        return logprobs, entropy, HeadSaved((x, rstd), rows, logits, lse, entropy)

    def backward(
        self,
        grad_logprob: Tensor,
        grad_entropy: Tensor,
        saved: HeadSaved,
        packed: Packed,
        inv_temperature: float,
        grads: Tensors,
    ) -> Tensor:
        """fp32 [R] gradients of the loss -> dx [T or t, H]."""
        ops, valid = self.ctx.ops, self.vocab.valid
        local = self.vocab.local(packed.score_targets)
        dlogits = ops.vocab_dlogits(
            saved.logits, len(valid), valid, local, saved.lse, saved.entropy, grad_logprob, grad_entropy,
            scale=inv_temperature, dtype=self.ctx.dtype,
        )  # fmt: skip
        ops.linear_dw(dlogits, saved.rows, packed.score_spans, grads[self.grad_name])
        nodes = ops.linear_dx_nodes(dlogits, self.weight, self.ctx.nodes, round_leaf=self.ctx.round_leaf)
        dh = self.ctx.all_reduce(nodes).to(self.ctx.dtype)
        return _final_norm_backward(self.ctx, self.model, dh, saved.norm, self.norm, packed, grads)


class ValueHead:
    """Final norm and a linear map to one value; computed whole on every tp rank."""

    def __init__(
        self, model: ModelConfig, context: ParallelContext, norm: Tensor, weight: Tensor, bias: Tensor
    ) -> None:
        self.model, self.ctx, self.norm, self.weight, self.bias = model, context, norm, weight, bias

    def forward(self, x: Tensor, packed: Packed) -> tuple[Tensor, tuple[tuple[Tensor, Tensor], Tensor]]:
        """x [T or t, H] -> values fp32 [R] of the states before each response token."""
        normed, rstd = self.ctx.ops.rmsnorm(x, self.norm, self.model.norm_eps)
        rows = gather_rows(self.ctx, normed, packed).index_select(0, packed.score_rows)
        weight = self.weight.to(rows.dtype).view(1, 1, -1)
        bias = self.bias.to(rows.dtype).view(1, 1)
        values = self.ctx.ops.linear(rows, weight, bias, out_fp32=True).squeeze(1)
        return values, ((x, rstd), rows)

    def backward(
        self,
        grad: Tensor,
        saved: tuple[tuple[Tensor, Tensor], Tensor],
        packed: Packed,
        grads: Tensors,
    ) -> Tensor:
        """fp32 [R] -> dx [T or t, H]."""
        norm, rows = saved
        dy = grad.unsqueeze(1)
        spans = packed.score_spans
        self.ctx.ops.linear_dw(dy.to(rows.dtype), rows, spans, grads["value_head"].unsqueeze(0))
        self.ctx.ops.sum_tokens(dy, spans, grads["value_bias"])
        dh = (dy * self.weight.to(rows.dtype).float()).to(rows.dtype)
        return _final_norm_backward(self.ctx, self.model, dh, norm, self.norm, packed, grads)
