"""Sum of squares of every segment of a chunk: the canonical blocks and trees behind the gradient norm.

A block is summed in fp32 by the tree, the trees over blocks in fp64. An owner of some blocks of a segment
ships the maximal nodes inside them, so that who owns which block changes no bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from unirl_scale.comm.tree import combine, maximal_nodes
from unirl_scale.kernels.reference import tree_sum
from unirl_scale.parallel.chunk import Chunk
from unirl_scale.parallel.flat import BLOCK, Piece, Share, padded_blocks


class SegmentNorms:
    """Built once a chunk; `sums` is called every step.

    Args:
        shares: what each data-parallel owner holds.
    """

    def __init__(self, chunk: Chunk, shares: Sequence[Share]) -> None:
        self.chunk = chunk
        space, device = chunk.leafed, chunk.ctx.device
        self.owners = [list(space.pieces(*share.ranges)) for share in shares]
        self.mine = _NodePlan.of(self.owners[chunk.ctx.dp.index], device)
        whole = list(chunk.replicated.pieces(range(chunk.replicated.numel)))
        self.replicated = _NodePlan.of(whole, device)
        self.sizes = [sum(len(piece_nodes(p)) for p in pieces) for pieces in self.owners]

    def sums(self, shard: Tensor, replicated: Tensor) -> Tensor:
        """fp64 [segments, 1] on the host, leafed segments first. Collective over the dp group.

        Args:
            shard: fp32, this owner's. replicated: fp32, the whole replicated space.
        """
        ops, dp = self.chunk.ctx.ops, self.chunk.ctx.dp
        values = self.mine.run(ops.block_sumsq(self.mine.blocks(shard)))
        gathered = dp.all_gather_uneven(values, self.sizes).tolist()
        whole = self.replicated.run(ops.block_sumsq(self.replicated.blocks(replicated))).tolist()
        return torch.tensor(self._finish(gathered) + whole, dtype=torch.float64).unsqueeze(1)

    def _finish(self, gathered: list[float]) -> list[float]:
        """The segments' trees from all owners' nodes, in segment order."""
        nodes: dict[tuple[int, int], dict[tuple[int, int], float]] = {}
        values = iter(gathered)
        for piece in (p for pieces in self.owners for p in pieces):
            held = nodes.setdefault((piece.segment.param, piece.segment.leaf), {})
            for node in piece_nodes(piece):
                held[node] = next(values)
        segments = self.chunk.leafed.segments
        return [combine(nodes[s.param, s.leaf], s.blocks, lambda a, b: a + b) for s in segments]


def piece_nodes(piece: Piece) -> tuple[tuple[int, int], ...]:
    """Maximal nodes of a piece's blocks in its segment's tree."""
    return maximal_nodes(piece.first, piece.stop, piece.segment.blocks)


@dataclass(frozen=True, slots=True)
class _NodePlan:
    """How the blocks of some pieces add up to their nodes: nodes of one length are summed together."""

    pieces: tuple[Piece, ...]  # end to end in the shard
    aligned: bool
    groups: tuple[tuple[Tensor, Tensor], ...]  # (node numbers [m], block numbers [length, m])
    nodes: int

    @classmethod
    def of(cls, pieces: Sequence[Piece], device: torch.device) -> _NodePlan:
        by_length: dict[int, list[tuple[int, int]]] = {}
        number = base = 0
        for piece in pieces:
            for start, stop in piece_nodes(piece):
                by_length.setdefault(stop - start, []).append((number, base + start - piece.first))
                number += 1
            base += piece.stop - piece.first
        groups = []
        for length, members in sorted(by_length.items()):
            numbers, starts = (torch.tensor(column, device=device) for column in zip(*members))
            groups.append((numbers, starts + torch.arange(length, device=device).unsqueeze(1)))
        aligned = all(p.numel % BLOCK == 0 for p in pieces)
        return cls(tuple(pieces), aligned, tuple(groups), number)

    def blocks(self, flat: Tensor) -> Tensor:
        """[blocks, BLOCK] of the pieces, in order; a view unless a segment ends inside a block."""
        if self.aligned:
            return flat.view(-1, BLOCK)
        return torch.cat([padded_blocks(part) for part in flat.split([p.numel for p in self.pieces])])

    def run(self, sums: Tensor) -> Tensor:
        """fp64 [blocks] -> fp64 [nodes]."""
        out = torch.empty(self.nodes, dtype=torch.float64, device=sums.device)
        for numbers, index in self.groups:
            out[numbers] = tree_sum(sums[index])
        return out
