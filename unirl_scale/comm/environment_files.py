"""Files that hand a plan to launchers and vendors: host files, rank files, HCCL rank tables, NCCL hints."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any, Literal
from xml.sax.saxutils import quoteattr

import numpy as np

from unirl_scale.comm.plan import Plan
from unirl_scale.comm.topology.model import Box, Topology
from unirl_scale.core.errors import PlanError

_CLASSES = {"cuda": "0x030200", "rocm": "0x038000", "npu": "0x120000", "unknown": "0x030200"}
HostFileForm = Literal["openmpi", "mpich", "slurm"]


def node_runs(plan: Plan) -> list[tuple[int, int, int]]:
    """(node, first rank, ranks) of every visit to a node, in rank order."""
    edges = [0, *(np.flatnonzero(np.diff(plan.node)) + 1).tolist(), plan.world_size]
    return [(int(plan.node[a]), a, b - a) for a, b in pairwise(edges)]


def host_file(plan: Plan, form: HostFileForm = "openmpi") -> str:
    """Hosts in rank order.

    "openmpi" and "mpich" fill a node before they go on, so they can only say plans that do; "slurm" (for
    SLURM_HOSTFILE with --distribution=arbitrary) has a line a rank and can say any.

    Raises:
        PlanError: a plan that comes back to a node, for the forms that cannot.
    """
    if form == "slurm":
        return "".join(f"{plan.nodes[n]}\n" for n in plan.node)
    runs = node_runs(plan)
    if len(runs) > len(plan.nodes):
        raise PlanError(
            f"host file: got a plan that visits {len(plan.nodes)} nodes {len(runs)} times; must fill "
            'one node after the other; hint: use rank_file for Open MPI, or form "slurm"'
        )
    line = {"openmpi": "{} slots={}\n", "mpich": "{}:{}\n"}[form]
    return "".join(line.format(plan.nodes[n], count) for n, _, count in runs)


def rank_file(plan: Plan) -> str:
    """An Open MPI rank file: the host and slot of each rank, in any order."""
    next_slot = [0] * len(plan.nodes)
    lines = []
    for rank, node in enumerate(plan.node.tolist()):
        lines.append(f"rank {rank}={plan.nodes[node]} slot={next_slot[node]}\n")
        next_slot[node] += 1
    return "".join(lines)


Address = Callable[[str, int], str]
"""(node name, device id) -> device IP."""


def addresses_of(topology: Topology) -> Address:
    """Device addresses from a rank table that was part of the topology.

    Raises:
        PlanError: (on use) the topology has none for the device.
    """
    known: dict[tuple[str, int], str] = {}
    if topology.ranks is not None:
        for rank, address in enumerate(topology.ranks.addresses):
            node, position = int(topology.ranks.node[rank]), int(topology.ranks.device[rank])
            box = topology.boxes[topology.box_of[node]]
            known[topology.nodes[node], box.devices[position].index] = address

    def look_up(node: str, device: int) -> str:
        found = known.get((node, device), "")
        if not found or "*" in found:
            raise PlanError(
                f"rank table: got no address of device {device} on {node}; must be known; "
                "hint: give a rank table that lists it, or read /etc/hccn.conf on the node"
            )
        return found

    return look_up


def rank_table(
    plan: Plan,
    address: Address | None,
    *,
    version: Literal["1.0", "1.2"] = "1.0",
    super_device: Callable[[str, int], str] | None = None,
    super_pods: Mapping[str, str] | None = None,
) -> str:
    """An HCCL rank table for the plan.

    Args:
        address: device addresses; None on one server, where HCCL needs none.
        version: 1.2 for super pods.
        super_device: (node, device id) -> id inside the super pod; only for 1.2.
        super_pods: node -> super pod; only for 1.2.

    Raises:
        PlanError: ranks of different servers interleave, which HCCL does not support; or something 1.2
            needs is missing.
    """
    runs = node_runs(plan)
    if len(runs) > len(plan.nodes):
        raise PlanError(
            f"rank table: got ranks that visit {len(plan.nodes)} servers {len(runs)} times; must be "
            "consecutive on each server; hint: plan with transport hccl, which keeps them so"
        )
    if len(plan.nodes) > 1 and address is None:
        raise PlanError("rank table: got several servers and no addresses; must be known; hint: addresses_of")
    if version == "1.2" and (super_device is None or super_pods is None):
        raise PlanError("rank table: got 1.2 without super pods; must be given; hint: version 1.0 needs none")
    servers = []
    for node, first, count in runs:
        name = plan.nodes[node] or "server_0"
        devices: list[dict[str, str]] = []
        for rank in range(first, first + count):
            device = int(plan.device[rank])
            entry = {"device_id": str(device)}
            if version == "1.2" and super_device is not None:
                entry["super_device_id"] = super_device(plan.nodes[node], device)
            if address is not None:
                entry["device_ip"] = address(plan.nodes[node], device)
            devices.append({**entry, "rank_id": str(rank)})
        servers.append({"server_id": name, "device": devices})
    table: dict[str, Any] = {
        "status": "completed",
        "version": version,
        "server_count": str(len(servers)),
        "server_list": servers,
    }
    if version == "1.2" and super_pods is not None:
        pods: dict[str, list[dict[str, str]]] = {}
        for node, _, _ in runs:
            pods.setdefault(super_pods[plan.nodes[node]], []).append({"server_id": plan.nodes[node]})
        table["super_pod_list"] = [{"super_pod_id": p, "server_list": s} for p, s in pods.items()]
    return json.dumps(table, indent=1) + "\n"


def nccl_topology(box: Box) -> str:
    """A static NCCL_TOPO_FILE for machines that hide their PCI tree: NICs beside the devices they serve.

    Raises:
        PlanError: a device or NIC without a bus id, without which NCCL cannot match the file.
    """
    named = [(d.name, d.busid) for d in box.devices] + [(n.name, n.busid) for n in box.nics]
    for name, busid in named:
        if not busid:
            raise PlanError(
                f"NCCL hint: got no bus id of {name}; must be known; hint: start from an NCCL dump"
            )
    lines = ['<system version="1">']
    numas = list(dict.fromkeys(d.numa if d.numa is not None else 0 for d in box.devices))
    for numa in numas:
        lines.append(f'  <cpu numaid="{numa}">')
        placed: set[int] = set()
        devices = [d for d in box.devices if (d.numa if d.numa is not None else 0) == numa]
        switches = dict.fromkeys(d.nics for d in devices)
        for s, nics in enumerate(switches):
            lines.append(
                f'    <pci busid="ffff:ff:{len(numas) * s + numas.index(numa):02x}.0" class="0x060400">'
            )
            lines += [_pci(d.busid, _CLASSES[d.vendor]) for d in devices if d.nics == nics]
            lines += [_pci(box.nics[k].busid, "0x020700") for k in nics if k not in placed]
            placed |= set(nics)
            lines.append("    </pci>")
        lines.append("  </cpu>")
    return "\n".join([*lines, "</system>", ""])


def _pci(busid: str, kind: str) -> str:
    return f'      <pci busid={quoteattr(busid)} class="{kind}"/>'
