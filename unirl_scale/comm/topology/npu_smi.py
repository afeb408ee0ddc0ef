"""`npu-smi info -t topo`."""

from __future__ import annotations

import re

from unirl_scale.comm.topology import boxes, links
from unirl_scale.comm.topology.matrix import Matrix, device_paths, read_matrix
from unirl_scale.comm.topology.model import UNKNOWN, Box, Device, Link, Note, Topology, box_topology
from unirl_scale.comm.topology.source import Source

_DEVICE = re.compile(r"(NPU|Phy-ID|Device|Chip)\s?\d{1,5}\Z")
_PATH = re.compile(r"(X|SYS|PHB|PIX|PXB|HCCS_SW|HCCS|SIO|UB|N/?A)\Z")
_COMMAND = "npu-smi info -t topo"


def looks_like(source: Source) -> bool:
    """A line of NPU or Phy-ID names as in the matrix's header."""
    return any(re.match(r"\s*(NPU|Phy-ID)\d+(\s|$)", line) for line in source.lines[:200])


def read(source: Source) -> Topology:
    """Read the matrix into a one-box topology. Two dies joined by SIO are two devices of one chip.

    Raises:
        PlanError: no matrix, several machines, or rows that contradict each other.
    """
    matrix = read_matrix(source, _DEVICE, _PATH, _COMMAND)
    npus = sorted((c for c in matrix.columns if _DEVICE.match(c)), key=_number)
    if not any(n in matrix.rows for n in npus):
        raise source.error(1, "a header without rows", "a row for each NPU", f"run `{_COMMAND}` again")
    notes = list(matrix.notes)
    paths, degraded = device_paths(source, matrix, npus, _kind, notes)
    devices = tuple(_device(matrix, n) for n in npus)
    if matrix.trailer:
        notes += [
            Note(what=f"{d.name}: CPU affinity not printed", source=source.name)
            for d in devices
            if not d.cpus
        ]
    box = Box(
        devices=devices,
        paths=tuple(map(tuple, paths)),
        links=boxes.links_in(paths, _cost),
        fabric=boxes.fabric_of(paths),
        degraded=degraded,
    )
    return box_topology("npu-smi", box, tuple(notes))


def _number(name: str) -> int:
    return int(re.sub(r"\D", "", name))


def _kind(cell: str) -> str:
    return UNKNOWN if cell in ("NA", "N/A") else cell


def _cost(kind: str) -> Link:
    return links.ascend(kind) if boxes.is_fast(kind) else links.pcie(kind)


def _device(matrix: Matrix, name: str) -> Device:
    row = matrix.rows.get(name)
    cpus = row.rest[0] if row and row.rest and re.match(r"[\d,\-]+\Z", row.rest[0]) else ""
    return Device(index=_number(name), name=name, vendor="npu", cpus=cpus)
