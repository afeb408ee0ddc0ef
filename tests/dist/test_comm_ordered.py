"""Ordered reductions over 1..6 gloo ranks have the bits of one process, whoever owns the leaves.

Not covered here: NCCL and HCCL, more than 6 ranks (the schedule itself is checked for more in
tests/unit/test_comm_schedule.py), and transfers too large for one chunk of the default size.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.dist.ordered_ranks import (
    bf16_wire,
    every_path,
    on_leaves,
    random_ranges,
    same_bits,
    sent_and_planned,
    tree_sum,
    uneven_sizes,
    vendor_sum,
    wild,
)
from tests.dist.run_ranks import RankPool
from unirl_scale.comm.groups import Group
from unirl_scale.comm.ordered import OrderedReducer
from unirl_scale.comm.tree import split_contiguous
from unirl_scale.core.errors import PlanError, ShapeError


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5, 6])
@pytest.mark.parametrize("elements", [0, 1, 7, 1000])
def test_every_path_has_the_bits_of_one_process(run_ranks: RankPool, world_size: int, elements: int) -> None:
    for total in (world_size, 12):
        ranges = split_contiguous(total, world_size)
        for rank, found in enumerate(run_ranks(every_path, world_size, total, elements, ranges, total)):
            assert [name for name, same in found.items() if not same] == [], (rank, total)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("world_size", [3, 4, 6])
def test_any_contiguous_partition_even_with_empty_parts(
    run_ranks: RankPool, world_size: int, seed: int
) -> None:
    total = (1, 5, 13, 40)[seed]
    ranges = random_ranges(total, world_size, seed)
    for rank, found in enumerate(run_ranks(every_path, world_size, total, 33, ranges, seed)):
        assert [name for name, same in found.items() if not same] == [], (rank, ranges)


def flipped_bit(leaves: Tensor) -> Tensor:
    """Lowest mantissa bit of the largest leaf of column 5."""
    row = int(leaves[:, 5].abs().argmax())
    changed = leaves.clone()
    changed.view(torch.int32)[row, 5] ^= 1
    return changed


def swapped(leaves: Tensor) -> Tensor:
    return leaves[[0, 2, 1, *range(3, leaves.shape[0])]]


def dropped(leaves: Tensor) -> Tensor:
    changed = leaves.clone()
    changed[1] = 0.0
    return changed


@pytest.mark.parametrize("spoil", [flipped_bit, swapped, dropped])
def test_control_spoiled_leaves_show_in_the_bits(
    run_ranks: RankPool, spoil: Callable[[Tensor], Tensor]
) -> None:
    """Without these, equal bits above could mean that the comparison or the data cannot tell."""
    leaves, ranges = wild(4, 50), split_contiguous(4, 4)
    truth = tree_sum(leaves)
    spoiled = spoil(leaves)
    assert all(same_bits(result, truth) for result in run_ranks(on_leaves, 4, leaves, ranges))
    for result in run_ranks(on_leaves, 4, spoiled, ranges):
        assert not same_bits(result, truth) and same_bits(result, tree_sum(spoiled))


def test_control_a_dropped_leaf_of_zeros_still_shows() -> None:
    """Adding +0 in the place of an absent leaf is not harmless: it turns -0 into +0."""
    minus_zero = torch.full((3, 1), -0.0)
    padded = torch.cat([minus_zero, torch.zeros(1, 1)])
    assert torch.equal(tree_sum(padded), tree_sum(minus_zero))
    assert not same_bits(tree_sum(padded), tree_sum(minus_zero))


@pytest.mark.parametrize("world_size", [3, 4, 6])
def test_control_a_vendor_sum_has_other_bits(run_ranks: RankPool, world_size: int) -> None:
    """The same leaves through one float SUM collective: close, but not the tree."""
    leaves, ranges = wild(world_size, 1000), split_contiguous(world_size, world_size)
    truth = tree_sum(leaves)
    sizes = uneven_sizes(1000, world_size)
    for rank, found in enumerate(run_ranks(vendor_sum, world_size, leaves, ranges)):
        start = sum(sizes[:rank])
        expected = {
            "all_reduce": truth,
            "reduce_scatter": truth[start : start + sizes[rank]],
            "started": truth[start : start + sizes[rank]],
            "even": truth[2 * rank : 2 * rank + 2],
        } | ({"reduce": truth} if rank == 0 else {})
        for kind, part in expected.items():
            torch.testing.assert_close(found[kind], part, rtol=1e-4, atol=1e-2)
        assert not same_bits(found["all_reduce"], truth)
        assert rank == 0 or found["reduce"] is None


def test_vendor_sums_count_a_rank_without_leaves_as_zeros(run_ranks: RankPool) -> None:
    leaves, ranges = wild(2, 20), (range(1), range(1, 1), range(1, 2))
    for found in run_ranks(vendor_sum, 3, leaves, ranges):
        torch.testing.assert_close(found["all_reduce"], leaves.sum(0))


@pytest.mark.parametrize(("world_size", "inner"), [(1, None), (3, None), (4, 2), (6, 3)])
def test_rounded_leaves_may_travel_in_bf16(run_ranks: RankPool, world_size: int, inner: int | None) -> None:
    sizes = uneven_sizes(100, world_size)
    for rank, (as_fp32, as_tree, sent_bytes) in enumerate(run_ranks(bf16_wire, world_size, 100, inner)):
        assert as_fp32 and as_tree
        if inner is None:
            assert sent_bytes == 2 * (100 - sizes[rank])


@pytest.mark.parametrize(
    ("ranges", "sizes", "inner"),
    [
        (split_contiguous(6, 6), [100, 0, 7, 300, 1, 50], None),
        (split_contiguous(13, 6), [100, 0, 7, 300, 1, 50], 2),
        (split_contiguous(13, 6), [64] * 6, (3,)),
        ((range(4), range(4, 4), range(4, 9), range(9, 9), range(9, 9), range(9, 12)), [64] * 6, 3),
    ],
)
def test_executed_bytes_are_the_planned_bytes(
    run_ranks: RankPool, ranges: tuple[range, ...], sizes: list[int], inner: int | tuple[int, ...] | None
) -> None:
    for sent_bytes, planned_bytes in run_ranks(sent_and_planned, 6, ranges, sizes, inner):
        assert sent_bytes == planned_bytes


def test_a_wire_dtype_that_would_round_sums_is_refused() -> None:
    with pytest.raises(
        PlanError, match=r"only single leaves may travel in torch.bfloat16\nhint: use torch.float32"
    ):
        OrderedReducer(Group.single(), [range(2)], wire_dtype=torch.bfloat16)
    with pytest.raises(PlanError, match=r"torch.float16"):
        OrderedReducer(Group.single(), [range(1)], wire_dtype=torch.float16)


@pytest.mark.parametrize(
    ("nodes", "sizes"),
    [
        (torch.zeros(1, 4, dtype=torch.bfloat16), [4]),
        (torch.zeros(2, 4), [4]),
        (torch.zeros(1, 4), [3]),
        (torch.zeros(1, 4), [2, 2]),
        (torch.zeros(1, 2, 2), [4]),
    ],
)
def test_nodes_and_sizes_that_do_not_fit_are_refused(nodes: Tensor, sizes: list[int]) -> None:
    with pytest.raises(ShapeError, match="needs"):
        OrderedReducer(Group.single(), [range(4)]).reduce_scatter(nodes, sizes)


def test_one_range_a_member_is_needed() -> None:
    with pytest.raises(PlanError, match="got 2 ranges for a group of 1"):
        OrderedReducer(Group.single(), [range(2), range(2, 4)])
