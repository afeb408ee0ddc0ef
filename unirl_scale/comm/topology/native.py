"""Our own YAML: links with their figures, boxes, nodes and levels; any part may be left out."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from unirl_scale.comm.topology import boxes, hostlist
from unirl_scale.comm.topology.documents import YamlDoc, read_yaml
from unirl_scale.comm.topology.model import (
    MAX_DEVICES,
    SELF,
    UNKNOWN,
    Box,
    Device,
    Level,
    Link,
    Nic,
    Topology,
    box_topology,
)
from unirl_scale.comm.topology.source import Source

KEY = "unirl_scale_topology"
_FIELDS = {
    "file": (KEY, "links", "boxes", "nodes", "levels"),
    "link": ("alpha_us", "beta_gb_per_s", "source"),
    "box": ("vendor", "devices", "fabric", "link", "paths", "down", "numa", "nics"),
    "nic": ("name", "numa", "near", "ports", "alpha_us", "beta_gb_per_s", "source"),
    "node": ("names", "box", "devices"),
    "level": ("name", "groups", "link", "inside"),
}
Path = tuple[str | int, ...]


def looks_like(source: Source) -> bool:
    """The key `unirl_scale_topology:` at the start of a line."""
    return any(line.startswith(KEY) for line in source.lines)


def read(source: Source) -> Topology:
    """Read the file.

    Raises:
        PlanError: an unknown key, a value of the wrong kind, a name that refers to nothing, or a node or
            link that appears twice.
    """
    doc = read_yaml(source)
    reader = _Reader(source, doc)
    body = reader.mapping(doc.value, (), "file")
    if body.get(KEY) != 1:
        raise source.error(doc.line(KEY), f"version {body.get(KEY)!r}", "1", "this release reads version 1")
    constants = {
        str(kind): reader.link(str(kind), value, ("links", kind))
        for kind, value in reader.table(body.get("links"), ("links",)).items()
    }
    found = {
        str(name): reader.box(value, ("boxes", name), constants)
        for name, value in reader.table(body.get("boxes"), ("boxes",)).items()
    }
    return reader.topology(body, constants, found)


class _Reader:
    """Checks and converts one document; every refusal carries the line."""

    def __init__(self, source: Source, doc: YamlDoc) -> None:
        self.source, self.doc = source, doc

    def fail(self, path: Path, got: str, rule: str, hint: str = "see docs/planning.md") -> Exception:
        return self.source.error(self.doc.line(*path), got, rule, hint)

    def mapping(self, value: Any, path: Path, fields: str) -> Mapping[str, Any]:
        if not isinstance(value, dict):
            raise self.fail(path, f"{value!r}", f"a mapping of {', '.join(_FIELDS[fields])}")
        for key in value:
            if key not in _FIELDS[fields]:
                near = difflib.get_close_matches(str(key), _FIELDS[fields], n=1)
                hint = f"did you mean {near[0]}?" if near else f"one of {', '.join(_FIELDS[fields])}"
                raise self.fail((*path, key), f"key {key!r}", "a known key", hint)
        return value

    def table(self, value: Any, path: Path) -> Mapping[str, Any]:
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise self.fail(path, f"{value!r}", "a mapping of names")
        return value

    def items(self, value: Any, path: Path) -> list[Any]:
        if value is None:
            return []
        if not isinstance(value, list):
            raise self.fail(path, f"{value!r}", "a list")
        return value

    def figure(self, value: Any, path: Path) -> float | None:
        if value is None or str(value).lower() in ("unknown", "tbd", "?"):
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e9:
            hint = "leave an unknown figure out; 0 would mean a link that carries nothing"
            raise self.fail(path, f"{value!r}", "a positive number", hint)
        return float(value)

    def whole(self, value: Any, path: Path, low: int = 0) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= MAX_DEVICES:
            raise self.fail(path, f"{value!r}", f"a whole number from {low} to {MAX_DEVICES}")
        return value

    def link(self, kind: str, value: Any, path: Path) -> Link:
        body = self.mapping(value, path, "link")
        return Link(
            kind=kind,
            alpha_us=self.figure(body.get("alpha_us"), (*path, "alpha_us")),
            beta_gb_per_s=self.figure(body.get("beta_gb_per_s"), (*path, "beta_gb_per_s")),
            source=str(body.get("source", f"{self.source.name}, no source given")),
        )

    def box(self, value: Any, path: Path, constants: Mapping[str, Link]) -> Box:
        body = self.mapping(value, path, "box")
        vendor = body.get("vendor", "unknown")
        if vendor not in ("cuda", "npu", "rocm", "unknown"):
            raise self.fail((*path, "vendor"), f"{vendor!r}", "cuda, npu, rocm or unknown")
        given = body.get("devices", 0)
        count = self.whole(len(given) if isinstance(given, list) else given, (*path, "devices"), 1)
        prefix = "NPU" if vendor == "npu" else "GPU"
        names = [str(n) for n in given] if isinstance(given, list) else [f"{prefix}{i}" for i in range(count)]
        paths = self.paths(body, path, count)
        nics, near = self.nics(body, path, count, constants)
        numa = self.items(body.get("numa"), (*path, "numa")) or [None] * count
        if len(numa) != count:
            raise self.fail((*path, "numa"), f"{len(numa)} NUMA nodes", f"one a device, {count}")
        fabric = body.get("fabric") or boxes.fabric_of(paths)
        if fabric not in ("switch", "mesh", "unknown"):
            raise self.fail((*path, "fabric"), f"{fabric!r}", "switch, mesh or unknown")
        return Box(
            devices=tuple(
                Device(index=i, name=names[i], vendor=vendor, numa=numa[i], nics=near[i])
                for i in range(count)
            ),
            paths=tuple(map(tuple, paths)),
            links=boxes.links_in(paths, lambda kind: constants.get(kind, Link(kind=kind))),
            nics=nics,
            nic_paths=tuple(tuple("PIX" if k in row else "SYS" for k in range(len(nics))) for row in near),
            fabric=fabric,
            degraded=boxes.find_degraded(paths, names, exempt=lambda kind: kind == UNKNOWN),
        )

    def paths(self, body: Mapping[str, Any], path: Path, count: int) -> list[list[str]]:
        rows = body.get("paths")
        if rows is None:
            kind = str(body.get("link", UNKNOWN))
            rows = [[SELF if i == j else kind for j in range(count)] for i in range(count)]
        ok = isinstance(rows, list) and len(rows) == count
        if not ok or any(not isinstance(r, list) or len(r) != count for r in rows):
            raise self.fail((*path, "paths"), "paths of another shape", f"{count} rows of {count} kinds")
        rows = [[str(k) for k in row] for row in rows]
        for i in range(count):
            for j in range(i):
                if rows[i][j] != rows[j][i]:
                    got = f"{rows[j][i]} one way and {rows[i][j]} back between devices {j} and {i}"
                    raise self.fail((*path, "paths"), got, "the same both ways")
        for n, pair in enumerate(self.items(body.get("down"), (*path, "down"))):
            where = (*path, "down", n)
            if not isinstance(pair, list) or len(pair) != 2:
                raise self.fail(where, f"{pair!r}", "a pair of device numbers")
            a, b = (self.whole(d, where) for d in pair)
            if a == b or max(a, b) >= count:
                raise self.fail(where, f"{pair!r}", f"two of the devices 0 to {count - 1}")
            rows[a][b] = rows[b][a] = "SYS"
        return rows

    def nics(
        self, body: Mapping[str, Any], path: Path, count: int, constants: Mapping[str, Link]
    ) -> tuple[tuple[Nic, ...], list[tuple[int, ...]]]:
        found: list[Nic] = []
        near: list[list[int]] = [[] for _ in range(count)]
        for k, value in enumerate(self.items(body.get("nics"), (*path, "nics"))):
            where = (*path, "nics", k)
            nic = self.mapping(value, where, "nic")
            figures = {f: nic[f] for f in _FIELDS["link"] if f in nic}
            link = self.link("nic", figures, where) if figures else constants.get("nic", Link(kind="nic"))
            ports = self.whole(nic.get("ports", 1), (*where, "ports"), 1)
            found.append(
                Nic(name=str(nic.get("name", f"nic{k}")), numa=nic.get("numa"), ports=ports, link=link)
            )
            for d in self.items(nic.get("near"), (*where, "near")):
                if self.whole(d, (*where, "near")) >= count:
                    raise self.fail((*where, "near"), f"device {d}", f"a device from 0 to {count - 1}")
                near[d].append(k)
        return tuple(found), [tuple(row) for row in near]

    def names(self, value: Any, path: Path) -> list[str]:
        parts = value if isinstance(value, list) else [value]
        if not all(isinstance(part, str | int) for part in parts):
            raise self.fail(path, f"{value!r}", "a host list such as n[01-16]")
        try:
            return [n for part in parts for n in hostlist.expand(str(part))]
        except ValueError as err:
            raise self.fail(path, str(err), "a host list such as n[01-16]") from err

    def topology(
        self, body: Mapping[str, Any], constants: Mapping[str, Link], found: Mapping[str, Box]
    ) -> Topology:
        order = {name: i for i, name in enumerate(found)}
        nodes: dict[str, tuple[int, int]] = {}
        for i, value in enumerate(self.items(body.get("nodes"), ("nodes",))):
            entry = self.mapping(value, ("nodes", i), "node")
            name = entry.get("box")
            if name is not None and (not isinstance(name, str) or name not in order):
                raise self.fail(
                    ("nodes", i, "box"), f"box {name!r}", f"one of {', '.join(order) or '(no boxes)'}"
                )
            count = found[name].size if name is not None else -1
            if "devices" in entry:
                count = self.whole(entry["devices"], ("nodes", i, "devices"), 1)
            for node in self.names(entry.get("names"), ("nodes", i, "names")):
                if node in nodes:
                    raise self.fail(("nodes", i, "names"), f"node {node} again", "each node once")
                nodes[node] = (-1 if name is None else order[name], count)
        if not nodes and len(found) == 1:
            plain = box_topology("yaml", next(iter(found.values())))
            return Topology(
                kind="yaml",
                nodes=plain.nodes,
                boxes=plain.boxes,
                box_of=plain.box_of,
                devices_per_node=plain.devices_per_node,
                constants=constants,
            )
        places = np.array(list(nodes.values()), np.int32).reshape(-1, 2)
        return Topology(
            kind="yaml",
            nodes=tuple(nodes),
            boxes=tuple(found.values()),
            box_of=places[:, 0].copy(),
            devices_per_node=places[:, 1].copy(),
            levels=tuple(self.levels(body, list(nodes), constants)),
            network=constants.get("nic"),
            constants=constants,
        )

    def levels(
        self, body: Mapping[str, Any], nodes: list[str], constants: Mapping[str, Link]
    ) -> Iterable[Level]:
        position = {name: i for i, name in enumerate(nodes)}
        for n, value in enumerate(self.items(body.get("levels"), ("levels",))):
            entry = self.mapping(value, ("levels", n), "level")
            groups = self.table(entry.get("groups"), ("levels", n, "groups"))
            member = np.full(len(nodes), -1, np.int32)
            for g, (name, text) in enumerate(groups.items()):
                where = ("levels", n, "groups", name)
                for node in self.names(text, where):
                    if node not in position:
                        raise self.fail(where, f"node {node}", "a node of `nodes`")
                    if member[position[node]] >= 0:
                        raise self.fail(where, f"node {node} in two groups", "one group a node")
                    member[position[node]] = g
            name = str(entry.get("name", f"level{n + 1}"))
            link = constants.get(name)
            if "link" in entry:
                link = self.link(name, entry["link"], ("levels", n, "link"))
            inside = constants.get(f"{name}.inside")
            if "inside" in entry:
                inside = self.link(f"{name}.inside", entry["inside"], ("levels", n, "inside"))
            yield Level(
                name=name, groups=tuple(str(g) for g in groups), member=member, link=link, inside=inside
            )
