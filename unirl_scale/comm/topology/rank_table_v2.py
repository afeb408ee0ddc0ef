"""HCCL rank table 2.0 and the topology file it refers to (net layers, CLOS instances, UB edges)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from unirl_scale.comm.topology import boxes, links
from unirl_scale.comm.topology.documents import objects, read_json, whole
from unirl_scale.comm.topology.model import (
    SELF,
    UNKNOWN,
    Box,
    Device,
    Level,
    Note,
    RankMap,
    Topology,
    box_topology,
)
from unirl_scale.comm.topology.source import Source

_HINT = "write the table again with the tool of this CANN release"


def read_table(source: Source, table: Mapping[str, Any]) -> Topology:
    """Nodes are the instances of net layer 0; each higher layer becomes a level.

    Raises:
        PlanError: a rank is missing or doubled, layers are missing, or rank_count is wrong.
    """
    version = str(table.get("version", ""))
    if version != "2.0":
        raise source.error(source.line_of('"version"'), f"version {version!r}", "2.0 with rank_list", _HINT)
    ranks = objects(source, table, "rank_list")
    stated = table.get("rank_count", len(ranks))
    if str(stated) != str(len(ranks)):
        got = f"rank_count {stated}, but {len(ranks)} are listed"
        raise source.error(source.line_of('"rank_count"'), got, "the same number", _HINT)
    rows = sorted((_row(source, item) for item in ranks), key=lambda r: r[0])
    for want, (rank, *_) in enumerate(rows):
        if rank != want:
            got = f"rank_id {rank} where {want} is due"
            raise source.error(
                source.line_of('"rank_id"'), got, f"ranks 0 to {len(rows) - 1}, each once", _HINT
            )
    return _assemble(source, rows, str(table.get("topo_file_path", "")))


Row = tuple[int, int, dict[int, str], str]


def _row(source: Source, item: Mapping[str, Any]) -> Row:
    layers: dict[int, str] = {}
    address = ""
    for level in objects(source, item, "level_list"):
        layers[whole(source, level, "net_layer")] = str(level.get("net_instance_id", ""))
        for entry in objects(source, level, "rank_addr_list", least=0):
            address = address or str(entry.get("addr", ""))
    rank = whole(source, item, "rank_id")
    if 0 not in layers:
        got = f"rank {rank} without net_layer 0"
        raise source.error(source.line_of('"level_list"'), got, "a net_layer 0 instance", _HINT)
    local = whole(source, item, "local_id" if "local_id" in item else "device_id")
    return rank, local, layers, address


def _assemble(source: Source, rows: Sequence[Row], topo_path: str) -> Topology:
    names = list(dict.fromkeys(layers[0] for _, _, layers, _ in rows))
    index = {name: i for i, name in enumerate(names)}
    members: list[list[Row]] = [[] for _ in names]
    for row in rows:
        members[index[row[2][0]]].append(row)
    node, device = np.zeros((2, len(rows)), np.int32)
    kinds: dict[tuple[int, ...], int] = {}
    found: list[Box] = []
    box_of = np.zeros(len(names), np.int32)
    for n, group in enumerate(members):
        group.sort(key=lambda r: r[1])
        ids = tuple(r[1] for r in group)
        if len(set(ids)) != len(ids):
            got = f"a local_id of instance {names[n]} twice"
            raise source.error(source.line_of(f'"{names[n]}"'), got, "each local_id once an instance", _HINT)
        if ids not in kinds:
            kinds[ids] = len(found)
            found.append(plain_box(ids))
        box_of[n] = kinds[ids]
        for position, row in enumerate(group):
            node[row[0]], device[row[0]] = n, position
    notes = []
    if topo_path:
        what = f"links are in the topology file {topo_path}; give that file too"
        notes.append(Note(what=what, source=source.name, line=source.line_of('"topo_file_path"')))
    return Topology(
        kind="rank-table-2.0",
        nodes=tuple(names),
        boxes=tuple(found),
        box_of=box_of,
        devices_per_node=np.array([len(m) for m in members], np.int32),
        levels=_levels(source, rows, index),
        ranks=RankMap(node=node, device=device, addresses=tuple(row[3] for row in rows)),
        notes=tuple(notes),
    )


def _levels(source: Source, rows: Sequence[Row], index: Mapping[str, int]) -> tuple[Level, ...]:
    layers = sorted({layer for row in rows for layer in row[2]} - {0})
    out = []
    for layer in layers:
        member = np.full(len(index), -1, np.int32)
        groups: dict[str, int] = {}
        for _, _, ids, _ in rows:
            if layer not in ids:
                continue
            n, g = index[ids[0]], groups.setdefault(ids[layer], len(groups))
            if member[n] not in (-1, g):
                got = f"instance {ids[0]} of layer 0 in two instances of layer {layer}"
                raise source.error(source.line_of(f'"{ids[layer]}"'), got, "one", _HINT)
            member[n] = g
        out.append(
            Level(name="pod" if layer == layers[0] else f"layer{layer}", groups=tuple(groups), member=member)
        )
    return tuple(out)


def plain_box(ids: Sequence[int]) -> Box:
    """A box of NPUs whose links are unknown."""
    size = len(ids)
    paths = tuple(tuple(SELF if i == j else UNKNOWN for j in range(size)) for i in range(size))
    devices = tuple(Device(index=d, name=f"NPU{d}", vendor="npu") for d in ids)
    return Box(devices=devices, paths=paths, links={})


def looks_like_edges(source: Source) -> bool:
    """JSON with peers and edges: the topology file of a 2.0 table."""
    return (
        source.text.lstrip().startswith("{") and '"edge_list"' in source.text and '"peer_list"' in source.text
    )


def read_edges(source: Source) -> Topology:
    """Read the topology file: direct edges of net layer 0 become paths, PEER2NET edges network ports.

    Raises:
        PlanError: counts that contradict the lists, or an edge to a peer that is not listed.
    """
    table = read_json(source, dict)
    peers = [whole(source, p, "local_id") for p in objects(source, table, "peer_list")]
    edges = objects(source, table, "edge_list", least=0)
    for key, found in (("peer_count", len(peers)), ("edge_count", len(edges))):
        if key in table and whole(source, table, key) != found:
            got = f"{key} {table[key]}, but {found} are listed"
            raise source.error(source.line_of(f'"{key}"'), got, "the same number", _HINT)
    if len(set(peers)) != len(peers):
        raise source.error(source.line_of('"peer_list"'), "a peer twice", "each local_id once", _HINT)
    index = {p: i for i, p in enumerate(sorted(peers))}
    paths = [[SELF if i == j else UNKNOWN for j in index.values()] for i in index.values()]
    uplinks: Counter[int] = Counter()
    for edge in edges:
        keys = ("local_a", "local_b") if edge.get("link_type") == "PEER2PEER" else ("local_a",)
        ends = [whole(source, edge, key) for key in keys]
        lost = [e for e in ends if e not in index]
        if lost:
            got = f"an edge to local_id {lost[0]}"
            raise source.error(source.line_of('"edge_list"'), got, f"one of {sorted(peers)[:8]}", _HINT)
        if len(ends) == 2 and str(edge.get("net_layer", 0)) == "0":
            a, b = index[ends[0]], index[ends[1]]
            paths[a][b] = paths[b][a] = "UB"
        elif len(ends) == 1:
            ports = edge.get("local_a_ports")
            uplinks[index[ends[0]]] += len(ports) if isinstance(ports, list) else 1
    names = [f"NPU{p}" for p in sorted(peers)]
    notes = [
        Note(what=f"{names[i]}: {uplinks[i]} port(s) to the network, rate not stated", source=source.name)
        for i in sorted(uplinks)[:1]
    ]
    degraded = boxes.find_degraded(paths, names)
    notes += [
        Note(what=f"{names[i]}: {w}", source=source.name, severity="degraded") for i, w in degraded.items()
    ]
    box = Box(
        devices=tuple(Device(index=p, name=n, vendor="npu") for p, n in zip(sorted(peers), names)),
        paths=tuple(map(tuple, paths)),
        links=boxes.links_in(paths, links.ascend),
        fabric="mesh" if any("UB" in row for row in paths) else "unknown",
        degraded=degraded,
    )
    return box_topology("hccl-topology-file", box, tuple(notes))
