"""Check a plan by what it says, not by how it was made."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from unirl_scale.comm.plan import CallPlan, GroupPlan, Plan, RolePlan
from unirl_scale.comm.topology.model import Topology
from unirl_scale.comm.tree import CombinePlan, Node, maximal_nodes, split_contiguous
from unirl_scale.core.errors import PlanError

_SLACK = 1e-6
_SAMPLED = 256


def verify(plan: Plan, topology: Topology | None = None) -> tuple[str, ...]:
    """Hold the plan against the contract.

    Args:
        topology: if given, every device must exist in it and be healthy.

    Returns:
        What was shown, a sentence each.

    Raises:
        PlanError: the first thing that does not hold.
    """
    shown = [_each_rank_once(plan)]
    for role in plan.roles:
        _groups_cover(plan, role)
        for group in role.groups:
            _blocks_lie_together(plan, role, group)
        for call in role.calls:
            _within_links(role, call)
            if call.call.ordered:
                _leaves_once(plan, role, call)
    ordered = sum(c.call.ordered for r in plan.roles for c in r.calls)
    shown += [
        "every axis of every role puts each rank in exactly one group",
        "blocks lie in one node, or in one leaf switch, as the schedules assume",
        f"{ordered} ordered reductions count each leaf exactly once and deliver each element to its owner",
        "no prediction needs more than a link carries, and none beats its bound",
    ]
    if topology is not None:
        shown.append(_devices_exist(plan, topology))
    return tuple(shown)


def _fail(path: str, got: str, rule: str) -> PlanError:
    return PlanError(
        f"plan.{path}: got {got}; must be {rule}; hint: make the plan again from the same inputs"
    )


def _each_rank_once(plan: Plan) -> str:
    places = plan.node.astype(np.int64) << 32 | plan.device.astype(np.int64)
    unique, counts = np.unique(places, return_counts=True)
    if len(unique) != plan.world_size:
        twice = int(np.flatnonzero(places == unique[int(counts.argmax())])[1])
        name = plan.nodes[plan.node[twice]]
        raise _fail(
            "placement", f"{name}/{plan.device[twice]} for two ranks, one is {twice}", "one rank a device"
        )
    if int(plan.node.min()) < 0 or int(plan.node.max()) >= len(plan.nodes):
        raise _fail("placement", "a node that is not listed", "a node of the plan")
    return f"{plan.world_size} ranks on {len(plan.nodes)} nodes, one a device"


def _coordinates(role: RolePlan) -> tuple[npt.NDArray[np.int64], ...]:
    """(tp, dp, pp) coordinate of each rank of the role, from the rank's number alone."""
    mesh = role.mesh
    rank = np.arange(mesh.tp * mesh.dp * mesh.pp)
    return rank % mesh.tp, rank // mesh.tp % mesh.dp, rank // (mesh.tp * mesh.dp)


def _members(role: RolePlan, axis: str) -> npt.NDArray[np.int64]:
    """Ranks of each group of the axis, [count, size], ordered by the axis' own coordinate."""
    t, d, p = _coordinates(role)
    own = {"tp": t, "dp": d, "pp": p}[axis]
    others = [c for name, c in (("tp", t), ("dp", d), ("pp", p)) if name != axis]
    order: npt.NDArray[np.int64] = np.lexsort([own, *others])
    size = {"tp": role.mesh.tp, "dp": role.mesh.dp, "pp": role.mesh.pp}[axis]
    members: npt.NDArray[np.int64] = order.reshape(-1, size) + role.mesh.first_rank
    return members


def _groups_cover(plan: Plan, role: RolePlan) -> None:
    mesh = role.mesh
    size = mesh.tp * mesh.dp * mesh.pp
    if mesh.first_rank + size > plan.world_size:
        raise _fail(f"{role.name}.mesh", f"ranks up to {mesh.first_rank + size}", f"inside {plan.world_size}")
    for group in role.groups:
        members = _members(role, group.axis)
        if (group.count, group.size) != members.shape or int(np.prod(group.shape)) != group.size:
            got = f"{group.count} groups of {group.size}, shape {group.shape}"
            raise _fail(f"{role.name}.{group.axis}", got, f"{members.shape[0]} of {members.shape[1]}")
        if len(np.unique(members)) != size:
            raise _fail(f"{role.name}.{group.axis}", "a rank in two groups", "each rank in one")


def _blocks_lie_together(plan: Plan, role: RolePlan, group: GroupPlan) -> None:
    if group.axis == "pp" or group.size == 1:
        return
    members = _members(role, group.axis)
    node = plan.node[members]
    leaf = plan.leaf[node]
    edges = np.cumprod(group.shape)
    for depth, row in enumerate((node, leaf)):
        block = int(edges[depth]) if depth < len(edges) else 1
        if depth == 1 and (len(group.shape) < 3 or (plan.leaf < 0).any()):
            break
        blocks = row.reshape(row.shape[0], -1, block)
        if (blocks != blocks[:, :, :1]).any():
            place = ("node", "leaf switch")[depth]
            raise _fail(
                f"{role.name}.{group.axis}.shape",
                f"a block of {block} over several places",
                f"in one {place}",
            )
    if group.axis == "tp" and len(group.shape) > 2 and group.most_leaves > 1:
        per_leaf = np.bincount(plan.leaf[plan.node][plan.leaf[plan.node] >= 0])
        if group.size <= int(per_leaf.max(initial=0)):
            raise _fail(
                f"{role.name}.tp", f"TP {group.size} over {group.most_leaves} leaf switches", "in one"
            )


def _within_links(role: RolePlan, call: CallPlan) -> None:
    if call.time_us is None:
        return
    path = f"{role.name}.{call.call.name}"
    if call.bound_us is not None and call.time_us < call.bound_us * (1 - _SLACK):
        raise _fail(
            path, f"{call.time_us:.1f} us, below the bound of {call.bound_us:.1f}", "no faster than the bound"
        )
    group = role.group(call.call.axis)
    for tier, sent in zip(group.tiers, call.sent_bytes):
        if tier.size > 1 and tier.beta_gb_per_s is not None:
            needed = sent / (tier.beta_gb_per_s * 1e3)
            if needed > call.time_us * (1 + _SLACK):
                got = f"{sent:.0f} bytes in {call.time_us:.1f} us over {tier.name}"
                raise _fail(path, got, f"at most {tier.beta_gb_per_s:g} GB/s")


def _leaves_once(plan: Plan, role: RolePlan, call: CallPlan) -> None:
    """Run the reduction on sets of leaves instead of numbers."""
    axis = call.call.axis
    members = role.group(axis).size
    total = plan.model_leaves if axis == "tp" else plan.data_slots
    path = f"{role.name}.{call.call.name}"
    if members > total:
        raise _fail(path, f"{members} members for {total} leaves", "at most one member a leaf")
    edges = _edges(path, call.blocks, members)
    ranges = split_contiguous(total, members)
    held: list[tuple[Node, ...]] = [maximal_nodes(r.start, r.stop, total) for r in ranges]
    for inner, outer in pairwise(edges):
        parts = outer // inner
        held = [
            _join([n for part in held[k : k + parts] for n in part], ranges, k * inner, outer, total)
            for k in range(0, len(held), parts)
        ]
    if [list(h) for h in held] != [[(0, total)]]:
        raise _fail(path, f"{held} at the end", "the root of the tree")
    _elements_arrive(path, edges, members)


def _edges(path: str, blocks: Sequence[int], members: int) -> list[int]:
    edges = [1, *blocks, members]
    for low, high in pairwise(edges):
        if low < 1 or high % low:
            raise _fail(path, f"blocks {list(blocks)} in a group of {members}", "each a divisor of the next")
    return [1] + [b for a, b in pairwise(edges) if b > a]


def _join(
    nodes: Sequence[Node], ranges: Sequence[range], first: int, outer: int, total: int
) -> tuple[Node, ...]:
    """The nodes of a block after its level; CombinePlan refuses a leaf that is missing or counted twice."""
    low, high = ranges[first].start, ranges[first + outer - 1].stop
    targets = maximal_nodes(low, high, total)
    CombinePlan.of(nodes, total, targets)
    return targets


def _elements_arrive(path: str, edges: Sequence[int], members: int) -> None:
    """Follow an element that member q shall own from every member i (a sample when there are many)."""
    step = max(1, members // _SAMPLED)
    i, q = np.meshgrid(np.arange(0, members, step), np.arange(0, members, step), indexing="ij")
    at = i
    for outer in edges[1:]:
        at = at // outer * outer + q % outer
    if (at != q).any():
        raise _fail(path, "an element that ends at another member", "every element at its owner")


def _devices_exist(plan: Plan, topology: Topology) -> str:
    index = {name: n for n, name in enumerate(topology.nodes)}
    lost = [name for name in plan.nodes if name not in index]
    if lost:
        raise _fail("placement", f"node {lost[0]}", "a node of the topology")
    node = np.array([index[name] for name in plan.nodes])[plan.node]
    box = topology.box_of[node]
    for b in np.unique(box):
        used = np.unique(plan.device[box == b])
        if b < 0:
            continue
        known = {d.index: i for i, d in enumerate(topology.boxes[b].devices)}
        for d in used.tolist():
            if d not in known:
                raise _fail("placement", f"device {d}", f"one of {sorted(known)}")
    counts = np.bincount(node, minlength=len(topology.nodes))
    stated = topology.devices_per_node
    over = np.flatnonzero((stated >= 0) & (counts > stated))
    if len(over):
        name = topology.nodes[over[0]]
        raise _fail("placement", f"{counts[over[0]]} ranks on {name}", f"at most {stated[over[0]]}")
    return f"every device exists; {len(plan.excluded)} degraded ones are left out"
