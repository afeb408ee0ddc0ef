"""An ordered reduce-scatter in flight: cut into chunks, each of which passes the levels of a schedule."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Protocol

import torch
from torch import Tensor

from unirl_scale.comm.groups import Group
from unirl_scale.comm.schedule import ReductionSchedule, Stage
from unirl_scale.comm.wire import Pending

Span = tuple[int, int]


class PendingSum(Protocol):
    """A sum on its way. Every member waits for its pending sums in one order: levels and chunks that are not
    on the wire yet are put there by `wait`."""

    def wait(self) -> Tensor:
        """The result, once."""
        ...


class Scatter:
    """A reduce-scatter in flight: some chunks on the wire, the oldest of them added up first."""

    __slots__ = ("_finish", "_firsts", "_flying", "_nodes", "_out", "_waiting")

    def __init__(
        self,
        out: Tensor,
        chunks: Sequence[Chunk],
        finish: Callable[[Chunk, Pending, Tensor], None],
        nodes: Tensor | None = None,
        firsts: Sequence[int] = (),
    ) -> None:
        self._out, self._nodes, self._firsts, self._finish = out, nodes, firsts, finish
        self._waiting = deque(chunks)
        self._flying: deque[tuple[Chunk, Pending]] = deque()

    def launch(self, count: int) -> None:
        """Put up to `count` more chunks on the wire."""
        for _ in range(min(count, len(self._waiting))):
            assert self._nodes is not None
            chunk = self._waiting.popleft()
            self._flying.append((chunk, chunk.start(self._nodes, self._firsts)))

    def wait(self) -> Tensor:
        """fp32 [sizes[index]]."""
        while self._flying:
            chunk, arriving = self._flying.popleft()
            self._finish(chunk, arriving, self._out[chunk.first : chunk.first + chunk.own_count])
            self.launch(1)
        self._nodes = None
        return self._out


@dataclass(frozen=True, slots=True)
class Chunk:
    """The same stretch of every member's slice on its way through the levels; `counts` are its elements,
    `first` is where it begins in each slice."""

    group: Group
    schedule: ReductionSchedule
    counts: tuple[int, ...]
    first: int

    @property
    def own_count(self) -> int:
        return self.counts[self.group.index]

    def start(self, nodes: Tensor, slices: Sequence[int]) -> Pending:
        """Put the first level on the wire; member m's slice begins at slices[m] of each row."""
        starts = (start + self.first for start in slices)
        spans = {member: (start, start + self.counts[member]) for member, start in enumerate(starts)}
        return self._send(self.schedule.stages[0], list(nodes.unbind()), spans, nodes)

    def finish(self, arriving: Pending) -> Tensor:
        """Run the inner levels; returns what the last level's plan still has to add, [rows, elements]."""
        for stage, following in pairwise(self.schedule.stages):
            arrived = self._arrived(stage, arriving)
            rows = list(arrived.unbind())
            for left, right in stage.plan.steps:
                rows[left].add_(rows[right])
            stops = list(accumulate((self.counts[member] for member in following.held), initial=0))
            spans = dict(zip(following.held, pairwise(stops), strict=True))
            arriving = self._send(following, [rows[slot] for slot in stage.plan.outputs], spans, arrived)
        return self._arrived(self.schedule.stages[-1], arriving)

    def _send(self, stage: Stage, rows: Sequence[Tensor], spans: Mapping[int, Span], like: Tensor) -> Pending:
        """Ship each peer its members' spans of every row: [rows, elements] a peer, peers in order."""
        pieces = [rows[row][start:stop] for row, start, stop in _cuts(stage.sends, len(rows), spans)]
        packed = pieces[0] if len(pieces) == 1 else torch.cat(pieces) if pieces else like.new_empty(0)
        sends, receives = [0] * self.group.size, [0] * self.group.size
        kept = self._kept(stage)
        for peer, members, peer_rows in zip(stage.peers, stage.sends, stage.rows, strict=True):
            sends[peer] = len(rows) * sum(self.counts[member] for member in members)
            receives[peer] = peer_rows * kept
        return self.group.start_all_to_all(packed, sends, receives)

    def _arrived(self, stage: Stage, arriving: Pending) -> Tensor:
        return arriving.wait().view(sum(stage.rows), self._kept(stage)).float()

    def _kept(self, stage: Stage) -> int:
        """Elements a row has on this member after the level."""
        mine = stage.sends[stage.peers.index(self.group.index)]
        return sum(self.counts[member] for member in mine)


def _cuts(sends: Sequence[Sequence[int]], rows: int, spans: Mapping[int, Span]) -> list[tuple[int, int, int]]:
    """(row, start, stop) of what goes on the wire, in order. Neighbours are joined, so a flat exchange of one
    node is one cut and needs no packing copy."""
    cuts: list[tuple[int, int, int]] = []
    for members in sends:
        for row in range(rows):
            for start, stop in (spans[member] for member in members):
                if cuts and cuts[-1][0] == row and cuts[-1][2] == start:
                    cuts[-1] = (row, cuts[-1][1], stop)
                elif start < stop:
                    cuts.append((row, start, stop))
    return cuts
