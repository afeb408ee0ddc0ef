"""What a rank holds, named without its layout, and who writes what.

An *entry* is a range of elements inside one leaf of one stored parameter. Ranges, not ranks, are what a save
is made of, so a rank of any other layout finds what it needs by asking for ranges. A *slab* is a flat tensor
in which entries lie end to end: a save copies slabs, a handful a rank, and only the index knows the thousands
of entries.

Every entry has one writer: leafed state is sharded over data-parallel ranks already, replicated parameters
are written by the first tensor- and data-parallel rank of their stage.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from unirl_scale.comm.tree import split_contiguous
from unirl_scale.core.config import MeshConfig, ModelConfig
from unirl_scale.core.mesh import Coordinates
from unirl_scale.parallel.chunk import Head, chunk_ranges, chunk_specs
from unirl_scale.parallel.engine import NativeEngine
from unirl_scale.parallel.flat import FlatSpace, Share, shares
from unirl_scale.parallel.spec import parameter_specs

Kind = Literal["master", "exp_avg", "exp_avg_sq", "weight"]
Group = Literal["train", "frozen"]  # what changes every step, and what is fixed for a stage
TRAINED_KINDS: tuple[Kind, ...] = ("master", "exp_avg", "exp_avg_sq")


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Span:
    """Elements [start, stop) of leaf `leaf` (0 when replicated) of a stored parameter."""

    name: str
    leaf: int
    start: int
    stop: int

    @property
    def numel(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Entry:
    """A span of one kind of state of one role."""

    role: str
    kind: Kind
    span: Span

    @property
    def key(self) -> str:
        """Name of the tensor in a safetensors file."""
        s = self.span
        return f"{self.role}.{self.kind}.{s.name}.{s.leaf}.{s.start}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Slab:
    """A flat contiguous tensor on this rank and the entries in it, end to end.

    Attributes:
        written: this rank is the writer; other ranks with the same entries only read them.
    """

    tensor: Tensor
    entries: tuple[Entry, ...]
    group: Group
    written: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkSpans:
    """What one rank holds of one model chunk.

    Attributes:
        owned: its ranges of the chunk's flat leafed space, and `leafed` the same as spans.
        replicated: the chunk's replicated parameters, whole.
        writes_replicated: whether this rank is the one that writes those.
    """

    owned: Share
    leafed: tuple[Span, ...]
    replicated: tuple[Span, ...]
    writes_replicated: bool


def chunk_spans(
    model: ModelConfig, head: Head, mesh: MeshConfig, leaves: int, at: Coordinates
) -> list[ChunkSpans]:
    """The chunks of the rank at `at` of a mesh. Pure: any rank can tell what any other one holds."""
    ranges = chunk_ranges(model.num_layers, mesh.pp * mesh.vpp, mesh.pipeline_split)
    held = split_contiguous(leaves, mesh.tp)[at.tp]
    out = []
    for layers in ranges[at.pp :: mesh.pp]:
        specs = chunk_specs(model, leaves, head, layers)
        space = FlatSpace([(n, s) for n, s in specs if s.leafed], held)
        owned = shares(space.buckets(mesh.dp, mesh.bucket_elements))[at.dp]
        whole = FlatSpace([(n, s) for n, s in specs if not s.leafed], held)
        out.append(
            ChunkSpans(
                owned=owned,
                leafed=_spans(space, *owned.ranges),
                replicated=_spans(whole, range(whole.numel)),
                writes_replicated=at.tp == 0 and at.dp == 0,
            )
        )
    return out


def _spans(space: FlatSpace, *owned: range) -> tuple[Span, ...]:
    return tuple(
        Span(
            name=piece.segment.name,
            leaf=piece.segment.leaf,
            start=piece.start - piece.segment.offset,
            stop=piece.end - piece.segment.offset,
        )
        for piece in space.pieces(*owned)
    )


def whole_spans(model: ModelConfig, head: Head, leaves: int) -> dict[tuple[str, int], int]:
    """(name, leaf) -> elements, of every leaf of a model: what all ranks together must hold."""
    return {
        (spec.name, leaf): spec.numel
        for spec in parameter_specs(model, leaves, head)
        for leaf in range(leaves if spec.leafed else 1)
    }


def engine_slabs(role: str, engine: NativeEngine) -> Iterator[Slab]:
    """The slabs of a role on this rank: views, so reading into them sets the state.

    A frozen engine has its whole compute weights on every data-parallel rank; its slabs are this rank's share
    of them, one a bucket, and `gather_frozen` makes them whole again after a load.
    """
    spans = chunk_spans(engine.model, engine.head, engine.mesh, engine.ctx.leaves, engine.ctx.at)
    for number, (chunk, held) in enumerate(zip(engine.chunks, spans, strict=True)):
        if engine.optimizers:
            optimizer = engine.optimizers[number]
            shard, whole = optimizer.shard.tensors(), optimizer.replicated.tensors()
            leafed: list[tuple[Kind, Tensor, tuple[Span, ...]]]
            leafed = [(kind, shard[kind], held.leafed) for kind in TRAINED_KINDS]
            replicated: dict[Kind, Tensor] = {kind: whole[kind] for kind in TRAINED_KINDS}
        else:
            parts = [r for r in held.owned.ranges if r]
            leafed = [("weight", chunk.flat[r.start : r.stop], _spans(chunk.leafed, r)) for r in parts]
            replicated = {"weight": chunk.flat_replicated}
        for kind, tensor, entries in leafed:
            yield _slab(role, kind, tensor, entries, written=True)
        for kind, tensor in replicated.items():
            yield _slab(role, kind, tensor, held.replicated, written=held.writes_replicated)


def _slab(role: str, kind: Kind, tensor: Tensor, spans: tuple[Span, ...], *, written: bool) -> Slab:
    assert tensor.numel() == sum(s.numel for s in spans)
    return Slab(
        tensor=tensor,
        entries=tuple(Entry(role=role, kind=kind, span=s) for s in spans),
        group="frozen" if kind == "weight" else "train",
        written=written,
    )


def gather_frozen(engine: NativeEngine) -> None:
    """Make the weights of a frozen engine whole from the shares of its data-parallel ranks; collective."""
    for chunk in engine.chunks:
        dp, flat = engine.ctx.dp, chunk.flat
        for bucket in chunk.leafed.buckets(dp.size, engine.ctx.bucket_elements):
            mine = bucket.owned[dp.index]
            share = flat[mine.start : mine.stop].clone()
            flat[bucket.elements.start : bucket.elements.stop] = dp.all_gather_uneven(share, bucket.sizes)


def item_bytes(dtype: torch.dtype) -> int:
    return torch.empty(0, dtype=dtype).element_size()
