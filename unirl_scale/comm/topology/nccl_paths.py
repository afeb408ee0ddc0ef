"""Paths between the accelerators and NICs of an NCCL topology XML."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from unirl_scale.comm.topology import boxes, links
from unirl_scale.comm.topology.documents import Element
from unirl_scale.comm.topology.model import SELF, UNKNOWN, Link, Nic, Note
from unirl_scale.comm.topology.source import Source

_SWITCH_CLASS = "0x0680"
Found = tuple[Element, Element | None, "Site"]


@dataclass(frozen=True, slots=True)
class Site:
    """Where something hangs: its NUMA node, and the PCI elements from the root port down to it."""

    numa: int | None
    chain: tuple[Element, ...]

    def below(self, pci: Element) -> Site:
        """The place of a PCI element under this one."""
        return Site(self.numa, (*self.chain, pci))


def pci_kind(a: Site, b: Site) -> str:
    """PIX: at most one bridge between; PXB: several; PHB: through the CPU; SYS: to the other CPU."""
    if not a.chain and not b.chain and a.numa is None and b.numa is None:
        return UNKNOWN
    if a.numa != b.numa:
        return "SYS"
    bridges = _bridges(a, b)
    return "PHB" if bridges is None else "PIX" if bridges <= 1 else "PXB"


def nearest(device: Site, nics: Sequence[Site]) -> tuple[int, ...]:
    """NICs on the shortest path from a device: by kind, then by bridges between."""
    cost = [
        (boxes.PROXIMITY.index(kind), _bridges(device, nic) or 0)
        for nic in nics
        if (kind := pci_kind(device, nic)) != UNKNOWN
    ]
    return tuple(i for i, c in enumerate(cost) if c == min(cost)) if len(cost) == len(nics) else ()


def _bridges(a: Site, b: Site) -> int | None:
    """Hops from the lowest shared PCI element down to the deeper of the two; None without a shared one."""
    shared = 0
    for x, y in zip(a.chain, b.chain):
        if x is not y:
            break
        shared += 1
    return max(len(a.chain), len(b.chain)) - shared if shared else None


def device_paths(
    source: Source, devices: Sequence[Found], names: Sequence[str], notes: list[Note]
) -> list[list[str]]:
    """[g][g] kinds. NVLink and xGMI where the file lists them, PCIe otherwise, unknown in a static file.

    Raises:
        PlanError: two devices state different numbers of links to each other.
    """
    size = len(devices)
    static = any(part is None for _, part, _ in devices)
    paths = [
        [
            SELF if i == j else UNKNOWN if static else pci_kind(devices[i][2], devices[j][2])
            for j in range(size)
        ]
        for i in range(size)
    ]
    if static:
        return paths
    wired, switched, lines = _declared_links(source, devices, names, notes)
    for (i, j), count in wired.items():
        back = wired.get((j, i))
        if back is not None and back != count:
            raise source.error(
                lines[i, j],
                f"{count} link(s) from {names[i]} to {names[j]}, but line {lines[j, i]} has {back} back",
                "the same number both ways",
                "dump the topology again",
            )
        if back is None:
            what = f"{names[j]}: lists no link to {names[i]}, which lists {count}; taken as {count} both ways"
            notes.append(Note(what=what, source=source.name, line=lines[i, j], severity="filled"))
        kind = "XGMI" if _is_amd(devices[i][1]) else "NV"
        paths[i][j] = paths[j][i] = f"{kind}{count}"
    for i in range(size):
        for j in range(size):
            both = min(switched.get(i, 0), switched.get(j, 0))
            if i != j and both:
                paths[i][j] = f"NV{both}"
    return paths


def _declared_links(
    source: Source, devices: Sequence[Found], names: Sequence[str], notes: list[Note]
) -> tuple[dict[tuple[int, int], int], Counter[int], dict[tuple[int, int], int]]:
    by_bus = {pci.attrs.get("busid", "").lower(): i for i, (pci, _, _) in enumerate(devices)}
    wired: dict[tuple[int, int], int] = {}
    lines: dict[tuple[int, int], int] = {}
    switched: Counter[int] = Counter()
    for i, (_, part, _) in enumerate(devices):
        for link in part.children if part else ():
            if link.tag not in ("nvlink", "xgmi"):
                continue
            count = link.attrs.get("count", "")
            if not count.isdecimal() or int(count) < 1:
                raise source.error(
                    link.line, f"count={count!r}", "a number of links", "dump the topology again"
                )
            target = link.attrs.get("target", "").lower()
            if target in by_bus:
                wired[i, by_bus[target]] = int(count)
                lines[i, by_bus[target]] = link.line
            elif link.attrs.get("tclass", "").startswith(_SWITCH_CLASS):
                switched[i] += int(count)
            else:
                what = f"{names[i]}: {count} link(s) to {target}, which is no accelerator here; left out"
                notes.append(Note(what=what, source=source.name, line=link.line))
    return wired, switched, lines


def path_links(paths: Sequence[Sequence[str]], devices: Sequence[Found]) -> Mapping[str, Link]:
    """What each kind of path costs, from the compute capability and the PCIe attributes in the file."""
    part = devices[0][1]
    sm = part.attrs.get("sm", "") if part is not None else ""
    gfx = part.attrs.get("gcn", "") if part is not None else ""
    speeds = [pcie_speed(site) for _, _, site in devices]
    known = [s for s in speeds if s is not None]
    slowest = min(known, key=lambda s: s[0] * s[1]) if len(known) == len(speeds) and known else None

    def cost(kind: str) -> Link:
        if kind.startswith("NV"):
            return links.nvlink(int(kind[2:]), int(sm) if sm.isdecimal() else -1)
        if kind.startswith("XGMI"):
            return links.xgmi(int(kind[4:]), gfx)
        return links.pcie(kind, *slowest) if slowest else links.pcie(kind)

    return boxes.links_in(paths, cost)


def pcie_speed(site: Site) -> tuple[float, int] | None:
    """(GT/s, lanes) of the slowest hop with a believable reading, or None.

    Virtual bridges report width 0 or 1, and an idle device 2.5 GT/s: neither says what it can carry.
    """
    hops = []
    for pci in site.chain:
        speed = re.match(r"\s*(\d{1,4}(?:\.\d*)?)\s*GT/s", pci.attrs.get("link_speed", ""))
        width = pci.attrs.get("link_width", "")
        if speed and re.fullmatch(r"\d{1,3}", width) and int(width) > 1 and float(speed[1]) > 2.5:
            hops.append((float(speed[1]), int(width)))
    return min(hops, key=lambda h: h[0] * h[1]) if hops else None


def note_slow_ports(
    source: Source, devices: Sequence[Found], names: Sequence[str], nics: Sequence[Nic], notes: list[Note]
) -> None:
    """Report devices whose PCIe, and NICs whose line, is slower than that of most of their kind."""
    rates: list[tuple[str, str, float]] = []
    for name, (_, _, site) in zip(names, devices):
        speed = pcie_speed(site)
        if speed is not None:
            rates.append(("device", name, speed[0] * speed[1]))
    rates += [("NIC", n.name, n.link.beta_gb_per_s) for n in nics if n.link.beta_gb_per_s is not None]
    for kind in ("device", "NIC"):
        mine = [(name, rate) for k, name, rate in rates if k == kind]
        counts = Counter(rate for _, rate in mine)
        usual, votes = counts.most_common(1)[0] if counts else (0.0, 0)
        for name, rate in mine:
            if rate < usual and 2 * votes > len(mine):
                share = f"{100 * rate / usual:.0f} % of its peers' rate"
                what = f"{name}: {'PCIe' if kind == 'device' else 'line'} at {share}"
                notes.append(Note(what=what, source=source.name, severity="degraded"))


def nic_of(source: Source, pci: Element | None, net: Element | None, site: Site, notes: list[Note]) -> Nic:
    """A NIC from its <net>, or from its bare PCI entry; merged ports keep their joint speed."""
    busid = pci.attrs.get("busid", "") if pci is not None else ""
    if net is None:
        return Nic(name=busid, numa=site.numa, busid=busid)
    name = net.attrs.get("name") or net.attrs.get("net") or busid
    speed = net.attrs.get("speed", "")
    mbit = float(speed) if re.fullmatch(r"\d+(\.\d+)?", speed) else 0.0
    if net.tag == "net" and mbit <= 0:
        notes.append(Note(what=f"NIC {name}: speed {speed!r} is unknown", source=source.name, line=net.line))
    ports = name.count("+") + 1
    source_text = f"{ports} port(s), {mbit / 1000:g} Gbit/s in all, as the file states"
    return Nic(
        name=name, numa=site.numa, ports=ports, link=links.ethernet(mbit / 1000, source_text), busid=busid
    )


def _is_amd(part: Element | None) -> bool:
    return part is not None and any(c.tag == "xgmi" for c in part.children)
