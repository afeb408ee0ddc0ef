"""The flat space: every leaf of every parameter end to end, cut into blocks that nothing splits.

A *segment* is one leaf of one parameter. A segment is cut into blocks of BLOCK elements from its own start
(the last one may be short). Blocks are the atoms of the sharded optimizer, of the gradient norm and of
digests, so none of these depends on who owns which block.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from unirl_scale.comm.tree import split_contiguous
from unirl_scale.parallel.spec import ParamSpec

BLOCK = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """One leaf of one parameter; `param` and `leaf` are the canonical numbers (leaf 0 when replicated)."""

    name: str
    param: int
    leaf: int
    offset: int
    numel: int
    first_block: int

    @property
    def blocks(self) -> int:
        return -(-self.numel // BLOCK)


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Blocks [first, stop) of a segment, at flat elements [start, end)."""

    segment: Segment
    first: int
    stop: int
    start: int
    end: int


class FlatSpace:
    """Segments of some parameters on one rank.

    Args:
        specs: (canonical number, spec) of the parameters, in order.
        leaves: absolute leaf numbers held here; ignored (one segment, leaf 0) for replicated parameters.
    """

    def __init__(self, specs: Sequence[tuple[int, ParamSpec]], leaves: range) -> None:
        segments: list[Segment] = []
        self.offsets: dict[str, int] = {}
        offset = block = 0
        for number, spec in specs:
            self.offsets[spec.name] = offset
            for leaf in leaves if spec.leafed else (0,):
                segment = Segment(
                    name=spec.name,
                    param=number,
                    leaf=leaf,
                    offset=offset,
                    numel=spec.numel,
                    first_block=block,
                )
                segments.append(segment)
                offset, block = offset + segment.numel, block + segment.blocks
        self.segments = tuple(segments)
        self.numel, self.blocks = offset, block

    def block_start(self, block: int) -> int:
        """Flat element at which a block starts; `blocks` itself maps to `numel`."""
        for segment in self.segments:
            if block < segment.first_block + segment.blocks:
                return segment.offset + (block - segment.first_block) * BLOCK
        return self.numel

    def owned(self, members: int) -> list[range]:
        """Flat element range of each of `members` owners: whole blocks, as even as it goes."""
        cuts = [self.block_start(r.start) for r in split_contiguous(self.blocks, members)]
        return [range(a, b) for a, b in zip(cuts, [*cuts[1:], self.numel])]

    def pieces(self, owned: range) -> Iterator[Piece]:
        """The parts of segments inside an owned element range."""
        for segment in self.segments:
            start = max(owned.start, segment.offset)
            end = min(owned.stop, segment.offset + segment.numel)
            if start < end:
                first = (start - segment.offset) // BLOCK
                stop = -(-(end - segment.offset) // BLOCK)
                yield Piece(segment=segment, first=first, stop=stop, start=start, end=end)


def padded_blocks(flat: Tensor) -> Tensor:
    """A piece's elements as [blocks, BLOCK]; a short last block is padded with zeros."""
    missing = -flat.numel() % BLOCK
    if missing:
        flat = torch.nn.functional.pad(flat, (0, missing))
    return flat.view(-1, BLOCK)
