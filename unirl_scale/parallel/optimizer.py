"""ZeRO-1 AdamW on one chunk (Rajbhandari et al. 2020; Loshchilov & Hutter 2019).

Each data-parallel rank owns whole blocks of the flat leafed space and keeps their fp32 master weights and
moments. Replicated parameters are small; every rank keeps and updates them whole. Element i of an update
depends on element i alone, so who owns what changes no bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from unirl_scale.parallel.chunk import Chunk
from unirl_scale.parallel.gradients import Gradients


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamStep:
    """Numbers of one optimizer step; bias corrections are computed on the host in fp64."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    count: int  # 1 for the first step

    @property
    def bias_correction1(self) -> float:
        return 1.0 - self.beta1**self.count

    @property
    def bias_correction2(self) -> float:
        return 1.0 - self.beta2**self.count


@dataclass(slots=True)
class Moments:
    """Master weights and Adam moments of a flat range, fp32."""

    master: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor

    @classmethod
    def of(cls, values: Tensor) -> Moments:
        return cls(values.float().clone(), torch.zeros_like(values), torch.zeros_like(values))

    def tensors(self) -> dict[str, Tensor]:
        return {"master": self.master, "exp_avg": self.exp_avg, "exp_avg_sq": self.exp_avg_sq}


@dataclass(slots=True)
class Reduced:
    """Gradient of one optimizer step after the reduction over data: this rank's shard, and the replicated
    part."""

    shard: Tensor
    replicated: Tensor


class ChunkOptimizer:
    """Optimizer state of one chunk on one rank."""

    def __init__(self, chunk: Chunk) -> None:
        self.chunk = chunk
        dp = chunk.ctx.dp
        self.ranges = chunk.leafed.owned(dp.size)
        self.owned = self.ranges[dp.index]
        self.shard = Moments.of(torch.zeros(len(self.owned), device=chunk.ctx.device))
        self.replicated = Moments.of(torch.zeros(chunk.replicated.numel, device=chunk.ctx.device))

    def load(self, leafed: Tensor, replicated: Tensor) -> None:
        """Start from these fp32 flat values with zero moments."""
        self.shard = Moments.of(leafed[self.owned.start : self.owned.stop])
        self.replicated = Moments.of(replicated)

    def publish(self) -> None:
        """Master weights -> compute weights, gathered over the data-parallel group."""
        chunk = self.chunk
        mine = self.shard.master.to(chunk.ctx.dtype)
        chunk.flat.copy_(chunk.ctx.dp.all_gather_uneven(mine, [len(r) for r in self.ranges]))
        chunk.flat_replicated.copy_(self.replicated.master)

    # ---- reduction --------------------------------------------------------------------------------
    def reduce(
        self, gradients: Gradients, tied_ranges: Sequence[range] | None
    ) -> tuple[Reduced, Tensor | None]:
        """Sum over data slots, in order.

        Args:
            tied_ranges: for the chunk with a tied head, the owners' ranges of the embedding's elements.

        Returns:
            (the gradient here, the tied head's share of the embedding gradient this rank's place owns).
        """
        ctx, nodes = self.chunk.ctx, gradients.nodes()
        shard = ctx.dp_reducer.reduce_scatter(
            nodes[:, : gradients.leafed_numel].contiguous(), [len(r) for r in self.ranges]
        )
        tied = None
        if tied_ranges is not None:
            part = nodes[:, gradients.leafed_numel : gradients.partial_start].contiguous()
            tied = ctx.dp_reducer.reduce_scatter(part, [len(r) for r in tied_ranges])
        rest = ctx.dp_reducer.all_reduce(nodes[:, gradients.partial_start :].contiguous())
        return Reduced(shard, self._finish_replicated(rest, gradients)), tied

    def _finish_replicated(self, rest: Tensor, gradients: Gradients) -> Tensor:
        """Tree over the W leaves of partial gradients; whole ones are already equal everywhere."""
        ctx, chunk = self.chunk.ctx, self.chunk
        split = gradients.whole_start - gradients.partial_start
        out = torch.empty(chunk.replicated.numel, device=ctx.device)
        everyone = ctx.tp.all_gather(rest[:split])
        leaves, start = len(ctx.local_leaves), 0
        for spec in gradients.partial:
            size = leaves * spec.numel
            stacked = everyone[:, start : start + size].contiguous().view(ctx.leaves, spec.numel)
            at = chunk.replicated.offsets[spec.name]
            out[at : at + spec.numel] = ctx.ops.tree_sum(stacked)
            start += size
        for spec in gradients.whole:
            at = chunk.replicated.offsets[spec.name]
            out[at : at + spec.numel] = rest[start : start + spec.numel]
            start += spec.numel
        return out

    # ---- update -----------------------------------------------------------------------------------
    def apply(self, reduced: Reduced, step: AdamStep, grad_scale: float) -> None:
        for start, stop, decay in decay_runs(self.chunk, self.owned):
            a, b = start - self.owned.start, stop - self.owned.start
            self._adamw(self.shard, reduced.shard, slice(a, b), step, grad_scale, decay)
        self._adamw(self.replicated, reduced.replicated, slice(None), step, grad_scale, decay=False)

    def _adamw(
        self, state: Moments, grad: Tensor, at: slice, step: AdamStep, grad_scale: float, decay: bool
    ) -> None:
        self.chunk.ctx.ops.adamw(
            state.master[at],
            state.exp_avg[at],
            state.exp_avg_sq[at],
            grad[at],
            lr=step.lr,
            beta1=step.beta1,
            beta2=step.beta2,
            eps=step.eps,
            weight_decay=step.weight_decay if decay else 0.0,
            bias_correction1=step.bias_correction1,
            bias_correction2=step.bias_correction2,
            grad_scale=grad_scale,
        )


def decay_runs(chunk: Chunk, owned: range) -> list[tuple[int, int, bool]]:
    """Longest runs of an owned range with one weight-decay setting: (start, stop, decay)."""
    runs: list[tuple[int, int, bool]] = []
    for piece in chunk.leafed.pieces(owned):
        decay = chunk.specs[piece.segment.name].decay
        if runs and runs[-1][2] == decay:
            runs[-1] = (runs[-1][0], piece.end, decay)
        else:
            runs.append((piece.start, piece.end, decay))
    return runs
