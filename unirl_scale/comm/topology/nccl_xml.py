"""Topology XML of NCCL, RCCL and FlagCX: what NCCL_TOPO_FILE reads and NCCL_TOPO_DUMP_FILE writes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from unirl_scale.comm.topology import boxes
from unirl_scale.comm.topology.documents import Element, read_xml
from unirl_scale.comm.topology.model import Box, Device, Note, RankMap, Topology, Vendor
from unirl_scale.comm.topology.nccl_paths import (
    Site,
    device_paths,
    nearest,
    nic_of,
    note_slow_ports,
    path_links,
    pci_kind,
)
from unirl_scale.comm.topology.source import Source

_GPU_CLASSES = ("0x0302", "0x0380", "0x1200")
_NIC_CLASSES = ("0x0200", "0x0207", "0x0280")
_VENDORS: dict[str, Vendor] = {"0x10de": "cuda", "0x1002": "rocm", "0x19e5": "npu"}


@dataclass(slots=True)
class _Host:
    """Accelerators and NICs of one host, in document order."""

    devices: list[tuple[Element, Element | None, Site]] = field(default_factory=list)
    nics: list[tuple[Element | None, Element | None, Site]] = field(default_factory=list)


def looks_like(source: Source) -> bool:
    """XML, whatever its root: this reader names the wrong ones."""
    return bool(re.match(r"\s*<", source.text))


def read(source: Source) -> Topology:
    """Read the PCI tree of one host, or of several when the dump fuses them by host_hash.

    Raises:
        PlanError: not a topology (a graph dump, a route file), cut, without accelerators, or with links
            that contradict each other.
    """
    root = read_xml(source)
    _check_root(source, root)
    notes: list[Note] = []
    hosts: dict[str, _Host] = {}
    for top in root.children:
        host = hosts.setdefault(top.attrs.get("host_hash", ""), _Host())
        if top.tag == "cpu":
            _collect(host, top, Site(numa=_int(top.attrs.get("numaid")), chain=()))
        elif top.tag in ("gpu", "apu"):  # FlagCX: accelerators straight below <system>
            host.devices.append((top, top, Site(numa=None, chain=())))
            if top.attrs.get("net"):
                host.nics.append((None, top, Site(numa=None, chain=())))
    hosts = {key: host for key, host in hosts.items() if host.devices}
    if not hosts:
        hint = "dump it on the machine itself: NCCL_TOPO_DUMP_FILE=topo.xml"
        raise source.error(
            root.line, "no accelerator (PCI class 0302, 0380 or 1200, or <gpu>)", "one or more", hint
        )
    parts = [_box(source, host, notes) for host in hosts.values()]
    names = tuple(key if len(parts) > 1 else "" for key in hosts)
    return Topology(
        kind="nccl-xml",
        nodes=names,
        boxes=tuple(box for box, _ in parts),
        box_of=np.arange(len(parts), dtype=np.int32),
        devices_per_node=np.array([box.size for box, _ in parts], np.int32),
        ranks=_rank_map(source, [ranks for _, ranks in parts], notes),
        notes=tuple(notes),
    )


def _check_root(source: Source, root: Element) -> None:
    if root.tag == "system":
        return
    known = {
        "graphs": (
            "an NCCL graph dump: rings and trees NCCL chose",
            "NCCL_TOPO_DUMP_FILE, not NCCL_GRAPH_DUMP_FILE",
        ),
        "interserver_route": (
            "a FlagCX route file: NIC pairs and switches",
            "the <system> file of one server",
        ),
    }
    got, hint = known.get(root.tag, (f"<{root.tag}>", "the file NCCL_TOPO_DUMP_FILE writes"))
    raise source.error(root.line, got, "an XML topology with <system> at its root", f"give {hint}")


def _collect(host: _Host, element: Element, site: Site) -> None:
    for child in element.children:
        if child.tag == "pci":
            _collect_pci(host, child, site.below(child))
        elif child.tag == "nic":  # straight below <cpu>: merged over the socket, or a socket interface
            host.nics.extend((None, net, site) for net in child.find("net"))


def _collect_pci(host: _Host, pci: Element, site: Site) -> None:
    group = pci.attrs.get("class", "")[:6]
    parts = [c for c in pci.children if c.tag in ("gpu", "apu")]
    if parts:
        host.devices.extend((pci, part, site) for part in parts)
    elif group in _GPU_CLASSES:
        host.devices.append((pci, None, site))
    nets = [net for nic in pci.find("nic") for net in nic.find("net")]
    if nets:
        host.nics.extend((pci, net, site) for net in nets)
    elif group in _NIC_CLASSES:
        host.nics.append((pci, None, site))
    _collect(host, Element(pci.tag, pci.attrs, pci.line, [c for c in pci.children if c.tag == "pci"]), site)


def _box(source: Source, host: _Host, notes: list[Note]) -> tuple[Box, list[tuple[int | None, int]]]:
    order = _device_order(source, host, notes)
    devices = [host.devices[i] for i in order]
    names = [f"{part.tag if part else 'gpu'}{i}".upper() for i, (_, part, _) in enumerate(devices)]
    nics = [
        (nic_of(source, pci, net, site, notes), site) for pci, net, site in _unique_nics(source, host, notes)
    ]
    paths = device_paths(source, devices, names, notes)
    nic_paths = tuple(tuple(pci_kind(site, nic_site) for _, nic_site in nics) for _, _, site in devices)
    by_name = {nic.name: i for i, (nic, _) in enumerate(nics)}
    degraded = boxes.find_degraded(paths, names, exempt=lambda kind: kind == "?")
    notes += [
        Note(what=f"{names[i]}: {w}", source=source.name, severity="degraded") for i, w in degraded.items()
    ]
    note_slow_ports(source, devices, names, [nic for nic, _ in nics], notes)
    found = []
    for i, (pci, part, site) in enumerate(devices):
        wired = by_name.get(part.attrs.get("net", "")) if part else None
        near = nearest(site, [s for _, s in nics]) if wired is None else (wired,)
        found.append(
            Device(
                index=i,
                name=names[i],
                vendor=_vendor(pci, part),
                numa=site.numa,
                busid=pci.attrs.get("busid", ""),
                nics=near,
            )
        )
    box = Box(
        devices=tuple(found),
        paths=tuple(map(tuple, paths)),
        links=path_links(paths, devices),
        nics=tuple(nic for nic, _ in nics),
        nic_paths=nic_paths,
        fabric=boxes.fabric_of(paths),
        degraded=degraded,
    )
    return box, [
        (_int(part.attrs.get("rank")) if part else None, part.line if part else 0) for _, part, _ in devices
    ]


def _device_order(source: Source, host: _Host, notes: list[Note]) -> list[int]:
    """Sort by <gpu dev>; file order where the file is static and has no <gpu>."""
    keys: dict[tuple[int, int], int] = {}
    if any(part is None for _, part, _ in host.devices):
        notes.append(
            Note(
                what="no <gpu> below the accelerators: a static file. Device numbers follow file order, and "
                "NVLink or xGMI is not described; add `nvidia-smi topo -m` for it",
                source=source.name,
            )
        )
        return list(range(len(host.devices)))
    for i, (_, part, _) in enumerate(host.devices):
        assert part is not None
        key = (_int(part.attrs.get("dev")) or 0, _int(part.attrs.get("mlopart")) or 0)
        if key in keys:
            raise source.error(
                part.line, f"device {key[0]} again", "each dev once in a host", "dump it again"
            )
        keys[key] = i
    return [keys[k] for k in sorted(keys)]


def _unique_nics(
    source: Source, host: _Host, notes: list[Note]
) -> Iterator[tuple[Element | None, Element | None, Site]]:
    """Drop the second listing of a NIC: a socket interface appears once under every CPU."""
    seen: dict[tuple[str, str], int] = {}
    for pci, net, site in host.nics:
        if net is not None and net.tag == "net":
            key = (net.attrs.get("name", ""), net.attrs.get("port", ""))
            if key in seen:
                what = f"NIC {key[0]}: listed again, first on line {seen[key]}; counted once"
                notes.append(Note(what=what, source=source.name, line=net.line))
                continue
            seen[key] = net.line
        yield pci, net, site


def _vendor(pci: Element, part: Element | None) -> Vendor:
    known = _VENDORS.get(pci.attrs.get("vendor", "").lower())
    if known or part is None:
        return known or "unknown"
    if "gcn" in part.attrs or any(c.tag == "xgmi" for c in part.children):
        return "rocm"  # RCCL writes an sm attribute too
    return "cuda" if "sm" in part.attrs else "unknown"


def _rank_map(source: Source, hosts: list[list[tuple[int | None, int]]], notes: list[Note]) -> RankMap | None:
    found: dict[int, tuple[int, int]] = {}
    for node, ranks in enumerate(hosts):
        for device, (rank, line) in enumerate(ranks):
            if rank is None:
                return None
            if rank in found:
                notes.append(Note(what=f"rank {rank} twice; ranks ignored", source=source.name, line=line))
                return None
            found[rank] = (node, device)
    if sorted(found) != list(range(len(found))):
        return None
    places = np.array([found[r] for r in range(len(found))], np.int32).reshape(-1, 2)
    return RankMap(node=places[:, 0].copy(), device=places[:, 1].copy())


def _int(text: str | None) -> int | None:
    return int(text) if text is not None and re.fullmatch(r"-?\d{1,9}", text.strip()) else None
