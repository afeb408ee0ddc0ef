"""Evaluate nodes of the canonical tree on tensors: leaf by leaf as they appear, or all at once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from unirl_scale.comm.tree import Node, completed_by, maximal_nodes
from unirl_scale.core.errors import PlanError, ShapeError


class StreamingTree:
    """Sums leaves pushed in order into the maximal nodes of their range, like a binary counter.

    At most log2(total) + 1 tensors are alive at any time, and every addition is in place, so n leaves cost
    the memory of O(log n) and give the bits of the tree over all of them.
    """

    def __init__(self, start: int, stop: int, total: int) -> None:
        """Expect the leaves [start, stop) of a tree over `total`.

        Raises:
            PlanError: the range is not inside [0, total).
        """
        self.node_ranges: tuple[Node, ...] = maximal_nodes(start, stop, total)
        self._start, self._stop, self._total = start, stop, total
        self._next = start
        self._partial: list[Tensor] = []

    def push(self, leaf: Tensor) -> None:
        """Add the next leaf. Takes ownership: the tensor may be overwritten and handed out by `nodes`.

        Args:
            leaf: fp32, the shape of the first leaf.

        Raises:
            PlanError: all leaves of the range were pushed already.
            ShapeError: not fp32, or another shape than the leaf before.
        """
        if self._next == self._stop:
            raise PlanError(f"leaf {self._next} of {self._total}: this tree ends before leaf {self._stop}")
        self._check(leaf)
        self._partial.append(leaf)
        for _ in range(completed_by(self._next, self._start, self._total)):
            right = self._partial.pop()
            self._partial[-1].add_(right)
        self._next += 1

    def finish(self, leaf: Tensor, part: slice) -> list[Tensor]:
        """The finished nodes over a part of the elements; the last leaf is complete there, and never pushed.

        Additions are elementwise, so the parts may be finished one by one, each once, in any order, and give
        the bits that `push` and `nodes` would.

        Args:
            leaf: the last leaf, fp32; overwritten inside `part`.
            part: elements of dim 0.

        Returns:
            Views, in the order of `node_ranges`.

        Raises:
            PlanError: this is not the last leaf of the range.
            ShapeError: not fp32, or another shape than the leaf before.
        """
        if self._next != self._stop - 1:
            raise PlanError(
                f"leaves [{self._start}, {self._stop}) of {self._total}: the next to come is {self._next}; "
                "only the last one can be finished in parts"
            )
        self._check(leaf)
        nodes = [partial[part] for partial in (*self._partial, leaf)]
        for _ in range(completed_by(self._next, self._start, self._total)):
            right = nodes.pop()
            nodes[-1].add_(right)
        return nodes

    def nodes(self) -> list[Tensor]:
        """The finished nodes, fp32, in the order of `node_ranges`.

        Raises:
            PlanError: leaves are missing.
        """
        if self._next != self._stop:
            raise PlanError(
                f"leaves [{self._start}, {self._stop}) of {self._total}: the next to come is {self._next}; "
                "needs all of them before its nodes are read"
            )
        return list(self._partial)

    def _check(self, leaf: Tensor) -> None:
        if leaf.dtype != torch.float32 or (self._partial and leaf.shape != self._partial[-1].shape):
            wanted = f"shape {tuple(self._partial[-1].shape)}" if self._partial else "any shape"
            raise ShapeError(
                f"leaf {self._next}: got {leaf.dtype} {tuple(leaf.shape)}; needs torch.float32 of {wanted}"
            )


def tree_sum_nodes(leaves: Tensor, nodes: Sequence[Node]) -> Tensor:
    """Sum stacked leaves into nodes, level by level.

    Pairing neighbours and carrying an odd last one up gives the tree that splits at the largest power of two.

    Args:
        leaves: fp32 [n, ...]; not modified.
        nodes: half-open ranges of rows, each summed by the tree over its length.

    Returns:
        fp32 [len(nodes), ...].

    Raises:
        ShapeError: not fp32, or a node outside the rows or empty.
    """
    if leaves.dtype != torch.float32:
        raise ShapeError(f"tree_sum_nodes: got {leaves.dtype}; needs torch.float32")
    out = leaves.new_empty(len(nodes), *leaves.shape[1:])
    for row, (start, stop) in enumerate(nodes):
        if not 0 <= start < stop <= leaves.shape[0]:
            raise ShapeError(
                f"tree_sum_nodes: node ({start}, {stop}) of {leaves.shape[0]} leaves is empty or outside"
            )
        out[row] = _tree_sum(leaves[start:stop])
    return out


def _tree_sum(leaves: Tensor) -> Tensor:
    count = leaves.shape[0]
    if count == 1:
        return leaves[0]
    paired = leaves[0 : count - 1 : 2] + leaves[1::2]
    level = torch.cat([paired, leaves[-1:]]) if count % 2 else paired
    step = 1
    while step < level.shape[0]:
        left = level[0 : level.shape[0] - step : 2 * step]
        left += level[step :: 2 * step]
        step *= 2
    return level[0]
