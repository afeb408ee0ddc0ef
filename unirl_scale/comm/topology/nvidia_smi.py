"""`nvidia-smi topo -m`."""

from __future__ import annotations

import re

from unirl_scale.comm.topology import boxes, links
from unirl_scale.comm.topology.matrix import Row, device_paths, read_matrix
from unirl_scale.comm.topology.model import (
    UNKNOWN,
    Box,
    Device,
    Link,
    Nic,
    Note,
    Topology,
    box_topology,
)
from unirl_scale.comm.topology.source import Source

_DEVICE = re.compile(r"GPU\d{1,4}\Z")
_PATH = re.compile(r"(X|SYS|NODE|PHB|PXB|PIX|PSB|SOC|NV\d{1,4}|N/?A)\Z")
_LEGEND = re.compile(r"\s*(NIC\d+)\s*:\s*(\S+)")
_P2P = re.compile(r"\b(CNS|GNS|TNS|NS|OK)\b")
_COMMAND = "nvidia-smi topo -m"
ASSUMED = (
    "assumed: the matrix names no part, and NVLink 5 (B200) has 50; name the accelerator, or set links.NV<n> "
    "in a topology YAML"
)
"""How the note on a rate ends that an accelerator's name makes needless."""


def looks_like(source: Source) -> bool:
    """A line of GPU names as in the matrix's header."""
    return any(re.match(r"\s*(\S+[#$]\s+)?GPU\d+(\s|$)", line) for line in source.lines[:200])


def read(source: Source) -> Topology:
    """Read the matrix into a one-box topology.

    Raises:
        PlanError: no matrix, several machines, or rows that contradict each other.
    """
    if any(_P2P.search(line) for line in source.lines if line.split()[:1] and _DEVICE.match(line.split()[0])):
        raise source.error(
            source.line_of("GPU"), "a peer-to-peer capability matrix", "the path matrix", f"run `{_COMMAND}`"
        )
    matrix = read_matrix(source, _DEVICE, _PATH, _COMMAND)
    gpus = sorted((c for c in matrix.columns if _DEVICE.match(c)), key=lambda c: int(c[3:]))
    cards = [c for c in matrix.columns if not _DEVICE.match(c)]
    if not any(g in matrix.rows for g in gpus):
        raise source.error(
            source.line_of("GPU"), "a header without rows", "a row for each GPU", f"run `{_COMMAND}` again"
        )
    notes = list(matrix.notes)
    paths, degraded = device_paths(source, matrix, gpus, _kind, notes)
    nic_paths = tuple(tuple(_kind(matrix.pair(source, g, n)) for n in cards) for g in gpus)
    fast = sorted({k for row in paths for k in row if k.startswith("NV")})
    if fast:
        notes.append(Note(what=f"{', '.join(fast)}: 25 GB/s a link; {ASSUMED}", source=source.name))
    box = Box(
        devices=tuple(
            _device(i, gpu, matrix.rows.get(gpu), matrix.trailer, nic_paths[i]) for i, gpu in enumerate(gpus)
        ),
        paths=tuple(map(tuple, paths)),
        links=boxes.links_in(paths, _cost),
        nics=tuple(_nics(source, cards)),
        nic_paths=nic_paths if cards else (),
        fabric=boxes.fabric_of(paths),
        degraded=degraded,
    )
    return box_topology("nvidia-smi", box, tuple(notes))


def _kind(cell: str) -> str:
    if cell in ("N/A", "NA"):
        return UNKNOWN
    return "SYS" if cell == "SOC" else "PXB" if cell == "PSB" else cell  # names of older drivers


def _cost(kind: str) -> Link:
    return links.nvlink(int(kind[2:])) if kind.startswith("NV") else links.pcie(kind)


def _device(
    index: int, name: str, row: Row | None, trailer: tuple[str, ...], nics: tuple[str, ...]
) -> Device:
    rest = dict(zip(trailer, row.rest)) if row else {}
    cpus = rest.get("CPU Affinity", "")
    numa = rest.get("NUMA Affinity", "")
    return Device(
        index=int(name[3:]),
        name=name,
        vendor="cuda",
        numa=int(numa) if numa.isdecimal() else None,
        cpus=cpus if re.match(r"[\d,\-]+\Z", cpus) else "",
        nics=boxes.nearest_nics(nics),
    )


def _nics(source: Source, cards: list[str]) -> list[Nic]:
    legend = {m[1]: m[2] for line in source.lines if (m := _LEGEND.match(line))}
    return [Nic(name=legend.get(card, card)) for card in cards]
