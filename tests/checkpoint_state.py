"""State of a model on any rank of any layout, without processes: what checkpoint tests write and read."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from unirl_scale.core.config import MeshConfig, ModelConfig
from unirl_scale.core.mesh import Mesh
from unirl_scale.train.checkpoint.entries import TRAINED_KINDS, Entry, Slab, Span, chunk_spans, whole_spans
from unirl_scale.train.checkpoint.filling import fill
from unirl_scale.train.checkpoint.manifest import Head, Manifest, SavedRole
from unirl_scale.train.checkpoint.shard import Part, layout_shard
from unirl_scale.train.checkpoint.writer import shard_name
from unirl_scale.train.state import TrainState

MODEL = ModelConfig(
    hidden_size=24,
    num_layers=5,
    num_heads=12,
    num_kv_heads=6,
    head_dim=4,
    ffn_size=36,
    vocab_size=1029,
    qkv_bias=True,
    qk_norm=True,
    tie_embeddings=True,
)
LEAVES = 6
Leaf = tuple[str, str, int]  # kind, parameter, leaf
Whole = dict[Leaf, Tensor]


def whole_state(seed: int, model: ModelConfig = MODEL, leaves: int = LEAVES) -> Whole:
    """Random values of every leaf of every kind, flat fp32."""
    g = torch.Generator().manual_seed(seed)
    return {
        (kind, name, leaf): torch.randn(numel, generator=g)
        for kind in TRAINED_KINDS
        for (name, leaf), numel in whole_spans(model, "lm", leaves).items()
    }


def rank_state(
    whole: Whole | None, mesh: MeshConfig, rank: int, model: ModelConfig = MODEL, leaves: int = LEAVES
) -> list[Slab]:
    """The slabs of one rank with these values, or NaN to be read into."""
    at = Mesh.from_config(mesh).coordinates(rank)
    if at is None:
        return []
    slabs = []
    for chunk in chunk_spans(model, "lm", mesh, leaves, at):
        for kind in TRAINED_KINDS:
            for spans, written in ((chunk.leafed, True), (chunk.replicated, chunk.writes_replicated)):
                slabs.append(_slab(whole, kind, spans, written=written))
    return slabs


def _slab(whole: Whole | None, kind: str, spans: tuple[Span, ...], *, written: bool) -> Slab:
    if whole is None:
        tensor = torch.full((sum(s.numel for s in spans),), float("nan"))
    else:
        pieces = [whole[kind, s.name, s.leaf][s.start : s.stop] for s in spans]
        tensor = torch.cat(pieces) if pieces else torch.empty(0)
    entries = tuple(Entry(role="actor", kind=kind, span=s) for s in spans)  # type: ignore[arg-type]
    return Slab(tensor=tensor, entries=entries, group="train", written=written)


def head(writers: int, step: int = 3, incarnation: int = 1, **changes: object) -> Head:
    role = SavedRole(model=MODEL, head="lm", leaves=LEAVES, adam_steps=step, trained=True)
    return replace(
        Head(
            run="r",
            step=step,
            incarnation=incarnation,
            writers=writers,
            state=TrainState(step=step),
            roles={"actor": role},
            data="d",
            config={"stages": [{"name": "train"}]},
            versions={},
        ),
        **changes,  # type: ignore[arg-type]
    )


def shard_bytes(slabs: list[Slab], rank: int) -> tuple[Part, Tensor]:
    """What a rank writes: its file's record and bytes."""
    layout = layout_shard([s for s in slabs if s.written])
    data = torch.empty(layout.num_bytes, dtype=torch.uint8)
    sums = fill(layout, data)
    part = Part(
        file=shard_name(rank, "train"), num_bytes=layout.num_bytes, stored=layout.stored, sums=tuple(sums)
    )
    return part, data


def write_shards(folder: Path, whole: Whole, mesh: MeshConfig) -> Manifest:
    """The files of a save on this layout, without a manifest on disk."""
    folder.mkdir(parents=True, exist_ok=True)
    world = Mesh.from_config(mesh).size
    parts = []
    for rank in range(world):
        part, data = shard_bytes(rank_state(whole, mesh, rank), rank)
        (folder / part.file).write_bytes(data.numpy().tobytes())
        parts.append(part)
    return Manifest(head=head(world), parts=tuple(parts))
