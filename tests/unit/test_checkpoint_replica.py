"""Who keeps whose replica, and the step that ranks agree on when they must go without collectives."""

from __future__ import annotations

import random
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from unirl_scale.train.checkpoint.replica import keeper_groups, replica_keepers
from unirl_scale.train.checkpoint.saves import agree_by_files
from unirl_scale.train.checkpoint.store import Store


def nodes_of(*sizes: int) -> list[str]:
    return [f"n{i}" for i, size in enumerate(sizes) for _ in range(size)]


@pytest.mark.parametrize("sizes", [(1, 1), (4, 4), (2, 2, 2), (8,) * 16, (4, 2), (1, 3, 2), (2, 1)])
def test_a_replica_is_never_on_its_own_node_and_nobody_keeps_too_many(sizes: tuple[int, ...]) -> None:
    nodes = nodes_of(*sizes)
    random.Random(len(nodes)).shuffle(nodes)
    keepers = replica_keepers(nodes)
    assert all(k is not None and nodes[k] != nodes[rank] for rank, k in enumerate(keepers))
    most = max(Counter(keepers).values())
    assert most <= -(-max(sizes) // min(sizes))
    if len(set(sizes)) == 1:
        assert most == 1


def test_one_node_has_nowhere_to_put_replicas() -> None:
    assert replica_keepers(nodes_of(4)) == [None] * 4
    assert keeper_groups([None] * 4) == []


@pytest.mark.parametrize(("racks", "per_rack"), [(2, 2), (3, 4), (4, 1)])
def test_a_replica_is_in_another_rack_where_there_is_one(racks: int, per_rack: int) -> None:
    names = [f"n{i}" for i in range(racks * per_rack)]
    rack = {name: f"r{i // per_rack}" for i, name in enumerate(names)}  # neighbours share a rack
    nodes = [name for name in names for _ in range(2)]
    keepers = replica_keepers(nodes, rack)
    assert all(rack[nodes[k]] != rack[nodes[r]] for r, k in enumerate(keepers) if k is not None)
    assert max(Counter(keepers).values()) == 1
    blind = replica_keepers(nodes)
    shared = sum(rack[nodes[k]] == rack[nodes[r]] for r, k in enumerate(blind) if k is not None)
    assert shared > 0 or per_rack == 1, "the control: without racks some replicas stay in theirs"


def test_unequal_racks_still_keep_apart() -> None:
    rack = {"n0": "a", "n1": "a", "n2": "a", "n3": "b"}
    keepers = replica_keepers(list(rack), rack)
    names = list(rack)
    assert all(rack[names[k]] != rack[n] for n, k in zip(names, keepers, strict=True) if k is not None)


def test_a_group_has_everyone_a_member_exchanges_with() -> None:
    for sizes in ((2, 2, 2), (4, 2), (1, 3, 2)):
        keepers = replica_keepers(nodes_of(*sizes))
        groups = keeper_groups(keepers)
        assert sorted(rank for group in groups for rank in group) == list(range(sum(sizes)))
        for group in groups:
            assert all(keepers[rank] in group for rank in group)


# ---- leaving ------------------------------------------------------------------------------------------
def agree(path: Path, steps: list[list[int]], writers: int = 0, deadline_s: float = 5.0) -> list[int | None]:
    store = Store(path)
    writers = writers or len(steps)
    with ThreadPoolExecutor(len(steps)) as pool:
        answers = [
            pool.submit(agree_by_files, store, 1, rank, writers, mine, deadline_s)
            for rank, mine in enumerate(steps)
        ]
        return [a.result() for a in answers]


def test_ranks_one_step_apart_agree_on_the_step_that_all_have(tmp_path: Path) -> None:
    assert agree(tmp_path, [[7, 8], [7], [8, 7], [6, 7]]) == [7] * 4


def test_ranks_that_share_no_step_say_so(tmp_path: Path) -> None:
    assert agree(tmp_path, [[7], [8]]) == [None] * 2


def test_a_rank_that_is_dead_is_not_waited_for_past_the_grace(tmp_path: Path) -> None:
    assert agree(tmp_path, [[7], [7]], writers=3, deadline_s=0.2) == [None] * 2
