"""The transfers of a probe, on the ranks of a connected world."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median

import torch

from unirl_scale.comm.cost import Collective
from unirl_scale.comm.groups import Group, GroupFactory
from unirl_scale.comm.probe import PROBE_SIZES, PROBED, GroupSample, Round, Sample


def probe(
    group: Group,
    rounds: Sequence[Round],
    *,
    sizes: Sequence[int] = PROBE_SIZES,
    repeats: int = 20,
    synchronize: Callable[[], None] = lambda: None,
) -> list[Sample]:
    """Exchange in every round and gather all times; collective over the group.

    Args:
        rounds: from `probe_rounds`, for ranks counted as in the group.
        sizes: bytes each side sends.
        repeats: exchanges a size; the fastest half is averaged.
        synchronize: waits for the device, e.g. torch.cuda.synchronize.

    Returns:
        A sample a pair, the same list on every rank.

    Raises:
        CommError: a transfer failed.
    """
    own = []
    for turn in rounds:
        peer = turn.peer(group.index)
        times: dict[int, float] = {}
        for size in sizes:
            group.barrier()
            if peer is not None:
                times[size] = _exchange_us(group, peer, size, repeats, synchronize)
        if peer is not None and group.index < peer:
            own.append(Sample(kind=turn.kind, pair=(group.index, peer), time_us=times))
    return [sample for part in group.all_gather_object(own) for sample in part]


def _exchange_us(group: Group, peer: int, size: int, repeats: int, synchronize: Callable[[], None]) -> float:
    """Mean of the fastest half of `repeats` exchanges, after two that do not count."""
    outgoing = torch.zeros(size, dtype=torch.uint8, device=group.device)
    incoming = torch.empty_like(outgoing)

    def exchange() -> None:
        group.exchange([(outgoing, peer)], [(incoming, peer)])

    times = sorted(_times_us(exchange, repeats, synchronize))
    best = times[: max(1, repeats // 2)]
    return sum(best) / len(best)


def _times_us(call: Callable[[], None], repeats: int, synchronize: Callable[[], None]) -> list[float]:
    """Of each of `repeats` calls, after two that do not count."""
    times = []
    for i in range(repeats + 2):
        synchronize()
        start = time.perf_counter()
        call()
        synchronize()
        if i >= 2:
            times.append(1e6 * (time.perf_counter() - start))
    return times


def probe_collectives(
    factory: GroupFactory,
    kinds: Mapping[str, Sequence[tuple[int, ...]]],
    *,
    sizes: Sequence[int] = PROBE_SIZES,
    repeats: int = 20,
    synchronize: Callable[[], None] = lambda: None,
) -> list[GroupSample]:
    """Run each collective on all groups of a kind at once; collective over the world.

    Args:
        kinds: from `probe_groups`, for ranks counted as in the world.
        sizes: bytes S: what all members hold together after an all-gather, and each before an all-to-all.
        repeats: calls a size; the median of the slowest rank counts.

    Returns:
        A sample a kind and collective, the same list on every rank.

    Raises:
        CommError: a transfer failed.
    """
    found = []
    for kind, lists in kinds.items():
        mine = factory.build_groups(lists)
        group = next((mine[ranks] for ranks in lists if ranks in mine), None)
        for collective in PROBED:
            times: dict[int, float] = {}
            for size in sizes:
                factory.world.barrier()
                own = _collective_us(group, collective, size, repeats, synchronize) if group else 0.0
                times[size] = max(factory.world.all_gather_object(own))
            found.append(GroupSample(kind=kind, collective=collective, ranks=len(lists[0]), time_us=times))
    return found


def _collective_us(
    group: Group, collective: Collective, size: int, repeats: int, synchronize: Callable[[], None]
) -> float:
    """Median of `repeats` calls."""
    piece = max(1, size // group.size)
    counts = [piece] * group.size
    data = torch.zeros(sum(counts), dtype=torch.uint8, device=group.device)

    def call() -> None:
        if collective == "all_gather":
            group.all_gather(data[:piece])
        else:
            group.all_to_all(data, counts, counts)

    return median(_times_us(call, repeats, synchronize))
