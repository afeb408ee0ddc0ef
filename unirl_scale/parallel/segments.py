"""Per-segment results (sums of squares, digests) of a whole model, gathered in canonical order on every rank.

A place is a (tp, pp) coordinate. Inside a place the data-parallel owners first finish each segment; then
places exchange one row a segment. Which segments a place has is known from the configuration, so only values
travel.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

from unirl_scale.comm.tree import split_contiguous
from unirl_scale.parallel.chunk import Chunk, ChunkRange, chunk_specs
from unirl_scale.parallel.flat import BLOCK, FlatSpace, Share
from unirl_scale.parallel.spec import ParamSpec

Label = tuple[int, int]  # canonical parameter number, leaf

_HASH = 32  # bytes of a SHA-256


class SegmentIndex:
    """Which segments each place of a mesh holds.

    Args:
        chunks: this rank's chunks.
        ranges: layers of all pp * vpp global chunks.
    """

    def __init__(self, chunks: Sequence[Chunk], ranges: Sequence[ChunkRange]) -> None:
        self.ctx = chunks[0].ctx
        model, head, leaves = chunks[0].model, chunks[0].head_kind, self.ctx.leaves
        tp, pp = self.ctx.tp.size, self.ctx.pp_up.size
        held = split_contiguous(leaves, tp)
        self.labels: list[list[list[Label]]] = []  # [pp][tp]
        for stage in range(pp):
            specs = [chunk_specs(model, leaves, head, r) for r in ranges[stage::pp]]
            self.labels.append([_labels(specs, held[t]) for t in range(tp)])

    def collect(self, rows: Tensor) -> tuple[list[Label], Tensor]:
        """rows [segments of this place, k], leafed then replicated, chunk by chunk -> (labels, [all segments,
        k]) in canonical order; a replicated segment is taken from tp 0."""
        over_tp = self.ctx.tp.all_gather(rows.contiguous())
        k = rows.shape[1]
        sizes = [sum(len(t) for t in stage) * k for stage in self.labels]
        flat = self.ctx.pp_up.all_gather_uneven(over_tp.reshape(-1), sizes).view(-1, k)
        found: dict[Label, int] = {}
        position = 0
        for stage in self.labels:
            for labels in stage:
                for label in labels:
                    found.setdefault(label, position)
                    position += 1
        order = sorted(found)
        return order, flat[torch.tensor([found[label] for label in order], device=flat.device)]


def _labels(specs: Sequence[Sequence[tuple[int, ParamSpec]]], held: range) -> list[Label]:
    out: list[Label] = []
    for chunk in specs:
        for leafed in (True, False):
            space = FlatSpace([(n, s) for n, s in chunk if s.leafed == leafed], held)
            out += [(s.param, s.leaf) for s in space.segments]
    return out


# ---- digests ----------------------------------------------------------------------------------------
def segment_digests(chunk: Chunk, shares: Sequence[Share], shard: Tensor, replicated: Tensor) -> Tensor:
    """uint8 [segments of the chunk, 32]: SHA-256 over the SHA-256 of each block, so that owners hash in
    place."""
    ctx, space = chunk.ctx, chunk.leafed
    owners = [list(space.pieces(*share.ranges)) for share in shares]
    mine = map(_hash_blocks, shard.split([p.numel for p in owners[ctx.dp.index]]))
    sizes = [sum(p.stop - p.first for p in pieces) * _HASH for pieces in owners]
    local = _bytes_tensor(b"".join(mine)).to(ctx.device)
    gathered = ctx.dp.all_gather_uneven(local, sizes).cpu().numpy().tobytes()
    hashes: dict[tuple[int, int], bytes] = {}  # (first block of the segment, first block of the piece)
    position = 0
    for piece in (p for pieces in owners for p in pieces):
        size = (piece.stop - piece.first) * _HASH
        hashes[piece.segment.first_block, piece.first] = gathered[position : position + size]
        position += size
    ordered = b"".join(hashes[place] for place in sorted(hashes))
    out = []
    for segment in space.segments:
        start = segment.first_block * _HASH
        out.append(hashlib.sha256(ordered[start : start + segment.blocks * _HASH]).digest())
    whole = chunk.replicated
    for piece in whole.pieces(range(whole.numel)):
        out.append(hashlib.sha256(_hash_blocks(replicated[piece.start : piece.end])).digest())
    return _bytes_tensor(b"".join(out)).to(ctx.device).view(-1, _HASH)


def _bytes_tensor(data: bytes) -> Tensor:
    return torch.tensor(list(data), dtype=torch.uint8)


def _hash_blocks(values: Tensor) -> bytes:
    data = values.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()
    width = BLOCK * values.element_size()
    return b"".join(hashlib.sha256(data[i : i + width]).digest() for i in range(0, len(data), width))
