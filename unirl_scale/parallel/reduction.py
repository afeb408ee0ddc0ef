"""The sum of one step's gradients over data slots, started bucket by bucket while the backward runs.

The members of a communicator must issue the same collectives in the same order, but data-parallel ranks run
different samples at different times, and one may have none. So the order is fixed: chunks downwards, buckets
downwards, as a backward leaves them. A bucket starts when its turn has come and its gradients are complete
here; `start_rest` starts the others, before anything else uses the group. What a bucket adds up to does not
depend on when it started.

Waiting for a peer's bucket inside a backward cannot close a circle: a peer needs, to get there, only work
that precedes that chunk's last backward in its own pipeline.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from unirl_scale.comm.scatter import PendingSum
from unirl_scale.parallel.flat import Bucket
from unirl_scale.parallel.gradients import Gradients
from unirl_scale.parallel.optimizer import ChunkOptimizer, Reduced

IN_FLIGHT = 2  # buckets on the wire; each takes the memory of its nodes once more


@dataclass(slots=True)
class _Turn:
    """A bucket of chunk `part` and where its sum goes; None = where the reducer likes."""

    part: int
    bucket: Bucket
    out: Tensor | None


class Reduction:
    """One step's reduction of all chunks of a rank. Use once.

    Args:
        optimizers, gradients: one a chunk.
    """

    def __init__(self, optimizers: Sequence[ChunkOptimizer], gradients: Sequence[Gradients]) -> None:
        self.optimizers, self.gradients = optimizers, gradients
        self.ctx = optimizers[0].chunk.ctx
        self._shards: list[Tensor] = []
        self._turns: deque[_Turn] = deque()
        self._flying: deque[tuple[_Turn, PendingSum]] = deque()
        self._lowest: dict[int, int] = {}  # part -> lowest layer that the last backward has left
        for part, optimizer in enumerate(optimizers):
            self._add_turns(part, optimizer)

    def _add_turns(self, part: int, optimizer: ChunkOptimizer) -> None:
        buckets = optimizer.buckets
        shard = torch.empty(0)
        outs: Sequence[Tensor | None] = (None,)
        if len(buckets) > 1:
            shard = torch.empty(optimizer.share.numel, device=self.ctx.device)
            outs = optimizer.share.cut(shard)
        self._shards.append(shard)
        self._turns.extendleft(_Turn(part, b, out) for b, out in zip(buckets, outs, strict=True))

    # ---- while the backward runs ------------------------------------------------------------------
    def leave(self, part: int, layer: int) -> None:
        """The last backward of chunk `part` has added all weight gradients of a layer: start what is
        complete."""
        self._lowest[part] = layer
        while self._turns and self._complete(self._turns[0]):
            self._start()

    def start_rest(self) -> None:
        """All backwards are done: start every bucket that has not been."""
        while self._turns:
            self._start()

    def _complete(self, turn: _Turn) -> bool:
        return turn.part in self._lowest and self._lowest[turn.part] <= turn.bucket.layer

    def _start(self) -> None:
        if len(self._flying) == IN_FLIGHT:
            self._finish()
        turn = self._turns.popleft()
        elements = turn.bucket.elements
        nodes = self.gradients[turn.part].nodes(elements.start, elements.stop)
        arriving = self.ctx.dp_reducer.start_reduce_scatter(nodes, turn.bucket.sizes, turn.out)
        self._flying.append((turn, arriving))

    def _finish(self) -> None:
        turn, arriving = self._flying.popleft()
        result = arriving.wait()
        if turn.out is None:
            self._shards[turn.part] = result

    # ---- afterwards -------------------------------------------------------------------------------
    def finish(self, tied_ranges: Sequence[range] | None) -> tuple[list[Reduced], Tensor | None]:
        """Wait for the buckets and reduce what has none.

        Args:
            tied_ranges: with tied embeddings, the owners' ranges of the embedding's elements.

        Returns:
            (the gradient here by chunk, the tied head's share of the embedding gradient this rank's place
            owns, if the head is here).
        """
        self.start_rest()
        while self._flying:
            self._finish()
        reduced, tied = [], None
        for optimizer, gradients, shard in zip(self.optimizers, self.gradients, self._shards, strict=True):
            if tied_ranges is not None and gradients.tied:
                part = gradients.nodes(gradients.leafed_numel, gradients.partial_start)
                tied = self.ctx.dp_reducer.reduce_scatter(part, [len(r) for r in tied_ranges])
            rest = self.ctx.dp_reducer.all_reduce(gradients.nodes(gradients.partial_start, gradients.numel))
            reduced.append(Reduced(shard, self._replicated(optimizer, gradients, rest)))
        return reduced, tied

    def _replicated(self, optimizer: ChunkOptimizer, gradients: Gradients, rest: Tensor) -> Tensor:
        """Tree over the W leaves of partial gradients; whole ones are already equal everywhere."""
        ctx, space = self.ctx, optimizer.chunk.replicated
        split = gradients.whole_start - gradients.partial_start
        out = torch.empty(space.numel, device=ctx.device)
        everyone = ctx.tp.all_gather(rest[:split])
        leaves, start = len(ctx.local_leaves), 0
        for spec in gradients.partial:
            size = leaves * spec.numel
            stacked = everyone[:, start : start + size].contiguous().view(ctx.leaves, spec.numel)
            at = space.offsets[spec.name]
            out[at : at + spec.numel] = ctx.ops.tree_sum(stacked)
            start += size
        for spec in gradients.whole:
            at = space.offsets[spec.name]
            out[at : at + spec.numel] = rest[start : start + spec.numel]
            start += spec.numel
        return out
