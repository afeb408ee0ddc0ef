"""Schedules of ordered reductions, executed symbolically for more members than a test could start."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence

import pytest

from tests.canonical import naive_tree, pair
from unirl_scale.comm.schedule import ReductionSchedule
from unirl_scale.comm.tree import combine, maximal_nodes, split_contiguous
from unirl_scale.core.errors import PlanError

Held = dict[int, list[object]]  # destination -> one value a node


def execute(schedules: Sequence[ReductionSchedule], ranges: Sequence[range], total: int) -> list[object]:
    """Pass nested pairs instead of numbers through every stage; returns what each member ends up with."""
    held: list[Held] = []
    for schedule in schedules:
        nodes = [
            combine({(leaf - low, leaf - low + 1): leaf for leaf in range(low, high)}, high - low, pair)
            for low, high in schedule.nodes
        ]
        held.append({member: list(nodes) for member in range(len(ranges))})
    for level in range(len(schedules[0].stages)):
        held = [_exchange(schedules, held, level, member) for member in range(len(ranges))]
    assert all(list(own) == [member] and len(own[member]) == 1 for member, own in enumerate(held))
    return [own[member][0] for member, own in enumerate(held)]


def _exchange(schedules: Sequence[ReductionSchedule], held: list[Held], level: int, member: int) -> Held:
    stage = schedules[member].stages[level]
    arrived: Held = {}
    for peer, rows in zip(stage.peers, stage.rows, strict=True):
        theirs = schedules[peer].stages[level]
        assert theirs.held == tuple(held[peer])
        for destination in theirs.sends[theirs.peers.index(member)]:
            assert len(held[peer][destination]) == rows
            arrived.setdefault(destination, []).extend(held[peer][destination])
    return {destination: stage.plan.run(values, pair) for destination, values in arrived.items()}


@pytest.mark.parametrize(
    ("members", "blocks", "total"),
    [
        (1, (), 5),
        (6, (2,), 12),
        (6, (3,), 7),
        (12, (2, 6), 12),
        (24, (4, 8), 40),
        (24, (), 17),
        (16, (2, 4, 8), 9),
    ],
)
def test_every_member_ends_with_the_tree_over_all_leaves(
    members: int, blocks: tuple[int, ...], total: int
) -> None:
    ranges = split_contiguous(total, members)
    schedules = [ReductionSchedule.of(ranges, member, blocks) for member in range(members)]
    if members == 1:
        assert schedules[0].stages == () and schedules[0].nodes == ((0, total),)
        return
    assert execute(schedules, ranges, total) == [naive_tree(range(total), pair)] * members


def test_each_level_leaves_a_block_only_its_share_of_the_elements() -> None:
    ranges = split_contiguous(64, 64)
    flat, two = (ReductionSchedule.of(ranges, 0, blocks) for blocks in ((), (8,)))
    sizes = [1] * 64
    assert flat.sent_elements(sizes) == 63
    assert two.sent_elements(sizes) == 7 * 8 + 7  # 7/8 inside the block, then 7 pieces across blocks
    across = two.stages[1]
    assert across.peers == tuple(range(0, 64, 8)) and across.rows == (1,) * 8


def test_an_aligned_member_ships_one_node() -> None:
    ranges = split_contiguous(16, 4)
    assert ReductionSchedule.of(ranges, 1).nodes == ((4, 8),)
    assert ReductionSchedule.of(split_contiguous(12, 5), 1).nodes == maximal_nodes(3, 6, 12)


@pytest.mark.parametrize(
    ("ranges", "message"),
    [
        ((range(2), range(3, 4)), r"ranges\[1\]: got range\(3, 4\); needs consecutive leaves from 2 on"),
        ((range(2), range(1, 4)), "needs consecutive leaves from 2 on"),
        ((range(0), range(0)), "hold no leaf"),
        ((range(0, 4, 2), range(4, 5)), "needs consecutive leaves from 0 on"),
    ],
)
def test_gaps_and_overlaps_are_refused(ranges: tuple[range, ...], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        ReductionSchedule.of(ranges, 0)


@pytest.mark.parametrize("blocks", [(4,), (0,), (2, 3), (12,)])
def test_blocks_that_do_not_nest_are_refused_with_the_legal_ones(blocks: tuple[int, ...]) -> None:
    with pytest.raises(PlanError, match=r"each must divide the next and the group\nhint: instead of"):
        ReductionSchedule.of(split_contiguous(6, 6), 0, blocks)


def test_the_schedule_imports_no_torch() -> None:
    code = "import sys, unirl_scale.comm.schedule; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
