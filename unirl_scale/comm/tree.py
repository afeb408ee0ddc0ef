"""The canonical tree: the one order in which n numbered leaves are ever added. Imports no torch.

The tree over n leaves splits at the largest power of two below n (the split of RFC 6962, section 2.1) and
a node is `left + right`. The shape of a subtree depends on its length alone, so an owner of any contiguous
range can evaluate the maximal nodes inside it, and any holder of disjoint covering nodes can finish the
tree: the bits do not depend on who owned what. A missing leaf is absent, never +0 (x + 0 turns -0 into +0).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableSequence, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

from unirl_scale.core.errors import PlanError

T = TypeVar("T")

Node = tuple[int, int]
"""Half-open range [start, stop) of the leaves that a tree node sums."""


def split_point(length: int) -> int:
    """Leaves in the left child of a node of `length` >= 2 leaves: the largest power of two below it."""
    return 1 << ((length - 1).bit_length() - 1)


def split_contiguous(total: int, parts: int) -> tuple[range, ...]:
    """Cut `total` items into `parts` contiguous ranges as even as possible, the larger ones first.

    Args:
        total: items, >= 0.
        parts: ranges wanted, >= 1; may exceed `total`, then the last ranges are empty.

    Returns:
        `parts` consecutive ranges covering 0..total, e.g. 12 over 5 -> lengths 3, 3, 2, 2, 2.

    Raises:
        PlanError: `total` < 0 or `parts` < 1.
    """
    if total < 0 or parts < 1:
        raise PlanError(
            f"split_contiguous: got {total} items over {parts} parts; needs items >= 0 and parts >= 1"
        )
    quotient, remainder = divmod(total, parts)
    starts = [part * quotient + min(part, remainder) for part in range(parts + 1)]
    return tuple(range(a, b) for a, b in pairwise(starts))


def maximal_nodes(start: int, stop: int, total: int) -> tuple[Node, ...]:
    """The maximal complete subtrees, of the tree over `total` leaves, that lie inside [start, stop).

    Args:
        start, stop: half-open range of leaves, 0 <= start <= stop <= total.
        total: leaves of the whole tree, >= 1.

    Returns:
        Absolute ranges, left to right, disjoint, covering [start, stop): one when the range is a node of the
        tree, at most 2 log2(total) otherwise, none when it is empty.

    Raises:
        PlanError: the range is not inside [0, total).
    """
    if not 0 <= start <= stop <= total or total < 1:
        raise PlanError(
            f"leaves [{start}, {stop}) of {total}: needs 0 <= start <= stop <= total and total >= 1"
        )
    return tuple(_nodes_inside(start, stop, 0, total))


def _nodes_inside(start: int, stop: int, low: int, high: int) -> Iterator[Node]:
    if stop <= low or high <= start:
        return
    if start <= low and high <= stop:
        yield (low, high)
        return
    middle = low + split_point(high - low)
    yield from _nodes_inside(start, stop, low, middle)
    yield from _nodes_inside(start, stop, middle, high)


def completed_by(leaf: int, start: int, total: int) -> int:
    """How many inner nodes, using only leaves from `start` on, are completed by the arrival of `leaf`.

    This is how many times a stack of partial sums merges its top two entries after `leaf` is pushed, the
    carries of a binary counter.
    """
    low, high, completed = 0, total, 0
    while high - low > 1:
        completed += high == leaf + 1 and low >= start
        middle = low + split_point(high - low)
        low, high = (low, middle) if leaf < middle else (middle, high)
    return completed


@dataclass(frozen=True, slots=True, kw_only=True)
class CombinePlan:
    """A straight-line program that adds finer nodes into coarser ones, in place.

    Attributes:
        nodes: the inputs, left to right; input i sits in slot i.
        targets: the nodes to evaluate, left to right.
        steps: (left, right) slots, in order: slot[left] = slot[left] + slot[right].
        outputs: slot of each target once the steps have run; the first is slot 0.
    """

    nodes: tuple[Node, ...]
    targets: tuple[Node, ...]
    steps: tuple[tuple[int, int], ...]
    outputs: tuple[int, ...]

    @classmethod
    def of(cls, nodes: Sequence[Node], total: int, targets: Sequence[Node] | None = None) -> CombinePlan:
        """Plan the way from `nodes` to `targets` in the tree over `total` leaves.

        Args:
            nodes: disjoint nodes of the tree in ascending order, together covering exactly the targets.
            total: leaves of the whole tree.
            targets: nodes of the tree, ascending; None = the root.

        Raises:
            PlanError: a leaf is missing, counted twice, or a range is not a node of the tree.
        """
        goals = ((0, total),) if targets is None else tuple(targets)
        for left, right in pairwise(nodes):
            if right <= left:
                raise PlanError(f"node {right} follows {left}; needs each node once, in ascending order")
        builder = _PlanBuilder(nodes)
        outputs = tuple(builder.slot_of(low, high) for low, high in goals)
        unused = [node for node in nodes if node not in builder.used]
        if unused:
            raise PlanError(f"node {unused[0]} of {total} leaves overlaps another node or has no target")
        return cls(nodes=tuple(nodes), targets=goals, steps=tuple(builder.steps), outputs=outputs)

    @property
    def is_plain_tree(self) -> bool:
        """Whether this is the canonical tree over the slots themselves: then a fused kernel may run it."""
        if len(self.targets) != 1:
            return False
        slots = [(slot, slot + 1) for slot in range(len(self.nodes))]
        return self.steps == CombinePlan.of(slots, len(slots)).steps

    def run(self, slots: MutableSequence[T], add: Callable[[T, T], T]) -> list[T]:
        """Execute on one value a node; `slots` is overwritten. Returns one value a target.

        Raises:
            PlanError: not one value a node.
        """
        if len(slots) != len(self.nodes):
            raise PlanError(f"got {len(slots)} values for {len(self.nodes)} nodes; needs one a node")
        for left, right in self.steps:
            slots[left] = add(slots[left], slots[right])
        return [slots[slot] for slot in self.outputs]


class _PlanBuilder:
    """Walks the tree below each target and records the additions, left child first."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        self.slots = {tuple(node): slot for slot, node in enumerate(nodes)}
        self.used: set[Node] = set()
        self.steps: list[tuple[int, int]] = []

    def slot_of(self, low: int, high: int) -> int:
        slot = self.slots.get((low, high))
        if slot is not None:
            self.used.add((low, high))
            return slot
        if high - low < 2:
            raise PlanError(f"leaf {low} is covered by none of the given nodes; needs each leaf exactly once")
        middle = low + split_point(high - low)
        left = self.slot_of(low, middle)
        right = self.slot_of(middle, high)
        self.steps.append((left, right))
        return left


def combine(values: Mapping[Node, T] | Sequence[tuple[Node, T]], total: int, add: Callable[[T, T], T]) -> T:
    """Finish the tree over `total` leaves from the values of any disjoint nodes that cover it.

    Args:
        values: node -> value, in any order; or (node, value) pairs.
        total: leaves of the whole tree, >= 1.
        add: left, right -> their sum; may overwrite and return left.

    Raises:
        PlanError: a leaf is missing, counted twice, or a range is not a node of the tree.
    """
    pairs = sorted(values.items() if isinstance(values, Mapping) else values, key=lambda pair: pair[0])
    plan = CombinePlan.of([node for node, _ in pairs], total)
    return plan.run([value for _, value in pairs], add)[0]
