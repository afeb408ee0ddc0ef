"""Tensor sums along the tree: streaming, stacked and recursive give the same bits, in O(log n) memory."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import Tensor

from tests.dist.ordered_ranks import same_bits, tree_sum, wild
from unirl_scale.comm.accumulate import StreamingTree, tree_sum_nodes
from unirl_scale.comm.tree import combine, maximal_nodes
from unirl_scale.core.errors import PlanError, ShapeError


@pytest.mark.parametrize("total", [1, 2, 3, 5, 8, 13, 40])
def test_streaming_and_stacked_sums_of_any_range_are_the_recursive_tree(total: int) -> None:
    leaves = wild(total, 9, seed=total)
    truth = tree_sum(leaves)
    for start in range(total + 1):
        for stop in range(start, total + 1):
            tree = StreamingTree(start, stop, total)
            for leaf in leaves[start:stop]:
                tree.push(leaf.clone())
            nodes = maximal_nodes(start, stop, total)
            stacked = tree_sum_nodes(leaves[start:stop], [(a - start, b - start) for a, b in nodes])
            assert tree.node_ranges == nodes
            for (low, high), streamed, row in zip(nodes, tree.nodes(), stacked, strict=True):
                assert same_bits(streamed, tree_sum(leaves[low:high])) and same_bits(streamed, row)
            if start == 0:
                rest = tree_sum_nodes(leaves, maximal_nodes(stop, total, total)).unbind()
                values = [*zip(nodes, tree.nodes()), *zip(maximal_nodes(stop, total, total), rest)]
                assert same_bits(combine(values, total, torch.add), truth)


def test_control_a_serial_sum_has_other_bits() -> None:
    leaves = wild(13, 9, seed=13)
    assert not same_bits(leaves.sum(0), tree_sum(leaves))


@pytest.mark.parametrize(("start", "stop", "total"), [(0, 64, 64), (0, 63, 63), (5, 61, 64)])
def test_streaming_keeps_a_logarithmic_number_of_tensors(start: int, stop: int, total: int) -> None:
    tree, alive, peak = StreamingTree(start, stop, total), weakref.WeakSet[Tensor](), 0
    for value in range(start, stop):
        leaf = torch.full((2,), float(value))
        alive.add(leaf)
        tree.push(leaf)
        del leaf
        peak = max(peak, len(alive))
    assert peak <= 2 * 6
    assert len(tree.nodes()) == len(maximal_nodes(start, stop, total))


def test_minus_zero_survives() -> None:
    leaves = torch.full((5, 3), -0.0)
    assert same_bits(tree_sum_nodes(leaves, [(0, 5)])[0], leaves[0])


def test_stacked_sum_leaves_its_input_alone() -> None:
    leaves = wild(7, 5)
    before = leaves.clone()
    tree_sum_nodes(leaves, [(0, 4), (4, 6), (6, 7)])
    assert same_bits(leaves, before)


def test_missing_leaves_are_named() -> None:
    tree = StreamingTree(2, 5, 8)
    tree.push(torch.zeros(1))
    with pytest.raises(PlanError, match=r"leaves \[2, 5\) of 8: the next to come is 3"):
        tree.nodes()


def test_a_leaf_too_many_is_refused() -> None:
    tree = StreamingTree(0, 1, 8)
    tree.push(torch.zeros(1))
    with pytest.raises(PlanError, match="ends before leaf 1"):
        tree.push(torch.zeros(1))


@pytest.mark.parametrize("leaf", [torch.zeros(2, dtype=torch.bfloat16), torch.zeros(3)])
def test_a_leaf_of_another_kind_is_refused(leaf: Tensor) -> None:
    tree = StreamingTree(0, 4, 4)
    tree.push(torch.zeros(2))
    with pytest.raises(ShapeError, match=r"needs torch.float32 of shape \(2,\)"):
        tree.push(leaf)


@pytest.mark.parametrize("node", [(0, 0), (2, 5), (-1, 2)])
def test_stacked_nodes_outside_the_rows_are_refused(node: tuple[int, int]) -> None:
    with pytest.raises(ShapeError, match="empty or outside"):
        tree_sum_nodes(torch.zeros(4, 1), [node])


@pytest.mark.parametrize("total", [1, 2, 3, 5, 8, 13])
def test_the_last_leaf_finished_in_parts_gives_the_bits_of_a_push(total: int) -> None:
    leaves = wild(total, 9, seed=total)
    for start in range(total):
        for stop in range(start + 1, total + 1):
            whole, parted = StreamingTree(start, stop, total), StreamingTree(start, stop, total)
            for leaf in leaves[start:stop]:
                whole.push(leaf.clone())
            for leaf in leaves[start : stop - 1]:
                parted.push(leaf.clone())
            last = leaves[stop - 1].clone()
            parts = [parted.finish(last, part) for part in (slice(7, 9), slice(0, 4), slice(4, 7))]
            for node, high, low, middle in zip(whole.nodes(), *parts, strict=True):
                assert same_bits(node, torch.cat([low, middle, high]))


def test_only_the_last_leaf_is_finished_in_parts() -> None:
    tree = StreamingTree(0, 3, 3)
    tree.push(torch.ones(2))
    with pytest.raises(PlanError, match="next to come is 1; only the last one"):
        tree.finish(torch.ones(2), slice(0, 1))
    tree.push(torch.ones(2))
    with pytest.raises(ShapeError, match="leaf 2"):
        tree.finish(torch.ones(3), slice(0, 1))
