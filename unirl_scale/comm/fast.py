"""Vendor reductions for `invariance.mode: off`: the only file in which a backend adds floating-point numbers.

Kept to measure the price of order against. The result depends on the layout, the backend and its algorithm.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from unirl_scale.comm.groups import Group
from unirl_scale.comm.scatter import PendingSum
from unirl_scale.comm.tree import Node
from unirl_scale.comm.wire import Pending, failures_as_comm_errors
from unirl_scale.core.errors import PlanError, ShapeError

# Torch 2.13 renames this collective and warns about the old name; 2.11 has only the old one.
_reduce_scatter_flat = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True, slots=True)
class _Slice:
    """The first `count` elements of what arrives, on `device` or in `out`."""

    arriving: Pending
    count: int
    device: torch.device
    out: Tensor | None

    def wait(self) -> Tensor:
        mine = self.arriving.wait()[: self.count]
        return mine.to(self.device) if self.out is None else self.out.copy_(mine)


class FastReducer:
    """The three reductions of `OrderedReducer`, added up by the backend in the dtype of `nodes`.

    A rank passes one node, the sum of all its leaves in any order. Every method is collective over the group
    and consumes its `nodes`.
    """

    def __init__(self, group: Group, ranges: Sequence[range]) -> None:
        """Leaves of each member, as for `OrderedReducer`; only this rank's own range is looked at.

        Raises:
            PlanError: not one range a member.
        """
        if len(ranges) != group.size:
            raise PlanError(f"got {len(ranges)} ranges for a group of {group.size}; needs one a member")
        self._group = group
        self._own = ranges[group.index]

    @property
    def nodes(self) -> tuple[Node, ...]:
        """This rank's leaves as one range; () when it has none, then it contributes zeros."""
        return ((self._own.start, self._own.stop),) if self._own else ()

    @property
    def local_nodes(self) -> tuple[Node, ...]:
        """`nodes` counted from this rank's first leaf."""
        return ((0, len(self._own)),) if self._own else ()

    def reduce_scatter(self, nodes: Tensor, sizes: Sequence[int]) -> Tensor:
        """Sum over the members; each keeps its slice.

        Args:
            nodes: floating [len(self.nodes), E]; E equal on all members.
            sizes: elements of each member's slice, summing to E; uneven slices are padded to the longest.

        Returns:
            [sizes[index]], the dtype of `nodes`.

        Raises:
            ShapeError: `nodes` or `sizes` do not fit.
        """
        return self.start_reduce_scatter(nodes, sizes).wait()

    def start_reduce_scatter(
        self, nodes: Tensor, sizes: Sequence[int], out: Tensor | None = None
    ) -> PendingSum:
        """Start a `reduce_scatter`; leave `nodes` alone until it is waited for.

        Args:
            out: where the result goes, if anywhere in particular.
        """
        row, n, longest = self._own_row(nodes), self._group.size, max(sizes, default=0)
        if len(sizes) != n or sum(sizes) != row.numel() or row.dim() != 1:
            raise ShapeError(
                f"reduce_scatter: sizes {list(sizes)} of {n} members do not sum to {row.numel()}"
            )
        if n == 1 or longest == 0:
            return _Slice(Pending("reduce_scatter", (), row), row.numel(), nodes.device, out)
        if min(sizes) < longest:
            padded = row.new_zeros(n, longest)
            for slot, piece in zip(padded, torch.split(row, list(sizes)), strict=True):
                slot[: piece.numel()] = piece
            row = padded.view(-1)
        source = row.to(self._group.device)
        landing = torch.empty(longest, dtype=row.dtype, device=source.device)
        with failures_as_comm_errors("reduce_scatter", self._group.ranks):
            work = _reduce_scatter_flat(
                landing, source, op=dist.ReduceOp.SUM, group=self._group.handle, async_op=True
            )
        self._count("reduce_scatter", source)
        arriving = Pending("reduce_scatter", (work,), landing, kept=source, waiting=self._group.transferring)
        return _Slice(arriving, sizes[self._group.index], nodes.device, out)

    def all_reduce(self, nodes: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Sum over the members, on every member.

        Args:
            nodes: floating [len(self.nodes), *shape].
            dtype: of the result; None = that of `nodes`.

        Returns:
            dtype [*shape].

        Raises:
            ShapeError: `nodes` do not fit.
        """
        row = self._own_row(nodes)
        if self._group.size > 1:
            total = row.to(self._group.device)
            with self._group.transferring("all_reduce"):
                dist.all_reduce(total, op=dist.ReduceOp.SUM, group=self._group.handle)
            self._count("all_reduce", total)
            row = total.to(nodes.device)
        return row.to(dtype or nodes.dtype)

    def reduce(self, nodes: Tensor, dst_index: int) -> Tensor | None:
        """Sum over the members, on member `dst_index`; None elsewhere.

        Args:
            nodes: floating [len(self.nodes), *shape].

        Raises:
            ShapeError: `nodes` do not fit.
        """
        row = self._own_row(nodes)
        if self._group.size == 1:
            return row
        total = row.to(self._group.device)
        with self._group.transferring("reduce"):
            dist.reduce(total, group_dst=dst_index, op=dist.ReduceOp.SUM, group=self._group.handle)
        self._count("reduce", total)
        return total.to(nodes.device) if self._group.index == dst_index else None

    def _own_row(self, nodes: Tensor) -> Tensor:
        if not nodes.dtype.is_floating_point or nodes.dim() < 1 or nodes.shape[0] != len(self.nodes):
            raise ShapeError(
                f"nodes: got {nodes.dtype} {tuple(nodes.shape)}; "
                f"needs a floating dtype and {len(self.nodes)} rows"
            )
        return nodes[0].contiguous() if self.nodes else nodes.new_zeros(nodes.shape[1:])

    def _count(self, kind: str, operand: Tensor) -> None:
        """The operand once each way: what a backend forwards while it adds is its own affair."""
        n_bytes = operand.numel() * operand.element_size()
        self._group.traffic.add(kind, n_bytes, n_bytes)
