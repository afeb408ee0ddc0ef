"""A rank that waits for a peer that never comes is freed by another thread of its own, and can connect again.

Not covered here: NCCL and HCCL, which abort communicators (tests/device).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from tests.dist.run_ranks import Place, RankPool
from unirl_scale.comm.breaker import Breaker
from unirl_scale.comm.groups import GroupFactory, connect
from unirl_scale.core.errors import CommError
from unirl_scale.core.progress import Progress

ABSENT = 2  # the rank that never comes


def store_of(place: Place, name: str, ranks: int) -> dist.Store:
    return dist.FileStore(str(Path(place.folder) / name), ranks)


def until(happened: Callable[[], bool]) -> None:
    while not happened():
        time.sleep(0.01)


def wait_for_the_absent(place: Place) -> tuple[str, str, int]:
    """(error, what the rank was doing meanwhile, sum over the next world)."""
    done = store_of(place, "done", 1)
    breaker, progress = Breaker(), Progress()
    arguments = {"timeout": timedelta(seconds=300), "progress": progress, "breaker": breaker}
    error, doing = "", []

    def watch() -> None:
        until(lambda: progress.operation.startswith(("irecv", "all_gather", "exchange")))
        doing.append(progress.describe())
        breaker.break_now("a test says so")

    try:
        with connect(
            place.rank, place.world_size, store=store_of(place, "first", place.world_size), **arguments
        ) as groups:
            pairs = groups.build_groups([(0, 1), (1, 2)])
            if place.rank == ABSENT:
                done.set("built", "1")
                done.wait(["broken/0", "broken/1"])
                raise CommError("woke up")
            done.wait(["built"])  # a break would fail it
            progress.enter("score", step=5)
            if place.rank == 0:  # waits for rank 1, which waits for the absent one
                watcher = threading.Thread(target=watch)
                watcher.start()
                try:
                    pairs[0, 1].irecv(torch.empty(3), 1).wait()
                finally:
                    watcher.join()
            else:
                wait_on_world(groups)
    except CommError as failure:
        error = str(failure)
        if place.rank != ABSENT:
            done.set(f"broken/{place.rank}", "1")
    survivors = place.world_size - 1
    if place.rank == ABSENT:
        return error, "", 0
    with connect(place.rank, survivors, store=store_of(place, "second", survivors)) as groups:
        total = int(groups.world.all_reduce_int(torch.tensor([place.rank + 1]))[0])
    return error, doing[0] if doing else "", total


def wait_on_world(groups: GroupFactory) -> None:
    groups.world.all_gather(torch.ones(3))


def test_breaking_a_world_frees_the_waiting_rank_and_its_peers(run_ranks: RankPool) -> None:
    waiting, peer, absent = run_ranks(wait_for_the_absent, 3, connected=False, timeout_s=30.0)
    assert waiting[0].startswith("irecv over ranks (0, 1):")
    assert waiting[1] == "step 5, score, irecv over ranks 0, 1"
    # Only rank 0 was told; rank 1 fails because rank 0 closed its end.
    assert peer[0].startswith("all_gather over ranks (0, 1, 2):")
    assert absent[0] == "woke up"
    assert waiting[2] == peer[2] == 3


def meet_too_few(place: Place) -> str:
    """Break a rank that waits for its peers in a TCP store."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    breaker = Breaker(store_port=server.port)
    client = dist.TCPStore("127.0.0.1", server.port, is_master=False, wait_for_workers=False)
    threading.Timer(0.3, breaker.break_now, args=["nobody came"]).start()
    try:
        with connect(0, 2, store=client, breaker=breaker, timeout=timedelta(seconds=300)):
            return "connected"
    except CommError as error:
        return str(error)


def test_breaking_a_world_frees_a_rank_that_waits_for_its_peers(run_ranks: RankPool) -> None:
    (message,) = run_ranks(meet_too_few, 1, connected=False, timeout_s=30.0)
    assert message.startswith("connect over ranks (0, 1): ")


def connect_broken(place: Place) -> str:
    breaker = Breaker()
    breaker.break_now("too late")
    try:
        with connect(0, 2, store=dist.HashStore(), breaker=breaker):
            return "connected"
    except CommError as error:
        return str(error)


def test_a_broken_world_does_not_start(run_ranks: RankPool) -> None:
    assert run_ranks(connect_broken, 1, connected=False) == [
        "the connections of this world were cut: too late"
    ]


class Communicator:
    """Stands for one that waits for its peers when it is destroyed."""

    def __init__(self) -> None:
        self.aborted_in: list[bool] = []  # whether the world was still there, at each call

    def abort(self) -> None:
        self.aborted_in.append(dist.is_initialized())


def leave_with(place: Place, error: bool) -> tuple[list[bool], bool]:
    """(when its communicators were aborted, whether a peer that waits for this rank is freed)."""
    breaker, communicator = Breaker(), Communicator()
    arguments = {"timeout": timedelta(seconds=300), "breaker": breaker}
    freed = False
    try:
        with connect(place.rank, 2, store=store_of(place, f"left-{error}", 2), **arguments) as groups:
            breaker.add(communicator)  # type: ignore[arg-type]
            if error and place.rank == 0:
                raise ValueError("rank 0 has no more to say")
            if error:
                groups.world.all_gather(torch.ones(3))
    except CommError:
        freed = True
    except ValueError:
        pass
    return communicator.aborted_in, freed


def test_a_rank_that_fails_aborts_its_communicators_before_it_destroys_them(run_ranks: RankPool) -> None:
    failed, waited = run_ranks(leave_with, 2, True, connected=False, timeout_s=30.0)
    assert failed == ([True], False)
    assert waited == ([True], True)


def test_control_a_rank_that_leaves_in_order_aborts_nothing(run_ranks: RankPool) -> None:
    assert run_ranks(leave_with, 2, False, connected=False, timeout_s=30.0) == [([], False), ([], False)]
