"""The canonical tree against its recursive definition, and the same bits from any partition of the leaves."""

from __future__ import annotations

import operator
import random
import struct
import subprocess
import sys
from itertools import pairwise

import pytest

from tests.canonical import naive_split, naive_tree, pair
from unirl_scale.comm.tree import (
    CombinePlan,
    Node,
    combine,
    completed_by,
    maximal_nodes,
    split_contiguous,
    split_point,
)
from unirl_scale.core.errors import PlanError

SIZES = range(1, 41)


def naive_nodes(low: int, high: int) -> set[Node]:
    if high - low == 1:
        return {(low, high)}
    middle = low + naive_split(high - low)
    return {(low, high)} | naive_nodes(low, middle) | naive_nodes(middle, high)


def naive_sum(leaves: list[float]) -> float:
    return naive_tree(leaves, operator.add)


def bits(value: float) -> bytes:
    return struct.pack("<d", value)


def wild_floats(rng: random.Random, n: int) -> list[float]:
    """Magnitudes 1e-6..1e4, both zeros and subnormals: sums of these depend on the order."""
    special = [-0.0, 0.0, 5e-324, -5e-324]
    draws = [rng.choice((-1, 1)) * 10 ** rng.uniform(-6, 4) for _ in range(n)]
    return [rng.choice(special) if rng.random() < 0.15 else draw for draw in draws]


@pytest.mark.parametrize("total", SIZES)
def test_combining_all_leaves_gives_the_recursive_tree(total: int) -> None:
    leaves = {(i, i + 1): i for i in range(total)}
    assert combine(leaves, total, pair) == naive_tree(range(total), pair)


def test_split_point_is_the_largest_power_of_two_below() -> None:
    assert [split_point(n) for n in range(2, 300)] == [naive_split(n) for n in range(2, 300)]


@pytest.mark.parametrize("total", SIZES)
def test_maximal_nodes_are_nodes_cover_the_range_and_cannot_be_merged(total: int) -> None:
    tree = naive_nodes(0, total)
    for start in range(total + 1):
        for stop in range(start, total + 1):
            nodes = maximal_nodes(start, stop, total)
            assert set(nodes) <= tree
            assert [leaf for low, high in nodes for leaf in range(low, high)] == list(range(start, stop))
            inside = {node for node in tree if start <= node[0] and node[1] <= stop}
            assert not [n for n in inside if any(n[0] <= a and b <= n[1] and n != (a, b) for a, b in nodes)]


@pytest.mark.parametrize("total", SIZES)
def test_a_subtree_depends_on_its_length_alone(total: int) -> None:
    for low, high in naive_nodes(0, total):
        inside = {(a - low, b - low) for a, b in naive_nodes(0, total) if low <= a and b <= high}
        assert inside == naive_nodes(0, high - low)


def test_any_contiguous_partition_gives_the_same_bits() -> None:
    rng = random.Random(7)
    for _ in range(400):
        total, parts = rng.randint(1, 40), rng.randint(1, 9)
        leaves = wild_floats(rng, total)
        cuts = [0, *sorted(rng.randint(0, total) for _ in range(parts - 1)), total]
        values = {
            (low, high): naive_sum(leaves[low:high])
            for start, stop in pairwise(cuts)
            for low, high in maximal_nodes(start, stop, total)
        }
        result = combine(values, total, lambda left, right: left + right)
        assert bits(result) == bits(naive_sum(leaves)), (total, cuts)


def test_control_a_serial_sum_has_other_bits() -> None:
    leaves = wild_floats(random.Random(1), 12)
    assert bits(sum(leaves)) != bits(naive_sum(leaves))


def test_control_swapping_two_leaves_changes_the_bits() -> None:
    assert naive_sum([1e16, 1.0, -1e16, 1.0]) == 0.0
    assert naive_sum([1e16, -1e16, 1.0, 1.0]) == 2.0


@pytest.mark.parametrize("total", SIZES)
def test_completed_by_counts_the_carries(total: int) -> None:
    for start in range(total):
        nodes = {node for node in naive_nodes(0, total) if node[0] >= start and node[1] - node[0] > 1}
        for leaf in range(start, total):
            assert completed_by(leaf, start, total) == sum(high == leaf + 1 for _, high in nodes)


@pytest.mark.parametrize("total", [1, 5, 12, 40])
def test_plans_compose_over_levels(total: int) -> None:
    """Leaves -> the maximal nodes of blocks -> root is the same program as leaves -> root."""
    rng = random.Random(total)
    cut = rng.randint(0, total)
    leaves = [(i, i + 1) for i in range(total)]
    middle = [*maximal_nodes(0, cut, total), *maximal_nodes(cut, total, total)]
    first = CombinePlan.of(leaves, total, middle)
    second = CombinePlan.of(middle, total)
    inner = first.run(list(range(total)), pair)
    assert second.run(inner, pair) == [naive_tree(range(total), pair)]
    assert len(first.steps) + len(second.steps) == total - 1


def test_split_contiguous_is_even_larger_first_and_may_be_empty() -> None:
    assert [len(part) for part in split_contiguous(12, 5)] == [3, 3, 2, 2, 2]
    assert [len(part) for part in split_contiguous(2, 4)] == [1, 1, 0, 0]
    assert split_contiguous(7, 3) == (range(3), range(3, 5), range(5, 7))
    assert split_contiguous(0, 2) == (range(0), range(0))


@pytest.mark.parametrize(
    ("nodes", "message"),
    [
        ([(0, 2), (3, 4)], "leaf 2 is covered by none"),
        ([(0, 2), (2, 4), (2, 4)], "needs each node once"),
        ([(2, 4), (0, 2)], "ascending order"),
        ([(0, 4), (2, 4)], r"node \(2, 4\) of 4 leaves overlaps"),
        ([(0, 1), (1, 3), (3, 4)], "leaf 1 is covered by none"),
        ([], "leaf 0 is covered by none"),
    ],
)
def test_a_leaf_missing_or_counted_twice_is_refused(nodes: list[Node], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        CombinePlan.of(nodes, 4)


def test_combine_refuses_a_node_given_twice() -> None:
    with pytest.raises(PlanError, match="needs each node once"):
        combine([((0, 1), 1.0), ((0, 1), 1.0), ((1, 2), 2.0)], 2, lambda a, b: a + b)


@pytest.mark.parametrize(("start", "stop", "total"), [(-1, 2, 4), (3, 2, 4), (0, 5, 4), (0, 0, 0)])
def test_ranges_outside_the_tree_are_refused(start: int, stop: int, total: int) -> None:
    with pytest.raises(PlanError, match="needs 0 <= start <= stop <= total"):
        maximal_nodes(start, stop, total)


def test_split_contiguous_refuses_no_parts() -> None:
    with pytest.raises(PlanError, match="parts >= 1"):
        split_contiguous(4, 0)


def test_the_tree_imports_no_torch() -> None:
    code = "import sys, unirl_scale.comm.tree; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
