"""A model chunk: the consecutive layers of one pipeline stage (or of one of its interleaved parts), with
their weights.

Weights lie in one flat compute-dtype tensor (leafed parameters) and one flat fp32 tensor (replicated ones),
so that resharding, the sharded optimizer and digests move ranges, not names. After an optimizer step the
leafed ones arrive bucket by bucket; a forward waits for a bucket just before it needs it, everyone else who
asks for `flat` or `weights` waits for all.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from unirl_scale.comm.groups import Pending
from unirl_scale.core.config import ModelConfig
from unirl_scale.parallel.block import Block, Rope, Saved, Tensors
from unirl_scale.parallel.context import ParallelContext
from unirl_scale.parallel.ends import Embedding, LmHead, ValueHead
from unirl_scale.parallel.flat import Bucket, FlatSpace
from unirl_scale.parallel.packing import Packed
from unirl_scale.parallel.spec import ParamSpec, Rows, initial_leaf, parameter_specs

Head = Literal["lm", "value"]
TIED = "embed@head"  # the last chunk's copy of tied embeddings, when the first chunk is another one


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkRange:
    """Layers [start, stop) and whether the embedding and the head belong here."""

    start: int
    stop: int
    first: bool
    last: bool


def chunk_ranges(num_layers: int, chunks: int, split: tuple[int, ...] = ()) -> list[ChunkRange]:
    """Cut the layers into `chunks` consecutive parts: by `split`, or as even as it goes, larger parts
    first."""
    base, extra = divmod(num_layers, chunks)
    counts = split or tuple(base + (i < extra) for i in range(chunks))
    out, start = [], 0
    for i, count in enumerate(counts):
        out.append(ChunkRange(start=start, stop=start + count, first=i == 0, last=i == chunks - 1))
        start += count
    return out


def chunk_specs(
    model: ModelConfig, leaves: int, head: Head, layers: ChunkRange
) -> list[tuple[int, ParamSpec]]:
    """(canonical number, spec) of the parameters a chunk owns."""
    inside = []
    for number, spec in enumerate(parameter_specs(model, leaves, head)):
        mine = layers.start <= spec.layer < layers.stop
        if mine or (spec.layer == -1 and layers.first) or (spec.layer == model.num_layers and layers.last):
            inside.append((number, spec))
    return inside


@dataclass(slots=True)
class ChunkSaved:
    """What a chunk keeps of one micro-batch: inputs of its blocks only, when it recomputes."""

    rope: Rope
    blocks: list[Saved | Tensor]
    head: Any = None


class Chunk:
    """Layers of one role on one rank.

    Args:
        rope: table over all positions (`Rope.table`).
        inv_temperature: logits are multiplied by it before the softmax, in training as in sampling.
        recompute: keep only block inputs and run each block's forward again in backward.
    """

    def __init__(
        self,
        model: ModelConfig,
        context: ParallelContext,
        head: Head,
        layers: ChunkRange,
        rope: Rope,
        *,
        inv_temperature: float = 1.0,
        recompute: bool = False,
    ) -> None:
        self.model, self.ctx, self.head_kind, self.layers = model, context, head, layers
        self.rope, self.inv_temperature, self.recompute = rope, inv_temperature, recompute
        specs = chunk_specs(model, context.leaves, head, layers)
        self.leafed = FlatSpace([(n, s) for n, s in specs if s.leafed], context.local_leaves)
        self.replicated = FlatSpace([(n, s) for n, s in specs if not s.leafed], context.local_leaves)
        self.specs = {s.name: s for _, s in specs}
        self._flat = torch.zeros(self.leafed.numel, dtype=context.dtype, device=context.device)
        self.flat_replicated = torch.zeros(self.replicated.numel, device=context.device)
        self._weights: Tensors = {}
        self._arriving: deque[tuple[Bucket, Pending]] = deque()
        for name, spec in self.specs.items():
            self._weights[name] = self._view(self._flat if spec.leafed else self.flat_replicated, spec)
        self.tied_spec: ParamSpec | None = None
        if model.tie_embeddings and head == "lm" and layers.last:
            self.tied_spec = parameter_specs(model, context.leaves, head)[0]
            if not layers.first:
                shape = (len(context.local_leaves), *self.tied_spec.shape)
                self._weights[TIED] = torch.zeros(shape, dtype=context.dtype, device=context.device)
        self._build()

    def _view(self, flat: Tensor, spec: ParamSpec) -> Tensor:
        if spec.leafed:
            start, count = self.leafed.offsets[spec.name], len(self.ctx.local_leaves)
            return flat[start : start + count * spec.numel].view(count, *spec.shape)
        start = self.replicated.offsets[spec.name]
        return flat[start : start + spec.numel].view(spec.shape)

    def _build(self) -> None:
        model, ctx, w = self.model, self.ctx, self._weights
        self.embedding = Embedding(model, ctx, w["embed"]) if self.layers.first else None
        self.blocks = [
            Block(model, ctx, block_names(w, i)) for i in range(self.layers.start, self.layers.stop)
        ]
        self.head: LmHead | ValueHead | None = None
        if self.layers.last and self.head_kind == "value":
            self.head = ValueHead(model, ctx, w["final_norm"], w["value_head"].view(-1), w["value_bias"])
        elif self.layers.last:
            name = "lm_head" if self.tied_spec is None else TIED
            weight = w[name] if name in w else w["embed"]
            self.head = LmHead(model, ctx, w["final_norm"], weight, name)

    def initial(self, rows: Rows) -> tuple[Tensor, Tensor]:
        """Values of the flat spaces in fp32: (leafed, replicated). Does not write the weights."""
        out = []
        for space in (self.leafed, self.replicated):
            flat = torch.zeros(space.numel)
            for s in space.segments:
                leaf = initial_leaf(self.specs[s.name], s.leaf, self.ctx.leaves, rows)
                flat[s.offset : s.offset + s.numel] = leaf.reshape(-1)
            out.append(flat.to(self.ctx.device))
        return out[0], out[1]

    # ---- weights ----------------------------------------------------------------------------------
    @property
    def flat(self) -> Tensor:
        """All leafed weights, in the compute dtype."""
        self.settle()
        return self._flat

    @property
    def weights(self) -> Tensors:
        """Views of all weights by name."""
        return self.settled()

    def settled(self, layer: int | None = None) -> Tensors:
        """Views of all weights by name, those of `layer` and of the layers below it in place."""
        self.settle(layer)
        return self._weights

    def expect(self, bucket: Bucket, weights: Pending) -> None:
        """A bucket's new weights, [owners, longest share], are on their way; buckets in ascending order."""
        self._arriving.append((bucket, weights))

    def settle(self, layer: int | None = None) -> None:
        """Wait for the weights of `layer` and of those below it; None = for all."""
        while self._arriving and (layer is None or self._arriving[0][0].layer <= layer):
            bucket, weights = self._arriving.popleft()
            for part, row in zip(bucket.owned, weights.wait(), strict=True):
                self._flat[part.start : part.stop] = row[: len(part)]

    # ---- forward and backward ---------------------------------------------------------------------
    def forward(self, x: Tensor | None, packed: Packed) -> tuple[Any, ChunkSaved]:
        """Hidden rows in (None for the first chunk) -> hidden rows, or for the last chunk
        (logprobs, entropy) or values of the scored rows; and what backward needs."""
        if self.embedding is not None:
            self.settle(-1)
            x = self.embedding.forward(packed)
        assert x is not None
        saved = ChunkSaved(self.rope.at(packed.positions), [])
        for layer, block in enumerate(self.blocks, self.layers.start):
            self.settle(layer)
            y, kept = block.forward(x, packed, saved.rope)
            saved.blocks.append(x if self.recompute else kept)
            x = y
        self.settle()
        if isinstance(self.head, LmHead):
            logprobs, entropy, saved.head = self.head.forward(x, packed, self.inv_temperature)
            return (logprobs, entropy), saved
        if isinstance(self.head, ValueHead):
            values, saved.head = self.head.forward(x, packed)
            return values, saved
        return x, saved

    def backward(
        self, dy: Any, saved: ChunkSaved, packed: Packed, grads: Tensors, left: Callable[[int], None]
    ) -> Tensor | None:
        """Gradient of `forward`'s first result -> gradient of its input (None for the first chunk).

        Args:
            left: told each layer that has added its weight gradients: num_layers for the head, then the
                layers downwards, -1 for the embedding.
        """
        if isinstance(self.head, LmHead):
            dx = self.head.backward(dy[0], dy[1], saved.head, packed, self.inv_temperature, grads)
            left(self.model.num_layers)
        elif isinstance(self.head, ValueHead):
            dx = self.head.backward(dy, saved.head, packed, grads)
            left(self.model.num_layers)
        else:
            dx = dy
        for i in reversed(range(len(self.blocks))):
            kept = saved.blocks[i]
            if isinstance(kept, Tensor):
                _, kept = self.blocks[i].forward(kept, packed, saved.rope)
            layer = self.layers.start + i
            dx = self.blocks[i].backward(dx, kept, packed, saved.rope, block_names(grads, layer))
            saved.blocks[i] = dx  # frees the block's activations
            left(layer)
        if self.embedding is not None:
            self.embedding.backward(dx, packed, grads)
            left(-1)
            return None
        return dx


def block_names(tensors: Tensors, layer: int) -> Tensors:
    """Entries of one layer, without their prefix."""
    prefix = f"layers.{layer}."
    return {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}
