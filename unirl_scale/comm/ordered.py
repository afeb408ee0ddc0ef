"""Ordered reductions: byte transport plus our own additions along the canonical tree.

Each member owns a contiguous range of leaves and ships the maximal nodes of that range; whoever receives the
nodes finishes the tree. The result has the bits of one process adding all leaves by the tree, for every
partition, group size, hierarchy and chunk size, because no floating-point addition is left to the backend.

Cost of a reduce-scatter of E fp32 elements over n members that hold one node each: E * (n - 1) / n elements
sent, as a ring sends, n - 1 additions an element, and temporary memory of at most E elements or two chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from math import prod
from typing import Protocol

import torch
from torch import Tensor

from unirl_scale.comm.groups import Group
from unirl_scale.comm.scatter import Chunk, PendingSum, Scatter
from unirl_scale.comm.schedule import ReductionSchedule
from unirl_scale.comm.tree import CombinePlan, Node
from unirl_scale.comm.wire import Pending
from unirl_scale.core.errors import PlanError, ShapeError

TreeSum = Callable[[Tensor], Tensor]
"""fp32 [n, ...] -> [...]: the canonical tree over dim 0, the op table's `tree_sum`."""


class Reducer(Protocol):
    """What `OrderedReducer` and `FastReducer` have in common. A method consumes its `nodes`: they may be
    overwritten, or share memory with the result."""

    @property
    def nodes(self) -> tuple[Node, ...]:
        """Absolute leaf ranges of the rows that this rank passes to each method."""
        ...

    @property
    def local_nodes(self) -> tuple[Node, ...]:
        """`nodes` counted from this rank's first leaf."""
        ...

    def reduce_scatter(self, nodes: Tensor, sizes: Sequence[int]) -> Tensor: ...

    def start_reduce_scatter(
        self, nodes: Tensor, sizes: Sequence[int], out: Tensor | None = None
    ) -> PendingSum: ...

    def all_reduce(self, nodes: Tensor, dtype: torch.dtype | None = None) -> Tensor: ...

    def reduce(self, nodes: Tensor, dst_index: int) -> Tensor | None: ...


class OrderedReducer:
    """Sums over the leaves of a group, with the same bits for every way the leaves are spread.

    A value without state between calls; every method is collective over the group and consumes its `nodes`.
    """

    def __init__(
        self,
        group: Group,
        ranges: Sequence[range],
        *,
        inner_size: int | Sequence[int] | None = None,
        chunk_bytes: int = 64 << 20,
        gather_below_bytes: int = 64 << 10,
        window_bytes: int = 256 << 20,
        wire_dtype: torch.dtype = torch.float32,
        tree_sum: TreeSum | None = None,
    ) -> None:
        """Plan the reductions of one group.

        Args:
            group: the members.
            ranges: leaves of each member, consecutive, covering 0..total, may be empty.
            inner_size: members of a node (two levels), or block sizes of several levels, innermost first.
            chunk_bytes: bound on each temporary of a reduction; equal on all members.
            gather_below_bytes: an all-reduce whose nodes take no more than this gathers them on every member
                and adds there: one exchange instead of two. Equal on all members.
            window_bytes: `start_reduce_scatter` puts chunks of so much on the wire before it returns, two at
                the least; equal on all members.
            wire_dtype: torch.bfloat16 if nodes are given, and shipped, in bf16: legal when every node is a
                single leaf that was rounded already (`invariance.leaf_dtype: bf16`).
            tree_sum: a fused kernel for the canonical tree over rows; used where the rows allow it.

        Raises:
            PlanError: ranges with a gap or overlap or of the wrong number, blocks that do not nest, or a
                wire_dtype that would round sums.
        """
        if len(ranges) != group.size:
            raise PlanError(f"got {len(ranges)} ranges for a group of {group.size}; needs one a member")
        blocks = (inner_size,) if isinstance(inner_size, int) else tuple(inner_size or ())
        self._group = group
        self._schedule = ReductionSchedule.of(ranges, group.index, blocks)
        self._chunk_bytes, self._gather_below_bytes = chunk_bytes, gather_below_bytes
        self._window_chunks = max(2, window_bytes // chunk_bytes)
        self._wire_dtype, self._tree_sum = wire_dtype, tree_sum
        all_nodes = [node for nodes in self._schedule.members_nodes for node in nodes]
        self._gathered_plan = CombinePlan.of(all_nodes, self._schedule.total)
        self._fuse_gathered = self._gathered_plan.is_plain_tree
        self._fuse_last = bool(self._schedule.stages) and self._schedule.stages[-1].plan.is_plain_tree
        _check_wire_dtype(wire_dtype, self._schedule)

    @property
    def nodes(self) -> tuple[Node, ...]:
        """Absolute leaf ranges of the nodes this rank ships: the rows of the `nodes` arguments."""
        return self._schedule.nodes

    @property
    def local_nodes(self) -> tuple[Node, ...]:
        """`nodes` counted from this rank's first leaf, as the op table takes them."""
        first = self.nodes[0][0] if self.nodes else 0
        return tuple((start - first, stop - first) for start, stop in self.nodes)

    @property
    def schedule(self) -> ReductionSchedule:
        """The plan that is executed."""
        return self._schedule

    def reduce_scatter(self, nodes: Tensor, sizes: Sequence[int]) -> Tensor:
        """Sum over all leaves; each member keeps its slice.

        Args:
            nodes: wire_dtype [len(self.nodes), E]; E equal on all members, also where there are no nodes.
            sizes: elements of each member's slice, in order, summing to E; 0 and uneven are fine.

        Returns:
            fp32 [sizes[index]].

        Raises:
            ShapeError: `nodes` or `sizes` do not fit.
        """
        return self._scatter(nodes, sizes, None, 2).wait()

    def start_reduce_scatter(
        self, nodes: Tensor, sizes: Sequence[int], out: Tensor | None = None
    ) -> PendingSum:
        """Start a `reduce_scatter`; leave `nodes` alone until it is waited for.

        Members start, and wait for, their sums in one order.

        Args:
            nodes, sizes: as for `reduce_scatter`.
            out: fp32 [sizes[index]] to write the result to.

        Raises:
            ShapeError: an argument does not fit.
        """
        return self._scatter(nodes, sizes, out, self._window_chunks)

    def _scatter(self, nodes: Tensor, sizes: Sequence[int], out: Tensor | None, ahead: int) -> Scatter:
        """A reduce-scatter with its first `ahead` chunks on the wire."""
        self._check(nodes)
        n, index = self._group.size, self._group.index
        if nodes.dim() != 2 or len(sizes) != n or sum(sizes) != nodes.shape[1] or min(sizes) < 0:
            raise ShapeError(
                f"reduce_scatter: got nodes {tuple(nodes.shape)} and sizes {list(sizes)}; needs 2 dims and "
                f"{n} sizes >= 0 that sum to the second"
            )
        if out is not None and (out.dtype != torch.float32 or out.shape != (sizes[index],)):
            raise ShapeError(
                f"reduce_scatter: got out {out.dtype} {tuple(out.shape)}; needs fp32 ({sizes[index]},)"
            )
        if n == 1:
            result = nodes[0].float()
            return Scatter(result if out is None else out.copy_(result), (), self._finish)
        if out is None:
            out = torch.empty(sizes[index], dtype=torch.float32, device=nodes.device)
        step, firsts = self._chunk_elements(), list(accumulate(sizes[:-1], initial=0))
        chunks = [
            Chunk(
                self._group, self._schedule, tuple(max(0, min(size - start, step)) for size in sizes), start
            )
            for start in range(0, max(sizes), step)
        ]
        scatter = Scatter(out, chunks, self._finish, nodes, firsts)
        scatter.launch(ahead)
        return scatter

    def all_reduce(self, nodes: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Sum over all leaves, on every member, rounded once at the root.

        Args:
            nodes: wire_dtype [len(self.nodes), *shape].
            dtype: of the result; None = fp32.

        Returns:
            dtype [*shape].

        Raises:
            ShapeError: `nodes` do not fit.
        """
        self._check(nodes)
        dtype = dtype or torch.float32
        shape, n = nodes.shape[1:], self._group.size
        elements = prod(shape)
        if n == 1:
            return nodes[0].to(dtype)
        if self._schedule.total_nodes * elements * 4 <= self._gather_below_bytes:
            return self._gather_and_add(nodes, elements).to(dtype).view(shape)
        share = -(-elements // n)  # all slices equal but the last: they gather into one piece without a copy
        sizes = [max(0, min(share, elements - member * share)) for member in range(n)]
        mine = self.reduce_scatter(nodes.reshape(nodes.shape[0], elements), sizes).to(dtype)
        padded = mine if mine.numel() == share else torch.cat([mine, mine.new_zeros(share - mine.numel())])
        return self._group.all_gather(padded).view(-1)[:elements].view(shape)

    def reduce(self, nodes: Tensor, dst_index: int) -> Tensor | None:
        """Sum over all leaves, on one member.

        Args:
            nodes: wire_dtype [len(self.nodes), *shape].
            dst_index: the member that gets the sum.

        Returns:
            fp32 [*shape] on that member, None elsewhere.

        Raises:
            ShapeError: `nodes` do not fit.
        """
        self._check(nodes)
        shape = nodes.shape[1:]
        elements = prod(shape)
        sizes = [elements if member == dst_index else 0 for member in range(self._group.size)]
        mine = self.reduce_scatter(nodes.reshape(nodes.shape[0], elements), sizes)
        return mine.view(shape) if self._group.index == dst_index else None

    def _chunk_elements(self) -> int:
        """Elements of each member's slice that travel together: the same number on every member."""
        rows = max(self._schedule.total_nodes, self._group.size)
        return max(1, self._chunk_bytes // (4 * rows))

    def _finish(self, chunk: Chunk, arriving: Pending, out: Tensor) -> None:
        plan = self._schedule.stages[-1].plan
        _finish_tree(chunk.finish(arriving), plan, self._tree_sum if self._fuse_last else None, out)

    def _gather_and_add(self, nodes: Tensor, elements: int) -> Tensor:
        sizes = [len(member_nodes) * elements for member_nodes in self._schedule.members_nodes]
        rows = self._group.all_gather_uneven(nodes.reshape(-1), sizes)
        rows = rows.view(self._schedule.total_nodes, elements).float()
        out = torch.empty(elements, dtype=torch.float32, device=nodes.device)
        _finish_tree(rows, self._gathered_plan, self._tree_sum if self._fuse_gathered else None, out)
        return out

    def _check(self, nodes: Tensor) -> None:
        if nodes.dtype != self._wire_dtype or nodes.dim() < 1 or nodes.shape[0] != len(self.nodes):
            raise ShapeError(
                f"nodes: got {nodes.dtype} {tuple(nodes.shape)}; needs {self._wire_dtype} with "
                f"{len(self.nodes)} rows, one for each of {list(self.nodes)}"
            )


def _finish_tree(rows: Tensor, plan: CombinePlan, tree_sum: TreeSum | None, out: Tensor) -> None:
    """Run a plan to its root. `rows` is overwritten; the last addition writes to `out`."""
    if not plan.steps:
        out.copy_(rows[0])
    elif tree_sum is not None:
        out.copy_(tree_sum(rows))
    else:
        for left, right in plan.steps[:-1]:
            rows[left].add_(rows[right])
        left, right = plan.steps[-1]
        torch.add(rows[left], rows[right], out=out)


def _check_wire_dtype(wire_dtype: torch.dtype, schedule: ReductionSchedule) -> None:
    if wire_dtype == torch.float32:
        return
    members = len(schedule.members_nodes)
    single = all(len(nodes) == 1 and nodes[0][1] - nodes[0][0] == 1 for nodes in schedule.members_nodes)
    if wire_dtype != torch.bfloat16 or not single:
        raise PlanError(
            f"wire_dtype: got {wire_dtype} for {schedule.total} leaves on {members} members; nodes are "
            "fp32 sums, and only single leaves may travel in torch.bfloat16\n"
            f"hint: use torch.float32, or {members} leaves, one a member"
        )
