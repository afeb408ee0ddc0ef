"""ZeRO-1 AdamW on one chunk (Rajbhandari et al. 2020; Loshchilov & Hutter 2019).

Each data-parallel rank owns whole blocks of every bucket of the flat leafed space and keeps their fp32 master
weights and moments. Replicated parameters are small; every rank keeps and updates them whole. Element i of an
update depends on element i alone, so who owns what changes no bit.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from unirl_scale.parallel.chunk import Chunk
from unirl_scale.parallel.flat import Share, shares


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
        ctx = chunk.ctx
        self.buckets = chunk.leafed.buckets(ctx.dp.size, ctx.bucket_elements)
        self.shares = shares(self.buckets)
        self.share = self.shares[ctx.dp.index]
        self.shard = Moments.of(torch.zeros(self.share.numel, device=ctx.device))
        self.replicated = Moments.of(torch.zeros(chunk.replicated.numel, device=ctx.device))

    def load(self, leafed: Tensor, replicated: Tensor) -> None:
        """Start from these fp32 flat values with zero moments."""
        self.shard = Moments.of(self.share.take(leafed))
        self.replicated = Moments.of(replicated)

    def publish(self) -> None:
        """Start master weights -> compute weights, gathered over the data-parallel group, bucket by bucket
        in the order in which a forward needs them. The chunk waits where it reads them."""
        chunk, dp = self.chunk, self.chunk.ctx.dp
        chunk.settle()
        mine = self.share.cut(self.shard.master.to(chunk.ctx.dtype))
        for bucket, part in zip(self.buckets, mine, strict=True):
            chunk.expect(bucket, dp.start_all_gather_uneven(part, bucket.sizes))
        chunk.flat_replicated.copy_(self.replicated.master)

    # ---- update -----------------------------------------------------------------------------------
    def apply(self, reduced: Reduced, step: AdamStep, grad_scale: float) -> None:
        for start, stop, decay in decay_runs(self.chunk, self.share):
            self._adamw(self.shard, reduced.shard, slice(start, stop), step, grad_scale, decay)
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


def decay_runs(chunk: Chunk, share: Share) -> list[tuple[int, int, bool]]:
    """Longest runs of a shard with one weight-decay setting: (start, stop, decay)."""
    runs: list[tuple[int, int, bool]] = []
    stop = 0
    for piece in chunk.leafed.pieces(*share.ranges):
        start, stop = stop, stop + piece.numel
        decay = chunk.specs[piece.segment.name].decay
        if runs and runs[-1][2] == decay:
            runs[-1] = (runs[-1][0], stop, decay)
        else:
            runs.append((start, stop, decay))
    return runs
