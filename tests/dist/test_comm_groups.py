"""Byte-only collectives over gloo carry every dtype unchanged, count what they send, and fail by name.

Not covered here: NCCL and HCCL, and tensors on a device that the backend does not reach (staging).
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.dist.ordered_ranks import same_bits
from tests.dist.run_ranks import Place, RankPool, RanksFailed
from unirl_scale.comm.groups import Group, GroupFactory, Traffic, connect
from unirl_scale.core.errors import CommError, MeshError, ShapeError

DTYPES = [
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex64,
]


def payload(dtype: torch.dtype, rank: int, n: int = 6) -> Tensor:
    """Random bytes, so that NaN payloads, -0 and subnormals travel too."""
    raw = torch.randint(0, 256, (n * 16,), generator=torch.Generator().manual_seed(rank), dtype=torch.uint8)
    if dtype == torch.bool:
        return raw[:n] > 127
    return raw.view(dtype)[:n].clone()


def carry(groups: GroupFactory, dtype: torch.dtype) -> dict[str, bool]:
    """Every collective on random bits of one dtype -> did they arrive as they were?"""
    group, me, n = groups.world, groups.rank, groups.world_size
    everyone = [payload(dtype, rank) for rank in range(n)]
    mine = everyone[me]
    found = {}

    rows = group.all_gather(mine.view(2, 3))
    found["all_gather"] = all(same_bits(row, theirs.view(2, 3)) for row, theirs in zip(rows, everyone))
    found["all_gather of a scalar"] = same_bits(
        group.all_gather(mine[0]), torch.stack([p[0] for p in everyone])
    )
    found["all_gather of a view"] = same_bits(
        group.all_gather(mine.view(2, 3).T), torch.stack([p.view(2, 3).T for p in everyone])
    )

    sizes = [rank % 3 * 2 for rank in range(n)]
    uneven = group.all_gather_uneven(mine[: sizes[me]], sizes)
    found["all_gather_uneven"] = same_bits(uneven, torch.cat([p[:s] for p, s in zip(everyone, sizes)]))

    first, second = group.start_all_gather(mine), group.start_all_gather_uneven(mine[: sizes[me]], sizes)
    rows = second.wait()
    found["start_all_gather_uneven"] = rows.shape == (n, max(sizes)) and all(
        same_bits(row[:size], theirs[:size]) for row, size, theirs in zip(rows, sizes, everyone)
    )
    found["start_all_gather"] = same_bits(first.wait(), torch.stack(everyone))

    # member i sends (i + j) % 3 elements to member j
    send = [(me + peer) % 3 for peer in range(n)]
    starts = [[sum((i + k) % 3 for k in range(j)) for j in range(n)] for i in range(n)]
    longer = [payload(dtype, rank, 3 * n) for rank in range(n)]
    arrived = group.all_to_all(longer[me][: sum(send)], send, send)
    expected = [longer[i][starts[i][me] : starts[i][me] + (i + me) % 3] for i in range(n)]
    found["all_to_all"] = same_bits(arrived, torch.cat(expected))

    found["broadcast"] = same_bits(group.broadcast(mine.clone(), n - 1), everyone[n - 1])

    group.connect_ring()
    if n > 1:
        after, before = (me + 1) % n, (me - 1) % n
        sending, receiving = group.isend(mine, after), group.irecv(torch.empty_like(mine), before)
        found["irecv"] = same_bits(receiving.wait(), everyone[before])
        sending.wait()
        (left, right) = group.exchange(
            [(mine, after), (mine, before)],
            [(torch.empty_like(mine), before), (torch.empty_like(mine), after)],
        )
        found["exchange"] = same_bits(left, everyone[before]) and same_bits(right, everyone[after])
    return found


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_every_dtype_travels_bit_for_bit(run_ranks: RankPool, world_size: int) -> None:
    for dtype in DTYPES:
        for found in run_ranks(carry, world_size, dtype):
            assert [what for what, same in found.items() if not same] == [], dtype


def orderless(groups: GroupFactory) -> dict[str, object]:
    group, me = groups.world, groups.rank
    signed_zero = torch.tensor(
        [0.0 if me % 2 else -0.0, -1.0 - me, float("nan") if me == 1 else 5.0, float(me)]
    )
    try:
        group.all_reduce_int(torch.ones(2))
        refusal = ""
    except ShapeError as error:
        refusal = str(error)
    group.barrier()
    return {
        "int": group.all_reduce_int(torch.tensor([me, 2**40 + me])).tolist(),
        "max": group.all_reduce_max(signed_zero),
        "int max": group.all_reduce_max(torch.tensor([me, -me])).tolist(),
        "objects": group.all_gather_object({"rank": me, "pad": "x" * me * 100}),
        "refusal": refusal,
    }


@pytest.mark.parametrize("world_size", [1, 3])
def test_reductions_without_an_order(run_ranks: RankPool, world_size: int) -> None:
    for found in run_ranks(orderless, world_size):
        n = world_size
        assert found["int"] == [n * (n - 1) // 2, n * 2**40 + n * (n - 1) // 2]
        nan = float("nan") if n > 1 else 5.0
        expected = torch.tensor([0.0, -1.0, nan, float(n - 1)])
        assert torch.equal(found["max"].nan_to_num(-7), expected.nan_to_num(-7))
        assert not torch.signbit(found["max"][0])
        assert found["int max"] == [n - 1, 0]
        assert found["objects"] == [{"rank": rank, "pad": "x" * rank * 100} for rank in range(n)]
        assert (
            "takes integer dtypes only\nhint: sum floating-point values with OrderedReducer"
            in found["refusal"]
        )


def overlapping(groups: GroupFactory) -> dict[tuple[int, ...], list[int]]:
    lists = [[0, 1], [2, 3], [0, 2], [1, 3], [0, 1], [0], [1], [2], [3], [0, 1, 2, 3]]
    made = groups.build_groups(
        lists[::-1] if groups.rank % 2 else lists
    )  # each rank names them in its own order
    again = groups.build_groups([(0, 1), (2, 3)])
    assert all(made[ranks] is group for ranks, group in again.items())
    assert made[0, 1, 2, 3] is groups.world
    assert made[(groups.rank,)].handle is None
    return {ranks: group.all_gather(torch.tensor(groups.rank)).tolist() for ranks, group in made.items()}


def test_each_distinct_list_becomes_one_group_in_any_order_of_naming(run_ranks: RankPool) -> None:
    for rank, found in enumerate(run_ranks(overlapping, 4)):
        assert all(list(ranks) == gathered and rank in ranks for ranks, gathered in found.items())
        assert len(found) == 4


def traffic_of(groups: GroupFactory) -> Traffic:
    group, me = groups.world, groups.rank
    group.all_gather(torch.zeros(5, dtype=torch.bfloat16))
    group.all_to_all(torch.zeros(6), [1, 2, 3], [me + 1] * 3)
    group.broadcast(torch.zeros(4, dtype=torch.int64), 1)
    if me == 0:
        group.isend(torch.zeros(3), 2).wait()
    if me == 2:
        group.irecv(torch.zeros(3), 0).wait()
    return group.traffic


def test_traffic_counts_payload_bytes_to_other_members(run_ranks: RankPool) -> None:
    for me, traffic in enumerate(run_ranks(traffic_of, 3)):
        counted = {k: (v.calls, v.sent_bytes, v.received_bytes) for k, v in traffic.by_kind.items()}
        expected = {
            "all_gather": (1, 2 * 10, 2 * 10),
            "all_to_all": (1, 4 * (6 - (me + 1)), 4 * 2 * (me + 1)),
            "broadcast": (1, 64 if me == 1 else 0, 0 if me == 1 else 32),
        }
        expected |= {0: {"send": (1, 12, 0)}, 1: {}, 2: {"recv": (1, 0, 12)}}[me]
        assert counted == expected
        assert traffic.sent_bytes == sum(sent for _, sent, _ in expected.values())


def lose_a_peer(groups: GroupFactory) -> None:
    if groups.rank == 1:
        raise KeyError("gone")
    groups.world.all_gather(torch.zeros(1000))


def test_a_lost_peer_is_a_comm_error_that_names_the_operation(run_ranks: RankPool) -> None:
    with pytest.raises(RanksFailed) as failure:
        run_ranks(lose_a_peer, 3)
    assert "KeyError: 'gone'" in str(failure.value)
    assert str(failure.value).count("CommError: all_gather over ranks (0, 1, 2): ") == 2


def connect_after_a_failure(place: Place) -> tuple[str, int]:
    """Rank 0 first waits in vain for a peer that never comes; then both meet."""
    message = ""
    if place.rank == 0:
        alone = dist.FileStore(f"{place.folder}/alone", 2)
        try:
            with connect(0, 2, store=alone, timeout=timedelta(seconds=0.3)):
                pass
        except CommError as error:
            message = str(error)
    store = dist.FileStore(f"{place.folder}/both", 2)
    with connect(place.rank, 2, store=store, timeout=timedelta(seconds=60)) as groups:
        return message, int(groups.world.all_reduce_int(torch.tensor(1)))


def test_a_world_can_form_after_an_attempt_that_failed(run_ranks: RankPool) -> None:
    (message, first), (_, second) = run_ranks(connect_after_a_failure, 2, connected=False, timeout_s=20.0)
    assert message.startswith("connect over ranks (0, 1): ") and (first, second) == (2, 2)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda g: g.all_to_all(torch.zeros(3), [2], [2]),
            ShapeError,
            "got a tensor of 3 elements; the sizes say 2",
        ),
        (lambda g: g.all_to_all(torch.zeros(3), [3], [1, 2]), ShapeError, "needs 1, one a member"),
        (lambda g: g.all_gather_uneven(torch.zeros(3), [2]), ShapeError, "got a tensor of 3 elements"),
        (lambda g: g.isend(torch.zeros(3), 0), CommError, "needs another member"),
        (lambda g: g.irecv(torch.zeros(3), 1), CommError, "needs another member"),
    ],
)
def test_wrong_sizes_and_peers_are_refused(
    call: Callable[[Group], object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        call(Group.single())


def test_a_world_of_several_needs_a_rendezvous() -> None:
    with pytest.raises(CommError, match="needs exactly one of them"), connect(0, 2):
        pass


@pytest.mark.parametrize("ranks", [[], [1, 0], [0, 0], [-1, 0], [0, 1]])
def test_a_list_that_cannot_be_a_group_is_refused(ranks: list[int]) -> None:
    with connect(0, 1) as groups, pytest.raises(MeshError, match=r"needs ascending ranks in 0..0"):
        groups.build_groups([ranks])
