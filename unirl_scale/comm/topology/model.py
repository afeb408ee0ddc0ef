"""What every reader returns: machines (boxes), the nodes they sit in, and the switches above the nodes.

A `Topology` may be partial: `nvidia-smi` knows one box and no network, a SLURM file knows the network and
no box. `merge.py` joins parts. A quantity that no file states is None, never 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int32]
Vendor = Literal["cuda", "npu", "rocm", "unknown"]

SELF = "X"
UNKNOWN = "?"

MAX_DEVICES = 1024
"""Of one node. A larger number in a file is a slip, and would only fill the memory."""
MAX_NODES = 4_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """One class of connection, in one direction.

    Attributes:
        kind: name of the class: "NV18", "HCCS", "PIX", "nic", ...
        alpha_us: start-up time of one step in microseconds; None = unknown.
        beta_gb_per_s: bandwidth in 1e9 bytes a second, one direction; None = unknown.
        source: where the two figures come from.
    """

    kind: str
    alpha_us: float | None = None
    beta_gb_per_s: float | None = None
    source: str = "not stated by the file"


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """Something the reader inferred, filled in or found wrong, for the operator to read."""

    what: str
    source: str = ""
    line: int = 0
    severity: Literal["info", "filled", "degraded"] = "info"

    def __str__(self) -> str:
        where = f"{self.source}:{self.line}: " if self.line else f"{self.source}: " if self.source else ""
        return f"{where}{self.what}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Nic:
    """A network port, or several merged into one."""

    name: str
    numa: int | None = None
    ports: int = 1
    link: Link = field(default_factory=lambda: Link(kind="nic"))
    busid: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """An accelerator. `nics` holds the indices of the NICs nearest to it, best first."""

    index: int
    name: str
    vendor: Vendor = "unknown"
    numa: int | None = None
    cpus: str = ""
    busid: str = ""
    nics: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """The inside of one node.

    Attributes:
        paths: [g][g] kind of the best path between two devices: SELF on the diagonal, UNKNOWN where no
            file says.
        nic_paths: [g][k] kind of the path from a device to a NIC.
        links: what each kind in `paths` costs.
        fabric: "switch" when a device's links go to a switch, so that one device's bandwidth is shared by
            all its peers; "mesh" when each pair has wires of its own.
        degraded: index -> reason, for devices with fewer links than their peers.
    """

    devices: tuple[Device, ...]
    paths: tuple[tuple[str, ...], ...]
    links: Mapping[str, Link]
    nics: tuple[Nic, ...] = ()
    nic_paths: tuple[tuple[str, ...], ...] = ()
    fabric: Literal["switch", "mesh", "unknown"] = "unknown"
    degraded: Mapping[int, str] = field(default_factory=lambda: MappingProxyType({}))

    @property
    def size(self) -> int:
        """Devices in the box, healthy or not."""
        return len(self.devices)

    @property
    def healthy(self) -> tuple[int, ...]:
        """Indices (positions) of the devices that are not degraded."""
        return tuple(i for i in range(self.size) if i not in self.degraded)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Level:
    """One tier above the nodes: leaf switches, spines, blocks or super pods.

    `member` is int32 [nodes]: the group of each node, -1 where the file places the node nowhere.
    `link` is one device's way out of a group, when a file states it. `inside` is its way to other nodes of
    its group where those have wires of their own beside the network: an NVLink rack, a super pod.
    """

    name: str
    groups: tuple[str, ...]
    member: IntArray
    link: Link | None = None
    inside: Link | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RankMap:
    """Which device a rank table gives each rank: int32 [ranks] node and device position.

    `addresses` (device IP or EID) and `super_devices` are one string a rank, or empty.
    """

    node: IntArray
    device: IntArray
    addresses: tuple[str, ...] = ()
    super_devices: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Topology:
    """The machine as far as the files tell.

    Attributes:
        kind: the format(s) it was read from.
        nodes: node names, in the order of the switch tree. One unnamed node ("") for a box-only file.
        box_of: int32 [nodes] index into `boxes`, -1 = the inside is unknown.
        levels: lowest first.
        network: the link of one device to other nodes, when stated.
        devices_per_node: int32 [nodes]; -1 = unknown.
        ranks: the placement a rank table prescribes.
        constants: link kind -> figures given by the operator or measured; they win over defaults.
    """

    kind: str
    nodes: tuple[str, ...] = ()
    boxes: tuple[Box, ...] = ()
    box_of: IntArray = field(default_factory=lambda: np.zeros(0, np.int32))
    devices_per_node: IntArray = field(default_factory=lambda: np.zeros(0, np.int32))
    levels: tuple[Level, ...] = ()
    network: Link | None = None
    ranks: RankMap | None = None
    constants: Mapping[str, Link] = field(default_factory=lambda: MappingProxyType({}))
    notes: tuple[Note, ...] = ()

    @property
    def num_devices(self) -> int | None:
        """Devices over all nodes, healthy or not; None while a node's inside is unknown."""
        if not len(self.devices_per_node) or int(self.devices_per_node.min()) < 0:
            return None
        return int(self.devices_per_node.sum(dtype=np.int64))

    def degraded(self) -> tuple[str, ...]:
        """`node/device: reason` for every degraded device."""
        found = []
        for node, name in enumerate(self.nodes):
            box = self.boxes[self.box_of[node]] if self.box_of[node] >= 0 else None
            for index, reason in (box.degraded if box else {}).items():
                device = box.devices[index].name if box else ""
                found.append(f"{name + '/' if name else ''}{device}: {reason}")
        return tuple(found)


def box_topology(kind: str, box: Box, notes: tuple[Note, ...] = (), *, node: str = "") -> Topology:
    """A topology of one node around one box."""
    one = np.zeros(1, np.int32)
    return Topology(
        kind=kind,
        nodes=(node,),
        boxes=(box,),
        box_of=one,
        devices_per_node=one + np.int32(box.size),
        notes=notes,
    )


def node_topology(
    kind: str, nodes: tuple[str, ...], levels: tuple[Level, ...], notes: tuple[Note, ...] = ()
) -> Topology:
    """A topology of nodes whose insides are unknown."""
    unknown = np.full(len(nodes), -1, np.int32)
    return Topology(
        kind=kind, nodes=nodes, box_of=unknown, devices_per_node=unknown, levels=levels, notes=notes
    )
