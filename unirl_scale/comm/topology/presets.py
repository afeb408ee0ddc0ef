"""Machines from their data sheets: for planning before there is a file, and for tests and benchmarks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import numpy as np

from unirl_scale.comm.topology import boxes, hostlist
from unirl_scale.comm.topology.model import SELF, Box, Device, Level, Link, Nic, Topology, Vendor
from unirl_scale.core.errors import PlanError


def make_box(
    size: int,
    link: Link,
    *,
    fabric: Literal["switch", "mesh"] = "switch",
    nic: Link | None = None,
    nics: int | None = None,
    vendor: Vendor = "cuda",
    down: Sequence[tuple[int, int]] = (),
    off: Sequence[int] = (),
    fallback: str = "SYS",
) -> Box:
    """A box whose pairs all have `link`, except pairs in `down` and every pair of a device in `off`.

    `nics` NICs (default: one a device, none without `nic`) are shared evenly by consecutive devices.
    """
    name = "NPU" if vendor == "npu" else "GPU"
    broken = {frozenset(pair) for pair in down}
    paths = [
        [
            SELF if i == j else fallback if i in off or j in off or frozenset((i, j)) in broken else link.kind
            for j in range(size)
        ]
        for i in range(size)
    ]
    count = (size if nics is None else nics) if nic is not None else 0
    near = [(i * count // size,) if count else () for i in range(size)]
    names = [f"{name}{i}" for i in range(size)]
    kinds = {k for row in paths for k in row} - {SELF}
    return Box(
        devices=tuple(Device(index=i, name=names[i], vendor=vendor, nics=near[i]) for i in range(size)),
        paths=tuple(map(tuple, paths)),
        links={k: link if k == link.kind else Link(kind=k) for k in sorted(kinds)},
        nics=tuple(Nic(name=f"nic{k}", link=nic) for k in range(count) if nic is not None),
        nic_paths=tuple(tuple("PIX" if k in near[i] else "SYS" for k in range(count)) for i in range(size)),
        fabric=fabric,
        degraded=boxes.find_degraded(paths, names),
    )


def cluster(
    box: Box, nodes: int, *, tiers: Sequence[int] = (), prefix: str = "n", links: Sequence[Link | None] = ()
) -> Topology:
    """`nodes` equal boxes; `tiers` are nodes a group at each level, lowest first, e.g. (16, 128)."""
    width = len(str(nodes - 1))
    index = np.arange(nodes, dtype=np.int32)
    levels = tuple(
        Level(
            name="leaf" if t == 0 else f"tier{t + 1}",
            groups=tuple(f"s{t + 1}.{g}" for g in range(-(-nodes // per))),
            member=(index // per).astype(np.int32),
            link=links[t] if t < len(links) else None,
        )
        for t, per in enumerate(tiers)
    )
    return Topology(
        kind="preset",
        nodes=tuple(hostlist.expand(f"{prefix}[{0:0{width}d}-{nodes - 1}]"))
        if nodes > 1
        else (f"{prefix}0",),
        boxes=(box,),
        box_of=np.zeros(nodes, np.int32),
        devices_per_node=np.full(nodes, box.size, np.int32),
        levels=levels,
        network=box.nics[0].link if box.nics else None,
    )


def spread(topology: Topology, ranks: int, *, prefix: str = "node") -> Topology:
    """A box without a name repeated until its healthy devices hold `ranks` ranks; anything else unchanged.

    A node that a file names is that node, and is repeated only where it is too small.

    Raises:
        PlanError: the box has no healthy device.
    """
    if len(topology.boxes) != 1 or len(topology.nodes) != 1:
        return topology
    box = topology.boxes[0]
    if not box.healthy:
        raise PlanError("topology: got a box without a healthy device; must have one; hint: repair it")
    nodes = -(-ranks // len(box.healthy))
    if topology.nodes[0] and nodes == 1:
        return topology
    many = cluster(box, nodes, prefix=prefix)
    return replace(
        many,
        kind=topology.kind,
        network=topology.network or many.network,
        constants=topology.constants,
        notes=topology.notes,
    )


NVLINK4 = Link(
    kind="NV18", alpha_us=3.4, beta_gb_per_s=450.0, source="NVLink 4, 18 x 25 GB/s; 3.4 us a ring step"
)
NVLINK3 = Link(
    kind="NV12", alpha_us=3.4, beta_gb_per_s=300.0, source="NVLink 3, 12 x 25 GB/s; 3.4 us a ring step"
)
NDR400 = Link(
    kind="nic", alpha_us=14.0, beta_gb_per_s=50.0, source="NDR400 or RoCE 400, line rate; 14 us a step"
)
HDR200 = Link(kind="nic", alpha_us=14.0, beta_gb_per_s=25.0, source="HDR200, line rate; 14 us a step")
ROCE200 = Link(kind="nic", alpha_us=20.0, beta_gb_per_s=25.0, source="RoCE 200 (910B), line rate; 20 us")
HCCS = Link(
    kind="HCCS", alpha_us=20.0, beta_gb_per_s=28.0, source="910B mesh, 28 GB/s a link; 20 us with launch"
)
HCCS_SW = Link(
    kind="HCCS_SW", alpha_us=20.0, beta_gb_per_s=196.0, source="910C super pod, 392 GB/s an NPU of 2 dies"
)


def machine(name: str) -> Box:
    """One of the known machines.

    Raises:
        KeyError: not one of `MACHINES`.
    """
    return MACHINES[name]


MACHINES = {
    "h100-8": make_box(8, NVLINK4, nic=NDR400),
    "a100-8": make_box(8, NVLINK3, nic=HDR200),
    "910b-8": make_box(8, HCCS, fabric="mesh", nic=ROCE200, vendor="npu"),
    "910c-16": make_box(16, HCCS_SW, nic=replace(ROCE200), vendor="npu"),
}
