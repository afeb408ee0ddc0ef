"""Ordered reductions over 1..6 gloo ranks have the bits of one process, whoever owns the leaves.

Not covered here: NCCL and HCCL, more than 6 ranks (the schedule itself is checked for more in
tests/unit/test_comm_schedule.py), and transfers too large for one chunk of the default size.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests.dist.ordered_ranks import every_path, random_ranges
from tests.dist.run_ranks import RankPool
from unirl_scale.comm.tree import split_contiguous


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5, 6])
@pytest.mark.parametrize("elements", [1, 7, 1000])
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
