"""The machine as the planner sees it: usable devices in an order that keeps near ones together, and what
each tier of links costs one device."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from unirl_scale.comm.cost import Measured, Tier
from unirl_scale.comm.probe import PROBED
from unirl_scale.comm.topology import boxes
from unirl_scale.comm.topology.model import MAX_NODES, UNKNOWN, Box, IntArray, Level, Link, Topology
from unirl_scale.core.errors import PlanError

OnDegraded = Literal["exclude", "refuse", "keep"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Machine:
    """Usable devices ("slots") of a topology, near ones next to each other.

    Attributes:
        node, device: int32 [slots]: node, and position in that node's box.
        places: int32 [1 + levels, slots]: node, leaf, tier2, ... of each slot, finest first. Ids differ
            between slots exactly where the groups differ.
        names: of the rows of `places`.
        inner: cost of the links inside a node, for `inner_size` devices.
        outer: cost of one device's way out at each row of `places`.
        excluded: degraded devices that get no rank, with the reason.
    """

    topology: Topology
    node: IntArray
    device: IntArray
    places: IntArray
    names: tuple[str, ...]
    inner: Tier
    inner_size: int
    outer: tuple[Tier, ...]
    excluded: tuple[str, ...]

    @property
    def slots(self) -> int:
        """Usable devices."""
        return len(self.node)

    def tiers(self, shape: Sequence[int]) -> tuple[Tier, ...]:
        """Tiers of a group with shape[0] members a node, shape[1] nodes a leaf, and so on."""
        inner = replace(self.inner, size=shape[0])
        if self.inner.mesh and self.inner.beta_gb_per_s is not None and self.inner_size > 1:
            wires = max(shape[0] - 1, 1) / (self.inner_size - 1)
            inner = replace(inner, beta_gb_per_s=self.inner.beta_gb_per_s * wires)
        return (inner, *(replace(t, size=n) for t, n in zip(self.outer, shape[1:], strict=True)))


def survey(
    topology: Topology, *, on_degraded: OnDegraded = "exclude", devices_per_node: int | None = None
) -> Machine:
    """Find the usable devices and the cost of every tier.

    Args:
        on_degraded: leave degraded devices out (as few as make the rest equal), refuse them, or use them.
        devices_per_node: for files that do not say.

    Raises:
        PlanError: the number of devices a node is unknown, or a degraded device is refused.
    """
    if not topology.nodes:
        raise PlanError("topology: got no node; must name some; hint: add a host file or a rank table")
    usable = [_usable(box, on_degraded) for box in topology.boxes]
    counts = _counts(topology, usable, devices_per_node)
    total = int(counts.sum(dtype=np.int64))
    if total > MAX_NODES:
        raise PlanError(
            f"topology: got {total} devices; must be at most {MAX_NODES}; "
            "hint: a smaller --devices-per-node, or a host file with the job's nodes"
        )
    order = _node_order(topology)
    node = np.repeat(order, counts[order]).astype(np.int32)
    device = np.concatenate(
        [_devices(usable, int(topology.box_of[n]), int(counts[n])) for n in order] or [np.zeros(0, np.int32)]
    )
    levels = _nested(topology.levels)
    rows = [node, *(_ids(level)[node] for level in levels)]
    inner, size = _inner(topology, usable, int(counts.max()))
    inner = _with_measured(inner, topology, "node")
    return Machine(
        topology=topology,
        node=node,
        device=device.astype(np.int32),
        places=np.stack(rows).astype(np.int32),
        names=("node", *(level.name for level in levels), "network"),
        inner=inner,
        inner_size=size,
        outer=tuple(
            _with_measured(t, topology, "nic") if t.port == "nic" else t
            for t in _outer(topology, usable, levels)
        ),
        excluded=_excluded(topology, usable),
    )


def _usable(box: Box, policy: OnDegraded) -> tuple[int, ...]:
    """Positions that get ranks, ordered so that well-linked devices are neighbours."""
    if box.degraded and policy == "refuse":
        index, reason = next(iter(box.degraded.items()))
        raise PlanError(
            f"topology: got {box.devices[index].name} degraded: {reason}; must be healthy "
            "(on_degraded: refuse); hint: repair it, or use on_degraded: exclude"
        )
    keep = list(range(box.size))
    if policy == "exclude":
        while weak := _weak(box, keep):
            keep.remove(max(weak, key=lambda i: (_missing(box, keep, i), i)))
    return tuple(_cluster(box, keep))


def _weak(box: Box, keep: Sequence[int]) -> list[int]:
    paths = [[box.paths[i][j] for j in keep] for i in keep]
    names = [box.devices[i].name for i in keep]
    found = boxes.find_degraded(paths, names, exempt=lambda kind: kind == UNKNOWN)
    return [keep[i] for i in found] if len(keep) > 1 else []


def _missing(box: Box, keep: Sequence[int], i: int) -> int:
    return sum(1 for j in keep if j != i and not boxes.is_fast(box.paths[i][j]))


def _cluster(box: Box, keep: Sequence[int]) -> list[int]:
    """Join the two best-linked groups of one size until one is left; index order if all links are equal."""
    kinds = {box.paths[i][j] for i in keep for j in keep if i != j}
    if len(kinds) <= 1:
        return list(keep)
    groups = [[i] for i in keep]
    while len(groups) > 1:
        size = min(len(g) for g in groups)
        small = [k for k, g in enumerate(groups) if len(g) == size]
        if len(small) < 2:
            small = list(range(len(groups)))
        best = max(
            ((a, b) for x, a in enumerate(small) for b in small[x + 1 :]),
            key=lambda pair: (_bond(box, groups[pair[0]], groups[pair[1]]), -pair[0], -pair[1]),
        )
        joined = groups[best[0]] + groups[best[1]]
        groups = [g for k, g in enumerate(groups) if k not in best] + [joined]
    return groups[0]


def _bond(box: Box, a: Sequence[int], b: Sequence[int]) -> float:
    near = {kind: (len(boxes.PROXIMITY) - r) / 100 for r, kind in enumerate(boxes.PROXIMITY)}
    total = 0.0
    for i in a:
        for j in b:
            kind = box.paths[i][j]
            beta = box.links[kind].beta_gb_per_s if kind in box.links else None
            extra = 0.5 if kind == "SIO" else (beta or 0.0) / 1e6
            total += boxes.weight(kind) + near.get(kind, 0.0) + extra
    return total / (len(a) * len(b))


def _counts(topology: Topology, usable: Sequence[tuple[int, ...]], given: int | None) -> IntArray:
    counts = topology.devices_per_node.copy()
    for n, b in enumerate(topology.box_of):
        if b >= 0:
            known = int(counts[n])
            healthy = len(usable[b])
            counts[n] = min(known, healthy) if known >= 0 else healthy
    if given is not None:
        counts[counts < 0] = given
    if (counts < 0).any():
        name = topology.nodes[int(np.argmax(counts < 0))]
        raise PlanError(
            f"topology: got node {name} with an unknown number of devices; must be known; "
            "hint: add `nvidia-smi topo -m` of one node, slots in a host file, or devices_per_node"
        )
    return counts.astype(np.int32)


def _devices(usable: Sequence[tuple[int, ...]], box: int, count: int) -> IntArray:
    return np.array(usable[box][:count] if box >= 0 else range(count), np.int32)


def _ids(level: Level) -> IntArray:
    """Group ids in which every node outside all groups stands alone."""
    ids = level.member.astype(np.int64)
    alone = ids < 0
    ids[alone] = len(level.groups) + np.arange(int(alone.sum()))
    return ids.astype(np.int32)


def _nested(levels: Sequence[Level]) -> list[Level]:
    """Levels that contain each other, finest first; one that cuts across a finer one is left out."""
    kept: list[Level] = []
    for level in levels:
        ids = _ids(level)
        if kept:
            below = _ids(kept[-1])
            pairs = np.unique(np.stack([below, ids]), axis=1)
            if len(np.unique(below)) != pairs.shape[1]:
                continue
        joins = len(level.groups) > 1 or level.inside is not None
        if joins and (not kept or len(np.unique(ids)) < len(np.unique(_ids(kept[-1])))):
            kept.append(level)
    return kept


def _node_order(topology: Topology) -> IntArray:
    """Nodes sorted by their groups from the top down; file order inside."""
    index = np.arange(len(topology.nodes), dtype=np.int32)
    keys = np.stack([index, *(_ids(lv) for lv in _nested(topology.levels))])
    order: IntArray = np.lexsort(keys).astype(np.int32)
    return order


def _inner(topology: Topology, usable: Sequence[tuple[int, ...]], largest: int) -> tuple[Tier, int]:
    """The weakest box decides."""
    found = [_inner_of(box, keep) for box, keep in zip(topology.boxes, usable)]
    if not found or (topology.box_of < 0).any():
        return Tier(name="node", size=max(largest, 1)), max(largest, 1)
    known = [f for f in found if f[0].beta_gb_per_s is not None]
    if len(known) < len(found):
        return next(f for f in found if f[0].beta_gb_per_s is None)
    return min(known, key=lambda f: f[0].beta_gb_per_s or 0.0)


def _with_measured(tier: Tier, topology: Topology, kind: str) -> Tier:
    """The tier with the collectives that a probe measured on its links. A link carries at least what the
    collectives reached over it."""
    found = tuple(
        Measured(collective=c, alpha_us=link.alpha_us, beta_gb_per_s=link.beta_gb_per_s)
        for c in PROBED
        if (link := topology.constants.get(f"{kind}.{c}"))
        and link.alpha_us is not None
        and link.beta_gb_per_s is not None
    )
    if not found or tier.beta_gb_per_s is None:
        return tier
    most = max(tier.beta_gb_per_s, *(m.beta_gb_per_s for m in found))
    return replace(tier, measured=found, beta_gb_per_s=most)


def _inner_of(box: Box, keep: Sequence[int]) -> tuple[Tier, int]:
    size = len(keep)
    rows = [[box.paths[i][j] for j in keep if j != i] for i in keep]
    kinds = Counter(k for row in rows for k in row)
    if size < 2 or UNKNOWN in kinds:
        return Tier(name="node", size=max(size, 1)), max(size, 1)
    links = {k: box.links.get(k, Link(kind=k)) for k in kinds}
    rates = [_device_rate(box.fabric, row, links) for row in rows]
    used = [k for k in kinds if boxes.is_fast(k)] if box.fabric != "unknown" else []
    alphas = [links[k].alpha_us for k in used or kinds]
    stated = [a for a in alphas if a is not None]
    return Tier(
        name="node",
        size=size,
        alpha_us=max(stated) if stated and (used or len(stated) == len(alphas)) else None,
        beta_gb_per_s=None if None in rates else min(r for r in rates if r is not None),
        mesh=box.fabric == "mesh" and all(boxes.is_fast(k) for k in kinds),
    ), size


def _device_rate(fabric: str, row: Sequence[str], links: Mapping[str, Link]) -> float | None:
    """What one device can send to its box: through its most common link to a switch, over all its wires in a
    mesh, else (no fast link, or nothing known of the fabric) what its slowest path carries."""
    fast = [k for k in row if boxes.is_fast(k)]
    if fabric == "unknown" or not fast:
        betas = [links[k].beta_gb_per_s for k in row]
        return None if None in betas else min(b for b in betas if b is not None)
    if fabric == "switch":
        count = Counter(fast)
        return links[max(count, key=lambda k: (count[k], k))].beta_gb_per_s
    wires = [links[k].beta_gb_per_s for k in fast]
    return None if None in wires else math.fsum(b for b in wires if b is not None)


def network_share(box: Box, keep: Sequence[int]) -> Link | None:
    """The slowest device's part of its nearest NICs; None when a rate or the wiring is unknown."""
    users = Counter(k for i in keep for k in box.devices[i].nics)
    shares = []
    for i in keep:
        rates = [box.nics[k].link.beta_gb_per_s for k in box.devices[i].nics]
        if not rates or None in rates:
            return None
        shares.append(sum((r or 0.0) / users[k] for r, k in zip(rates, box.devices[i].nics)))
    alphas = [n.link.alpha_us for n in box.nics if n.link.alpha_us is not None]
    text = box.nics[0].link.source if box.nics else ""
    return Link(kind="nic", alpha_us=max(alphas, default=None), beta_gb_per_s=min(shares), source=text)


def _outer(
    topology: Topology, usable: Sequence[tuple[int, ...]], levels: Sequence[Level]
) -> tuple[Tier, ...]:
    """One tier a row of `places`: between nodes of a leaf, between leaves, ..."""
    shares = [network_share(box, keep) for box, keep in zip(topology.boxes, usable) if box.nics]
    given = topology.network
    known = [s for s in shares if s is not None and s.beta_gb_per_s is not None]
    nic = min(known, key=lambda s: s.beta_gb_per_s or 0.0) if known and len(known) == len(shares) else given
    tiers = []
    for depth in range(len(levels) + 1):
        # Row k of `places` is joined through the level above it; without a figure of its own a level is
        # taken as non-blocking, as wide as the NIC.
        inside = levels[depth].inside if depth < len(levels) else None
        if inside is not None:
            name = f"{levels[depth].name}.inside"
            tiers.append(
                Tier(name=name, size=1, alpha_us=inside.alpha_us, beta_gb_per_s=inside.beta_gb_per_s)
            )
            continue
        link = levels[depth - 1].link if depth else None
        alpha = link.alpha_us if link and link.alpha_us is not None else nic.alpha_us if nic else None
        betas = [k.beta_gb_per_s for k in (nic, link) if k is not None and k.beta_gb_per_s is not None]
        name = "network" if depth == len(levels) else levels[depth].name
        tiers.append(
            Tier(name=name, size=1, alpha_us=alpha, beta_gb_per_s=min(betas, default=None), port="nic")
        )
    return tuple(tiers)


def _excluded(topology: Topology, usable: Sequence[tuple[int, ...]]) -> tuple[str, ...]:
    out = []
    for n, name in enumerate(topology.nodes):
        b = int(topology.box_of[n])
        if b < 0 or len(usable[b]) == topology.boxes[b].size:
            continue
        box = topology.boxes[b]
        for i in sorted(set(range(box.size)) - set(usable[b])):
            reason = box.degraded.get(i, "left out to keep the rest equal")
            out.append(f"{name + '/' if name else ''}{box.devices[i].name}: {reason}")
    return tuple(out)
