"""HCCL rank tables: the legacy group list, 1.0, and 1.2 with super pods. Version 2.0 is rank_table_v2.py."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from unirl_scale.comm.topology import links, rank_table_v2
from unirl_scale.comm.topology.documents import objects, read_json, whole
from unirl_scale.comm.topology.model import Box, Level, Note, RankMap, Topology
from unirl_scale.comm.topology.source import Source

_HINT = "generate the rank table again once every node has reported"


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One rank as a table lists it."""

    rank: int
    server: int
    device_id: int
    address: str = ""
    super_device: str = ""


def looks_like(source: Source) -> bool:
    """JSON with a list of servers, groups or ranks."""
    return source.text.lstrip().startswith("{") and bool(
        re.search(r'"(server_list|group_list|rank_list|instance_list)"\s*:', source.text)
    )


def read(source: Source) -> Topology:
    """Read a rank table of any version.

    Raises:
        PlanError: unfinished, contradictory (counts, ranks, devices or super pods), or an unknown version.
    """
    table = read_json(source, dict)
    status = str(table.get("status", "completed"))
    if status != "completed":
        raise source.error(source.line_of('"status"'), f"status {status!r}", "completed", _HINT)
    version = str(table.get("version", ""))
    if "group_list" in table:
        return _from_groups(source, table)
    if "rank_list" in table:
        return rank_table_v2.read_table(source, table)
    if version not in ("", "1.0", "1.2"):
        raise source.error(source.line_of('"version"'), f"version {version!r}", "1.0, 1.2 or 2.0", _HINT)
    servers = objects(source, table, "server_list")
    _check_count(source, table, "server_count", len(servers))
    names = [str(s.get("server_id", "")) for s in servers]
    notes: list[Note] = []
    entries = [
        _entry(source, device, i)
        for i, server in enumerate(servers)
        for device in objects(source, server, "device")
    ]
    levels = _super_pods(source, table, names) if version == "1.2" or "super_pod_list" in table else ()
    if levels:
        _check_super_devices(source, entries, levels[0], names)
    kind = f"rank-table-{version or '1.0'}"
    return assemble(source, kind, _distinct(source, names, notes), entries, levels, notes)


def _from_groups(source: Source, table: Mapping[str, Any]) -> Topology:
    groups = objects(source, table, "group_list")
    _check_count(source, table, "group_count", len(groups))
    world = [g for g in groups if g.get("group_name") in ("hccl_world_group", "", None)] or groups
    if len(world) != 1:
        raise source.error(source.line_of('"group_list"'), f"{len(world)} groups", "one world group", _HINT)
    instances = objects(source, world[0], "instance_list")
    _check_count(source, world[0], "instance_count", len(instances))
    notes: list[Note] = []
    servers: dict[str, int] = {}
    entries: list[Entry] = []
    ranked = all(
        "rank_id" in i or all("rank_id" in d for d in objects(source, i, "devices")) for i in instances
    )
    for instance in instances:
        server = str(instance.get("server_id", instance.get("pod_name", "")))
        servers.setdefault(server, len(servers))
        for device in objects(source, instance, "devices"):
            given = device.get("rank_id", instance.get("rank_id")) if ranked else len(entries)
            entries.append(_entry(source, {**device, "rank_id": given}, servers[server]))
    _check_count(source, world[0], "device_count", len(entries))
    if not ranked:
        notes.append(
            Note(what="the legacy table has no rank_id; ranks follow file order", source=source.name)
        )
    return assemble(source, "rank-table-legacy", list(servers), entries, (), notes)


def _entry(source: Source, device: Mapping[str, Any], server: int) -> Entry:
    return Entry(
        rank=whole(source, device, "rank_id"),
        server=server,
        device_id=whole(source, device, "device_id"),
        address=str(device.get("device_ip", "")),
        super_device=str(device.get("super_device_id", "")),
    )


def _check_count(source: Source, item: Mapping[str, Any], key: str, found: int) -> None:
    stated = item.get(key)
    if stated is not None and str(stated) != str(found):
        line = source.line_of(f'"{key}"')
        raise source.error(line, f"{key} {stated!r}, but {found} are listed", "the same number", _HINT)


def _distinct(source: Source, names: Sequence[str], notes: list[Note]) -> list[str]:
    """Names of the servers; a masked or repeated id stands for several machines and gets a suffix."""
    if len(set(names)) == len(names):
        return list(names)
    counts = Counter(names)
    out = [f"{name}@{i}" if counts[name] > 1 else name for i, name in enumerate(names)]
    what = f"server_id {counts.most_common(1)[0][0]!r} repeats; each entry is taken as a machine"
    notes.append(Note(what=what, source=source.name, line=source.line_of('"server_id"')))
    return out


def _super_pods(source: Source, table: Mapping[str, Any], names: Sequence[str]) -> tuple[Level, ...]:
    pods = objects(source, table, "super_pod_list")
    member = np.full(len(names), -1, np.int32)
    position = {name: i for i, name in enumerate(names)}
    for p, pod in enumerate(pods):
        for server in objects(source, pod, "server_list"):
            name = str(server.get("server_id", ""))
            line = source.line_of('"super_pod_list"')
            if name not in position:
                raise source.error(
                    line, f"server {name!r} in a super pod only", "a server of server_list", _HINT
                )
            if member[position[name]] >= 0:
                raise source.error(
                    line, f"server {name!r} in two super pods", "one super pod a server", _HINT
                )
            member[position[name]] = p
    if (member < 0).any():
        lost = names[int(np.argmin(member))]
        line = source.line_of('"super_pod_list"')
        raise source.error(line, f"server {lost!r} in no super pod", "every server in one", _HINT)
    return (
        Level(
            name="pod",
            groups=tuple(str(p.get("super_pod_id", i)) for i, p in enumerate(pods)),
            member=member,
            inside=links.ascend("HCCS_SW"),  # super pods of version 1.2 are those of the 910C
        ),
    )


def _check_super_devices(source: Source, entries: Sequence[Entry], pods: Level, names: Sequence[str]) -> None:
    seen: dict[tuple[int, str], Entry] = {}
    for entry in entries:
        if not entry.super_device:
            line = source.line_of(f'"{names[entry.server]}"')
            raise source.error(
                line, f"rank {entry.rank} without super_device_id", "one a device in 1.2", _HINT
            )
        key = (int(pods.member[entry.server]), entry.super_device)
        if key in seen:
            line = source.line_of(f'"{names[entry.server]}"')
            got = f"super_device_id {entry.super_device} for ranks {seen[key].rank} and {entry.rank}"
            raise source.error(line, got, "each id once in a super pod", _HINT)
        seen[key] = entry


def assemble(
    source: Source,
    kind: str,
    servers: Sequence[str],
    entries: Sequence[Entry],
    levels: tuple[Level, ...],
    notes: list[Note],
) -> Topology:
    """Boxes, nodes and the rank map from the entries.

    Raises:
        PlanError: a rank is missing or doubled, or a device is given to two ranks.
    """
    ranks = sorted(e.rank for e in entries)
    if ranks != list(range(len(ranks))):
        twice = next((a for a, b in pairwise(ranks) if a == b), None)
        if twice is not None:
            line = source.line_of(f'"rank_id": "{twice}"', source.line_of("rank_id"))
            raise source.error(line, f"rank_id {twice} twice", "each rank once", _HINT)
        lost = next(i for i, r in enumerate([*ranks, -1]) if i != r)
        got = f"{len(ranks)} ranks without rank {lost}"
        raise source.error(source.line_of("rank_id"), got, f"ranks 0 to {len(ranks) - 1}", _HINT)
    by_rank = sorted(entries, key=lambda e: e.rank)
    per_server: list[list[Entry]] = [[] for _ in servers]
    for entry in entries:
        per_server[entry.server].append(entry)
    node, device = np.zeros((2, len(entries)), np.int32)
    boxes: dict[tuple[int, ...], int] = {}
    found: list[Box] = []
    box_of = np.zeros(len(servers), np.int32)
    for s, members in enumerate(per_server):
        members.sort(key=lambda e: e.device_id)
        ids = tuple(e.device_id for e in members)
        if len(set(ids)) != len(ids):
            line = source.line_of(f'"{servers[s].split("@")[0]}"')
            raise source.error(
                line, f"a device of {servers[s]} listed twice", "each device_id once a server", _HINT
            )
        if ids not in boxes:
            boxes[ids] = len(found)
            found.append(rank_table_v2.plain_box(ids))
        box_of[s] = boxes[ids]
        for position, entry in enumerate(members):
            node[entry.rank], device[entry.rank] = s, position
    if int((np.diff(node) != 0).sum()) >= len(servers):
        what = "ranks of different servers interleave, which HCCL does not support"
        notes.append(Note(what=what, source=source.name, line=source.line_of("rank_id"), severity="degraded"))
    if any("*" in e.address for e in entries):
        what = "device addresses are masked with *; the table plans but cannot start a job"
        notes.append(Note(what=what, source=source.name, line=source.line_of("*")))
    return Topology(
        kind=kind,
        nodes=tuple(servers),
        boxes=tuple(found),
        box_of=box_of,
        devices_per_node=np.array([len(m) for m in per_server], np.int32),
        levels=levels,
        ranks=RankMap(
            node=node,
            device=device,
            addresses=tuple(e.address for e in by_rank),
            super_devices=tuple(e.super_device for e in by_rank) if by_rank[0].super_device else (),
        ),
        notes=tuple(notes),
    )
