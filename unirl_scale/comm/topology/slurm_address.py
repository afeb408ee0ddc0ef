"""`SLURM_TOPOLOGY_ADDR` and its pattern, one record a node, as `srun env` gathers them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import pairwise

from unirl_scale.comm.topology.model import Topology
from unirl_scale.comm.topology.slurm_levels import Switch, natural, tree_topology
from unirl_scale.comm.topology.source import Source

_LINE = re.compile(
    r"\s*(?:(\d+):\s*)?(?:export\s+|declare -x\s+)?"
    r"(SLURM_TOPOLOGY_ADDR|SLURM_TOPOLOGY_ADDR_PATTERN|SLURMD_NODENAME|HOSTNAME)=[\"']?([^\"'\s]*)"
)
_HINT = "print SLURMD_NODENAME beside it, or give `scontrol show topology`"


@dataclass(slots=True)
class _Record:
    line: int = 0
    address: str = ""
    pattern: str = ""
    node: str = ""


def looks_like(source: Source) -> bool:
    """A SLURM_TOPOLOGY_ADDR assignment."""
    return "SLURM_TOPOLOGY_ADDR" in source.text


def read(source: Source) -> Topology:
    """Read the addresses of all nodes into a tree. Names may contain dots where that is not ambiguous.

    Raises:
        PlanError: no address, an address that does not fit its pattern, an ambiguous one, or two
            addresses for one node.
    """
    nodes: dict[str, tuple[tuple[str, ...], int]] = {}
    for record in _records(source):
        switches, node = _split(source, record)
        known = nodes.get(node)
        if known and known[0] != switches:
            got = f"{'.'.join(switches)} for node {node}, but line {known[1]} has {'.'.join(known[0])}"
            raise source.error(record.line, got, "one address a node", "gather the variables of one job only")
        nodes.setdefault(node, (switches, record.line))
    if not nodes:
        raise source.error(
            1, "no SLURM_TOPOLOGY_ADDR=...", "one a node", "run `srun -l env | grep SLURM_TOPOLOGY`"
        )
    depths = {len(switches) for switches, _ in nodes.values()}
    if len(depths) > 1:
        raise source.error(1, f"addresses of {sorted(depths)} switches", "one depth", "gather one job only")
    return tree_topology(source, "slurm-address", _switches(nodes))


def _records(source: Source) -> list[_Record]:
    found: dict[str, list[_Record]] = {}
    for number, line in enumerate(source.lines, 1):
        match = _LINE.match(line)
        if not match:
            continue
        label, key, value = match.groups()
        records = found.setdefault(label or "", [_Record()])
        part = {"SLURM_TOPOLOGY_ADDR": "address", "SLURM_TOPOLOGY_ADDR_PATTERN": "pattern"}.get(key, "node")
        if part == "node" and key == "HOSTNAME" and records[-1].node:
            continue
        if getattr(records[-1], part) and part != "node":
            records.append(_Record())
        setattr(records[-1], part, value)
        if part == "address":
            records[-1].line = number
    return [r for group in found.values() for r in group if r.address]


def _split(source: Source, record: _Record) -> tuple[tuple[str, ...], str]:
    parts = record.address.split(".")
    if not record.pattern:
        if len(parts) > 1 and not record.node:
            raise source.error(record.line, "an address without SLURM_TOPOLOGY_ADDR_PATTERN", "both", _HINT)
        depth = 0 if len(parts) == 1 else len(record.address[: -len(record.node) - 1].split("."))
    else:
        if not record.pattern.endswith("node"):
            raise source.error(record.line, f"pattern {record.pattern!r}", "one that ends in node", _HINT)
        depth = record.pattern.count(".")
    if depth == 0:
        return (), record.address
    if record.node and record.address.endswith("." + record.node):
        head = record.address[: -len(record.node) - 1].split(".")
        if len(head) == depth:
            return tuple(head), record.node
        if depth == 1:
            return (".".join(head),), record.node
    elif len(parts) == depth + 1:
        return tuple(parts[:-1]), parts[-1]
    fits = "more" if len(parts) > depth + 1 else "fewer"
    got = f"{record.address}, {fits} parts than {record.pattern or 'the node name'} has"
    raise source.error(record.line, got, "one name a part; dots inside names make it ambiguous", _HINT)


def _switches(nodes: dict[str, tuple[tuple[str, ...], int]]) -> list[Switch]:
    children: dict[str, dict[str, None]] = {}
    leaves: dict[str, list[str]] = {}
    lines: dict[str, int] = {}
    for node in sorted(nodes, key=natural):
        switches, line = nodes[node]
        # One switch name may be used on two tiers; the path makes it one thing.
        paths = ["/".join(switches[: i + 1]) for i in range(len(switches))] or ["(no switch)"]
        for upper, lower in pairwise(paths):
            children.setdefault(upper, {})[lower] = None
        leaves.setdefault(paths[-1], []).append(node)
        for path in paths:
            lines.setdefault(path, line)
    return [
        Switch(name=p, line=lines[p], switches=tuple(children.get(p, ())), nodes=tuple(leaves.get(p, ())))
        for p in lines
    ]
