"""The flat space: every leaf of every parameter end to end, cut into blocks that nothing splits.

A *segment* is one leaf of one parameter. A segment is cut into blocks of BLOCK elements from its own start
(the last one may be short). Blocks are the atoms of the sharded optimizer, of the gradient norm and of
digests, so none of these depends on who owns which block.

A *bucket* is whole layers that travel together: their gradients are reduced as soon as the backward has left
them, their weights gathered before the forward comes to them. Each owner owns whole blocks of every bucket.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby, pairwise

import torch
from torch import Tensor

from unirl_scale.parallel.spec import ParamSpec

BLOCK = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """One leaf of one parameter; `param` and `leaf` are the canonical numbers (leaf 0 when replicated)."""

    name: str
    param: int
    layer: int  # -1 before the first layer, num_layers after the last one
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

    @property
    def numel(self) -> int:
        return self.end - self.start


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """Flat elements that travel together.

    Attributes:
        layer: the lowest layer in it, -1 with the embedding: its gradients are complete when the backward of
            that layer is done, and its weights must be there before the forward of that layer.
        elements: all of it.
        owned: the part of each owner, in order.
    """

    layer: int
    elements: range
    owned: tuple[range, ...]

    @property
    def sizes(self) -> list[int]:
        """Elements of each owner."""
        return [len(part) for part in self.owned]


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """What one owner holds of a flat space: a range of every bucket. Its *shard* is these end to end."""

    ranges: tuple[range, ...]

    @property
    def numel(self) -> int:
        return sum(len(r) for r in self.ranges)

    def take(self, flat: Tensor) -> Tensor:
        """The shard of a flat tensor: a view when it is one range, otherwise a copy."""
        parts = [flat[r.start : r.stop] for r in self.ranges]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def cut(self, shard: Tensor) -> tuple[Tensor, ...]:
        """Views of a shard, one a range."""
        return shard.split([len(r) for r in self.ranges])


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
                    layer=spec.layer,
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
        if block >= self.blocks:
            return self.numel
        segment = self.segments[bisect_right(self.segments, block, key=lambda s: s.first_block) - 1]
        return segment.offset + (block - segment.first_block) * BLOCK

    def buckets(self, members: int, least: int) -> tuple[Bucket, ...]:
        """Cut the space into buckets and these among owners: whole blocks, over all as even as it goes.

        Args:
            members: owners. One owner exchanges nothing and gets one bucket.
            least: consecutive layers share a bucket until it has this many elements.
        """
        out, turn = [], 0
        for layer, start, stop in self._layer_runs(least if members > 1 else self.numel):
            base, extra = divmod(stop - start, members)
            # The odd blocks go round, so that no owner collects those of every bucket.
            counts = [base + ((member - turn) % members < extra) for member in range(members)]
            turn = (turn + extra) % members
            cuts = [self.block_start(start + blocks) for blocks in accumulate(counts, initial=0)]
            out.append(
                Bucket(
                    layer=layer,
                    elements=range(cuts[0], cuts[-1]),
                    owned=tuple(range(a, b) for a, b in pairwise(cuts)),
                )
            )
        return tuple(out)

    def _layer_runs(self, least: int) -> list[tuple[int, int, int]]:
        """(lowest layer, first block, end block) of runs of layers; what is left over joins the last run."""
        runs: list[tuple[int, int, int]] = []
        full = True
        for layer, group in groupby(self.segments, key=lambda s: s.layer):
            segments = list(group)
            stop = segments[-1].first_block + segments[-1].blocks
            if full:
                runs.append((layer, segments[0].first_block, stop))
            else:
                runs[-1] = (runs[-1][0], runs[-1][1], stop)
            full = self.block_start(stop) - self.block_start(runs[-1][1]) >= least
        if not full and len(runs) > 1:
            (_, _, stop), (layer, start, _) = runs.pop(), runs.pop()
            runs.append((layer, start, stop))
        return runs

    def pieces(self, *owned: range) -> Iterator[Piece]:
        """The parts of segments inside element ranges, in order."""
        for part in owned:
            first = max(0, bisect_right(self.segments, part.start, key=lambda s: s.offset) - 1)
            for segment in self.segments[first:]:
                if segment.offset >= part.stop:
                    break
                start = max(part.start, segment.offset)
                end = min(part.stop, segment.offset + segment.numel)
                if start < end:
                    yield Piece(
                        segment=segment,
                        first=(start - segment.offset) // BLOCK,
                        stop=-(-(end - segment.offset) // BLOCK),
                        start=start,
                        end=end,
                    )


def shares(buckets: Sequence[Bucket]) -> list[Share]:
    """What each owner holds."""
    return [Share(ranges=ranges) for ranges in zip(*(bucket.owned for bucket in buckets))]


def padded_blocks(flat: Tensor) -> Tensor:
    """A piece's elements as [blocks, BLOCK]; a short last block is padded with zeros."""
    missing = -flat.numel() % BLOCK
    if missing:
        flat = torch.nn.functional.pad(flat, (0, missing))
    return flat.view(-1, BLOCK)
