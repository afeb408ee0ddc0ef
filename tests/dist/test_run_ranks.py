"""The harness itself: values by rank, every traceback, dead and hung ranks named and replaced."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch

from tests.dist.run_ranks import RankPool, RanksFailed
from unirl_scale.comm.groups import GroupFactory


def rank_of(groups: GroupFactory, offset: int) -> tuple[int, int, int]:
    return groups.rank + offset, groups.world_size, os.getpid()


def sum_of_ranks(groups: GroupFactory) -> torch.Tensor:
    return groups.world.all_reduce_int(torch.tensor(groups.rank))


def raise_on(groups: GroupFactory, ranks: list[int]) -> None:
    if groups.rank in ranks:
        print(f"printed by {groups.rank}")
        raise ValueError(f"broken on {groups.rank}")
    groups.world.barrier()


def hang_on(groups: GroupFactory, rank: int) -> None:
    if groups.rank == rank:
        time.sleep(1000)


def stop_on(groups: GroupFactory, rank: int) -> None:
    if groups.rank == rank:
        os.kill(os.getpid(), signal.SIGSTOP)


def die_on(groups: GroupFactory, rank: int) -> None:
    if groups.rank == rank:
        os._exit(17)
    groups.world.barrier()


def unpicklable(groups: GroupFactory) -> object:
    return lambda: groups


def environment(groups: GroupFactory, *names: str) -> list[str | None]:
    return [os.environ.get(name) for name in names]


@pytest.mark.parametrize("world_size", [1, 3, 6])
def test_values_come_back_by_rank(run_ranks: RankPool, world_size: int) -> None:
    values = run_ranks(rank_of, world_size, 10)
    assert [value[:2] for value in values] == [(10 + rank, world_size) for rank in range(world_size)]


def test_workers_are_reused_over_fresh_worlds(run_ranks: RankPool) -> None:
    pids = [{pid for _, _, pid in run_ranks(rank_of, size, 0)} for size in (3, 2, 3)]
    assert pids[0] == pids[2] and pids[1] < pids[0]
    assert [int(total) for total in run_ranks(sum_of_ranks, 3)] == [3, 3, 3]


def test_every_failing_rank_shows_its_traceback_and_output(run_ranks: RankPool) -> None:
    with pytest.raises(RanksFailed) as failure:
        run_ranks(raise_on, 3, [0, 2])
    text = str(failure.value)
    assert "ValueError: broken on 0" in text and "ValueError: broken on 2" in text
    assert "printed by 2" in text and "in raise_on" in text
    assert [int(total) for total in run_ranks(sum_of_ranks, 3)] == [3, 3, 3]


@pytest.mark.parametrize("hang", [hang_on, stop_on])
def test_a_hung_rank_is_named_killed_and_replaced(run_ranks: RankPool, hang: object) -> None:
    before = [pid for _, _, pid in run_ranks(rank_of, 2, 0)]
    with pytest.raises(RanksFailed, match="rank 1") as failure:
        run_ranks(hang, 2, 1, timeout_s=3.0)
    assert f"rank 1 (pid {before[1]})" in str(failure.value)
    if hang is hang_on:
        assert "in hang_on" in str(failure.value)  # its stack at the deadline
    with pytest.raises(ProcessLookupError):
        os.kill(before[1], 0)
    after = [pid for _, _, pid in run_ranks(rank_of, 2, 0)]
    assert before[1] not in after


def test_a_dead_rank_is_named_and_replaced(run_ranks: RankPool) -> None:
    with pytest.raises(RanksFailed, match=r"rank 1 \(pid \d+\) died: exit status 17"):
        run_ranks(die_on, 3, 1)
    assert [int(total) for total in run_ranks(sum_of_ranks, 3)] == [3, 3, 3]


def test_a_value_that_cannot_be_pickled_is_an_error_not_a_hang(run_ranks: RankPool) -> None:
    with pytest.raises(RanksFailed, match="pickle"):
        run_ranks(unpicklable, 2)


def test_workers_have_the_reproducible_environment_and_isolated_ones_their_own(run_ranks: RankPool) -> None:
    names = ("MKL_CBWR", "OMP_NUM_THREADS", "ONLY_HERE")
    assert run_ranks(environment, 1, *names) == [["AVX2,STRICT", "1", None]]
    assert run_ranks(environment, 1, *names, env={"ONLY_HERE": "yes"}) == [["AVX2,STRICT", "1", "yes"]]
    assert run_ranks(environment, 1, *names) == [["AVX2,STRICT", "1", None]]


def test_a_function_ranks_cannot_import_is_refused(run_ranks: RankPool) -> None:
    with pytest.raises(ValueError, match="import by name"):
        run_ranks(lambda groups: None, 2)
