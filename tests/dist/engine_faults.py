"""What the equality tests must notice: engines with one small thing wrong, on rank 0 unless it says
otherwise."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from unirl_scale.comm.fast import FastReducer
from unirl_scale.comm.tree import split_contiguous
from unirl_scale.kernels.reference import ReferenceOps
from unirl_scale.kernels.spans import Spans
from unirl_scale.parallel.context import ParallelContext
from unirl_scale.parallel.engine import MicroResults, NativeEngine, TokenLoss
from unirl_scale.parallel.gradients import Gradients
from unirl_scale.parallel.samples import Sample, SlotPlan


class FlippedForwardBit(ReferenceOps):
    """One mantissa bit of one product is wrong, once, in the first row-parallel layer."""

    done = False

    def row_linear_nodes(self, x: Tensor, w: Tensor, nodes: Sequence[tuple[int, int]], **kw: bool) -> Tensor:
        out = super().row_linear_nodes(x, w, nodes, **kw)
        if not self.done:
            self.done = True
            out.view(torch.int32)[0, 0, 0] ^= 1 << 12
        return out


class SwappedLeaves(ReferenceOps):
    """Leaves 1 and 2 of this rank change places in the tree: (0 + 2) + (1 + 3) instead of (0 + 1) + (2 +
    3)."""

    def row_linear_nodes(self, x: Tensor, w: Tensor, nodes: Sequence[tuple[int, int]], **kw: bool) -> Tensor:
        leaves, _, k = w.shape
        order = [0, 2, 1, *range(3, leaves)]
        swapped = x.unflatten(1, (leaves, k))[:, order].flatten(1)
        return super().row_linear_nodes(swapped, w[order].contiguous(), nodes, **kw)


class SwappedSiblings(SwappedLeaves):
    """Leaves 0 and 1 change places: a + b = b + a, the swap that no test can see and none needs to."""

    def row_linear_nodes(self, x: Tensor, w: Tensor, nodes: Sequence[tuple[int, int]], **kw: bool) -> Tensor:
        leaves, _, k = w.shape
        order = [1, 0, *range(2, leaves)]
        swapped = x.unflatten(1, (leaves, k))[:, order].flatten(1)
        return ReferenceOps.row_linear_nodes(self, swapped, w[order].contiguous(), nodes, **kw)


class BrokenGradient(ReferenceOps):
    """Gradients of column-parallel weights are NaN on this rank while armed; the loss stays finite."""

    armed = True

    def linear_dw(self, dy: Tensor, x: Tensor, spans: Spans, out: Tensor) -> None:
        super().linear_dw(dy, x, spans, out)
        if self.armed:
            out[0, 0, 0] = torch.nan


class FlippedBit(Gradients):
    """One mantissa bit of one element of this rank's first node is wrong: the largest of the last layer's
    FFN gradient, so that the sum over slots cannot round the difference away."""

    def nodes(self, start: int, stop: int) -> Tensor:
        out = super().nodes(start, stop)
        name = f"layers.{self.chunk.layers.stop - 1}.ffn_down"
        first = self.chunk.leafed.offsets[name]
        last = first + len(self.chunk.ctx.local_leaves) * self.chunk.specs[name].numel
        if start <= first and last <= stop:
            view = out[0, first - start : last - start]
            view.view(torch.int32)[view.abs().argmax()] ^= 1 << 12
        return out


class FlippedGradientBit(NativeEngine):
    """`FlippedBit` in the last chunk of this rank."""

    def open_gradients(self, plan: SlotPlan) -> list[Gradients]:
        last = FlippedBit(self.chunks[-1], plan.slots, self.ctx.slots)
        return [*super().open_gradients(plan)[:-1], last]


class Dropped(Gradients):
    """Data slots that never reach the sum."""

    def nodes(self, start: int, stop: int) -> Tensor:
        return super().nodes(start, stop).zero_()


class DroppedSlot(NativeEngine):
    """This rank's data slots never reach the sum."""

    def open_gradients(self, plan: SlotPlan) -> list[Gradients]:
        return [Dropped(c, plan.slots, self.ctx.slots) for c in self.chunks]


class EarlyBucket(NativeEngine):
    """Buckets start in the backward of the last micro-batch but one of this rank."""

    def completing_micro(self, plan: SlotPlan) -> int | None:
        last = super().completing_micro(plan)
        assert last is not None
        return last - 1


class SwappedSamples(NativeEngine):
    """The first sample of the first slot and the last one of the last slot change places; each keeps its
    loss."""

    def accumulate(self, samples: Sequence[Sample], token_loss: TokenLoss) -> MicroResults:
        order = list(range(len(samples)))
        order[0], order[-1] = order[-1], order[0]
        results = super().accumulate(
            [samples[i] for i in order],
            lambda numbers, scores: token_loss([order[i] for i in numbers], scores),
        )
        loss = {order[i]: value for i, value in results.loss.items()}
        diagnostics = {
            name: {order[i]: value for i, value in values.items()}
            for name, values in results.diagnostics.items()
        }
        return MicroResults(loss, diagnostics, results.scores)


def vendor_sum_over_data(context: ParallelContext) -> ParallelContext:
    """One float SUM collective in place of the tree over data slots; on every rank."""
    ranges = split_contiguous(context.slots, context.dp.size)
    return replace(context, dp_reducer=FastReducer(context.dp, ranges))


def vendor_sum_over_leaves(context: ParallelContext) -> ParallelContext:
    """One float SUM collective in place of the tree over model leaves; on every rank."""
    ranges = split_contiguous(context.leaves, context.tp.size)
    return replace(context, tp_reducer=FastReducer(context.tp, ranges))


def same(context: ParallelContext) -> ParallelContext:
    return context


@dataclass(frozen=True, kw_only=True)
class Fault:
    """Where an engine deviates."""

    ops: Callable[[str], ReferenceOps] = ReferenceOps
    engine: type[NativeEngine] = NativeEngine
    context: Callable[[ParallelContext], ParallelContext] = same


FAULTS = {
    "": Fault(),
    "flipped_forward_bit": Fault(ops=FlippedForwardBit),
    "flipped_gradient_bit": Fault(engine=FlippedGradientBit),
    "swapped_leaves": Fault(ops=SwappedLeaves),
    "swapped_siblings": Fault(ops=SwappedSiblings),
    "broken_gradient": Fault(ops=BrokenGradient),
    "early_bucket": Fault(engine=EarlyBucket),
    "dropped_slot": Fault(engine=DroppedSlot),
    "swapped_samples": Fault(engine=SwappedSamples),
    "vendor_sum_over_data": Fault(context=vendor_sum_over_data),
    "vendor_sum_over_leaves": Fault(context=vendor_sum_over_leaves),
}
