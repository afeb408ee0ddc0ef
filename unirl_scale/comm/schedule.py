"""Who sends which nodes to whom in an ordered reduction, flat or hierarchical. Imports no torch.

A hierarchy is a list of block sizes, e.g. (8, 64) for 8 ranks a node and 8 nodes a leaf switch: consecutive
members form a block, and each level turns the nodes that a block's parts hold into the maximal nodes of the
block's joint range. Elements travel by digits: after the level of block size B a member holds what goes to
members of its own index modulo B. All levels are exchanges over one group, so no communicator is added.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from unirl_scale.comm.tree import CombinePlan, Node, maximal_nodes
from unirl_scale.core.errors import PlanError


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One level, as one member sees it.

    Attributes:
        peers: members it exchanges with, itself included, ascending.
        rows: nodes each peer holds when the level starts.
        held: members whose elements this one holds when the level starts, ascending.
        sends: of `held`, those whose elements go to each peer.
        plan: from the peers' nodes to the maximal nodes of their joint range.
    """

    peers: tuple[int, ...]
    rows: tuple[int, ...]
    held: tuple[int, ...]
    sends: tuple[tuple[int, ...], ...]
    plan: CombinePlan


@dataclass(frozen=True, slots=True, kw_only=True)
class ReductionSchedule:
    """An ordered reduce-scatter as one member executes it.

    Attributes:
        total: leaves of the tree.
        index: this member.
        members_nodes: the nodes every member ships, by member.
        stages: innermost blocks first; one when flat, none for a group of one.
    """

    total: int
    index: int
    members_nodes: tuple[tuple[Node, ...], ...]
    stages: tuple[Stage, ...]

    @classmethod
    def of(cls, ranges: Sequence[range], index: int, block_sizes: Sequence[int] = ()) -> ReductionSchedule:
        """Plan for member `index` of len(ranges).

        Args:
            ranges: leaves of each member; consecutive, covering 0..total, may be empty.
            block_sizes: members a block of each inner level, ascending; () = flat.

        Raises:
            PlanError: the ranges leave a gap or overlap, or the blocks do not nest.
        """
        total = _total_leaves(ranges)
        levels = _levels(block_sizes, len(ranges))
        stages = tuple(_stage(ranges, index, inner, outer, total) for inner, outer in pairwise(levels))
        nodes = tuple(maximal_nodes(part.start, part.stop, total) if part else () for part in ranges)
        return cls(total=total, index=index, members_nodes=nodes, stages=stages)

    @property
    def nodes(self) -> tuple[Node, ...]:
        """The nodes this member ships."""
        return self.members_nodes[self.index]

    @property
    def total_nodes(self) -> int:
        """Nodes of all members together; the number of members when each range is aligned."""
        return sum(len(nodes) for nodes in self.members_nodes)

    def sent_elements(self, sizes: Sequence[int]) -> int:
        """Elements this member sends to others in a reduce-scatter of these per-member element counts."""
        return sum(
            stage.rows[stage.peers.index(self.index)] * sum(sizes[member] for member in members)
            for stage in self.stages
            for peer, members in zip(stage.peers, stage.sends, strict=True)
            if peer != self.index
        )


def _total_leaves(ranges: Sequence[range]) -> int:
    stop = 0
    for member, part in enumerate(ranges):
        if part and (part.start != stop or part.step != 1):
            raise PlanError(f"ranges[{member}]: got {part}; needs consecutive leaves from {stop} on")
        stop = part.stop if part else stop
    if stop == 0:
        raise PlanError(f"ranges of {len(ranges)} members hold no leaf; needs at least one")
    return stop


def _levels(block_sizes: Sequence[int], members: int) -> list[int]:
    """Block sizes from single members to the whole group, without levels that change nothing."""
    levels = [1]
    for size in (*block_sizes, members):
        if size < 1 or size % levels[-1] or members % size:
            legal = [n for n in range(levels[-1], members + 1) if n % levels[-1] == 0 and members % n == 0]
            raise PlanError(
                f"inner_size: got blocks of {list(block_sizes)} in a group of {members}; "
                f"each must divide the next and the group\nhint: instead of {size} use one of {legal[:8]}"
            )
        if size > levels[-1]:
            levels.append(size)
    return levels


def _stage(ranges: Sequence[range], index: int, inner: int, outer: int, total: int) -> Stage:
    """The level that joins blocks of `inner` members into blocks of `outer`."""
    first = index // outer * outer
    peers = tuple(range(first + index % inner, first + outer, inner))
    parts = [
        _joint_nodes(ranges[block : block + inner], total) for block in range(first, first + outer, inner)
    ]
    held = tuple(range(index % inner, len(ranges), inner))
    return Stage(
        peers=peers,
        rows=tuple(len(part) for part in parts),
        held=held,
        sends=tuple(tuple(range(peer % outer, len(ranges), outer)) for peer in peers),
        plan=CombinePlan.of(
            [node for part in parts for node in part],
            total,
            _joint_nodes(ranges[first : first + outer], total),
        ),
    )


def _joint_nodes(ranges: Sequence[range], total: int) -> tuple[Node, ...]:
    filled = [part for part in ranges if part]
    return maximal_nodes(filled[0].start, filled[-1].stop, total) if filled else ()
