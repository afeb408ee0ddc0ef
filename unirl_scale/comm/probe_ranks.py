"""The transfers of a probe, on the ranks of a connected world."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from unirl_scale.comm.groups import Group
from unirl_scale.comm.probe import PROBE_SIZES, Round, Sample


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
    times = []
    for i in range(repeats + 2):
        synchronize()
        start = time.perf_counter()
        group.exchange([(outgoing, peer)], [(incoming, peer)])
        synchronize()
        if i >= 2:
            times.append(1e6 * (time.perf_counter() - start))
    best = sorted(times)[: max(1, repeats // 2)]
    return sum(best) / len(best)
