"""How each call runs: its algorithm, its blocks and chunks, what it sends and how long that takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from unirl_scale.comm.cost import VENDOR_ALGORITHMS, Tier, total_size
from unirl_scale.comm.cost_bounds import bound_us
from unirl_scale.comm.cost_ordered import Fixed, choose
from unirl_scale.comm.cost_ordered import Memory as LocalMemory
from unirl_scale.comm.plan import Assumptions, CallPlan, GroupPlan, SizeClass
from unirl_scale.comm.plan_traffic import Axis, Call

_CLASS_SIZES = tuple(4**k for k in range(5, 16))
_CHUNK_BYTES = 64 * 2**20


def plan_calls(
    calls: Sequence[Call], groups: Mapping[Axis, GroupPlan], told: Assumptions
) -> tuple[CallPlan, ...]:
    """Choose how each call runs, as the trainer will: an axis has one set of blocks, those of its first
    ordered call, and the size classes say which all-reduces gather."""
    blocks: dict[Axis, tuple[int, ...]] = {}
    found = []
    for call in calls:
        group, fixed = groups[call.axis], None
        if call.ordered:
            gather = call.collective == "all_reduce" and call.size_bytes <= group.gather_below_bytes
            fixed = Fixed(blocks=blocks.get(call.axis), gather=gather if group.classes else None)
        plan = plan_call(call, group, told, fixed)
        if call.ordered and plan.algorithm != "gather_tree":
            blocks.setdefault(call.axis, plan.blocks)
        found.append(plan)
    return tuple(found)


def plan_call(call: Call, group: GroupPlan, told: Assumptions, fixed: Fixed | None = None) -> CallPlan:
    """Choose how a call runs on its group, as far as that is not `fixed`."""
    memory = LocalMemory(gb_per_s=told.accelerator.memory_gb_per_s)
    tiers = group.tiers
    if call.collective == "p2p":  # one neighbour, over the tier between the two
        tiers = tuple(replace(t, size=2 if t.size > 1 else 1) for t in tiers)
    choice = choose(
        call.collective,
        call.size_bytes,
        tiers,
        ordered=call.ordered,
        allowed=VENDOR_ALGORITHMS[told.transport],
        memory=memory,
        gathered_size=call.result_bytes,
        fixed=fixed or Fixed(),
    )
    return CallPlan(
        call=call,
        algorithm=choice.cost.algorithm,
        blocks=choice.blocks,
        chunk_bytes=_chunk_bytes(tiers) if call.ordered else 0,
        sent_bytes=choice.cost.sent_bytes,
        time_us=choice.cost.time_us,
        bound_us=_bound_us(call, tiers),
    )


def _bound_us(call: Call, tiers: Sequence[Tier]) -> float | None:
    """The bound of the call; an all-reduce that returns another dtype is a reduce-scatter and a gather."""
    if call.result_bytes is None:
        return bound_us(call.collective, call.size_bytes, tiers)
    down = bound_us("reduce_scatter", call.size_bytes, tiers)
    up = bound_us("all_gather", call.result_bytes, tiers)
    return None if down is None or up is None else down + up


def _chunk_bytes(tiers: Sequence[Tier]) -> int:
    """The smallest power of two whose transfer takes twenty times its latency on every tier, so that cutting
    a buffer into chunks costs at most 5 %; between 1 and 64 MiB."""
    needed = 2.0**20
    for tier in tiers:
        if tier.size > 1 and tier.alpha_us is not None and tier.beta_gb_per_s is not None:
            needed = max(needed, 20 * tier.alpha_us * (tier.size - 1) * tier.beta_gb_per_s * 1e3)
        elif tier.size > 1:
            return _CHUNK_BYTES
    return int(min(_CHUNK_BYTES, 2 ** int(np.ceil(np.log2(needed)))))


def size_classes(group: GroupPlan, told: Assumptions, itemsize: int = 4) -> tuple[SizeClass, ...]:
    """How an ordered all-reduce of fp32 nodes that returns elements of `itemsize` bytes should run on the
    group, from 1 KiB to 1 GiB, equal neighbours joined."""
    if total_size(group.tiers) == 1:
        return ()
    found: list[SizeClass] = []
    for size in _CLASS_SIZES:
        call = Call(
            name="",
            axis=group.axis,
            collective="all_reduce",
            size_bytes=float(size),
            count=1,
            ordered=True,
            result_bytes=size * itemsize / 4,
        )
        plan = plan_call(call, group, told)
        if found and (found[-1].algorithm, found[-1].blocks) == (plan.algorithm, plan.blocks):
            found.pop()
        found.append(SizeClass(up_to_bytes=size, algorithm=plan.algorithm, blocks=plan.blocks))
    found[-1] = replace(found[-1], up_to_bytes=None)
    return tuple(found)
