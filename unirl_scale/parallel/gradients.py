"""Weight gradients of one chunk: fp32 accumulators a data slot, joined by the canonical tree over slots.

One flat buffer a slot holds four regions:
leafed parameters | tied head (the head's share of tied embeddings) | partial ([L, ...] of replicated ones) |
whole. Samples add serially inside a slot; a finished slot is pushed into the streaming tree, so at most O(log
D) buffers live. The last slot stays apart: the tree is finished over it part by part, as parts are complete.
"""

from __future__ import annotations

import torch
from torch import Tensor

from unirl_scale.comm.accumulate import StreamingTree
from unirl_scale.parallel.block import Tensors
from unirl_scale.parallel.chunk import TIED, Chunk


class Gradients:
    """Accumulators of one chunk over one optimizer step.

    Args:
        slots: absolute data slots of this rank.
        total: D.
    """

    def __init__(self, chunk: Chunk, slots: range, total: int) -> None:
        self.chunk = chunk
        specs = list(chunk.specs.values())
        leaves = len(chunk.ctx.local_leaves)
        self.tied = leaves * chunk.tied_spec.numel if chunk.tied_spec else 0
        self.partial = [s for s in specs if not s.leafed and s.partial]
        self.whole = [s for s in specs if not s.leafed and not s.partial]
        self.leafed_numel = chunk.leafed.numel
        self.partial_start = self.leafed_numel + self.tied
        self.whole_start = self.partial_start + sum(s.numel for s in self.partial) * leaves
        self.numel = self.whole_start + sum(s.numel for s in self.whole)
        self.tree = StreamingTree(slots.start, slots.stop, total)
        self._unclosed = len(slots)
        self._flat: Tensor | None = None
        self._views: Tensors = {}

    def views(self) -> Tensors:
        """The open slot's accumulators by parameter name, created at zero on first use."""
        if self._flat is None:
            self._flat = torch.zeros(self.numel, device=self.chunk.ctx.device)
            self._views = self._cut(self._flat)
        return self._views

    def close_slot(self) -> None:
        """The open slot has all its samples (perhaps none): push it into the tree, unless it is the last."""
        self.views()
        assert self._flat is not None
        self._unclosed -= 1
        if self._unclosed:
            self.tree.push(self._flat)
            self._flat, self._views = None, {}

    def nodes(self, start: int, stop: int) -> Tensor:
        """fp32 [n_nodes, stop - start]: the maximal nodes over this rank's slots of flat elements that are
        complete; each element once. Consumes them."""
        if self._flat is None:  # no slots here
            return torch.empty(0, stop - start, device=self.chunk.ctx.device)
        nodes = self.tree.finish(self._flat, slice(start, stop))
        return nodes[0].unsqueeze(0) if len(nodes) == 1 else torch.stack(nodes)

    def _cut(self, flat: Tensor) -> Tensors:
        chunk, leaves = self.chunk, len(self.chunk.ctx.local_leaves)
        views: Tensors = {}
        for spec in chunk.specs.values():
            if spec.leafed:
                start = chunk.leafed.offsets[spec.name]
                views[spec.name] = flat[start : start + leaves * spec.numel].view(leaves, *spec.shape)
        if chunk.tied_spec is not None:
            shape = (leaves, *chunk.tied_spec.shape)
            views[TIED] = flat[self.leafed_numel : self.partial_start].view(shape)
        start = self.partial_start
        for spec in self.partial:
            views[spec.name] = flat[start : start + leaves * spec.numel].view(leaves, *spec.shape)
            start += leaves * spec.numel
        for spec in self.whole:
            views[spec.name] = flat[start : start + spec.numel].view(spec.shape)
            start += spec.numel
        return views
