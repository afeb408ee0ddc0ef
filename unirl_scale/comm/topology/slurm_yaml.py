"""SLURM `topology.yaml`: tree, block, flat, ring and torus3d."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from unirl_scale.comm.topology import hostlist
from unirl_scale.comm.topology.documents import YamlDoc, read_yaml
from unirl_scale.comm.topology.model import MAX_NODES, Level, Note, Topology, node_topology
from unirl_scale.comm.topology.slurm_levels import Block, Switch, block_topology, tree_topology
from unirl_scale.comm.topology.source import Source

_PLUGINS = ("tree", "block", "flat", "ring", "torus3d")
_HINT = "see `man topology.yaml`"


def looks_like(source: Source) -> bool:
    """A YAML list of mappings with a `topology:` key."""
    return any(line.lstrip().startswith(("- topology:", "-  topology:")) for line in source.lines)


def read(source: Source, name: str | None = None) -> Topology:
    """Read one topology of the file: `name`, else the cluster default, else the only one.

    Raises:
        PlanError: no such topology, several without a default, or a malformed entry.
    """
    doc = read_yaml(source)
    entries = doc.value if isinstance(doc.value, list) else []
    if not entries or not all(isinstance(e, dict) and "topology" in e for e in entries):
        raise source.error(1, "no list of topologies", "`- topology: NAME` entries", _HINT)
    at = _choose(source, doc, entries, name)
    entry = entries[at]
    plugins = [p for p in _PLUGINS if p in entry]
    if len(plugins) != 1:
        got = f"topology {entry['topology']} with {' and '.join(plugins) or 'no plugin'}"
        raise source.error(doc.line(at), got, f"one of {', '.join(_PLUGINS)}", _HINT)
    plugin, body = plugins[0], entry[plugins[0]]
    reader = _Reader(source, doc, (at, plugin))
    others = [str(e["topology"]) for i, e in enumerate(entries) if i != at]
    topology = reader.read(plugin, body if isinstance(body, dict) else {})
    if others:
        what = f"read topology {entry['topology']}; the file also has {', '.join(others)}"
        note = Note(what=what, source=source.name, line=doc.line(at))
        return Topology(
            kind=topology.kind,
            nodes=topology.nodes,
            box_of=topology.box_of,
            devices_per_node=topology.devices_per_node,
            levels=topology.levels,
            notes=(*topology.notes, note),
        )
    return topology


def _choose(source: Source, doc: YamlDoc, entries: Sequence[dict[str, Any]], name: str | None) -> int:
    if name is not None:
        found = [i for i, e in enumerate(entries) if str(e["topology"]) == name]
        if not found:
            legal = ", ".join(str(e["topology"]) for e in entries)
            raise source.error(1, f"no topology {name!r}", f"one of {legal}", "check the name")
        return found[0]
    default = [i for i, e in enumerate(entries) if e.get("cluster_default") is True]
    if len(default) > 1:
        raise source.error(doc.line(default[1]), "a second cluster_default", "one default", "keep one")
    if default:
        return default[0]
    if len(entries) > 1:
        raise source.error(
            1, f"{len(entries)} topologies without cluster_default: true", "one default", "mark one"
        )
    return 0


class _Reader:
    """Reads one topology's body; knows the file and where in it the body starts."""

    def __init__(self, source: Source, doc: YamlDoc, path: tuple[str | int, ...]) -> None:
        self.source, self.doc, self.path = source, doc, path

    def read(self, plugin: str, body: dict[str, Any]) -> Topology:
        """Dispatch on the plugin."""
        if plugin == "tree":
            return self._tree(body)
        if plugin == "block":
            return self._block(body)
        if plugin == "ring":
            return self._groups(body, "rings", "ring", "ring")
        if plugin == "torus3d":
            return self._groups(body, "toruses", "name", "torus")
        note = Note(what="flat: SLURM knows no network distances here", source=self.source.name)
        return node_topology("slurm-yaml-flat", (), (), (note,))

    def _tree(self, body: dict[str, Any]) -> Topology:
        switches = []
        for i, item in enumerate(self._items(body, "switches", "switch")):
            line = self.doc.line(*self.path, "switches", i)
            children = self._names(item.get("children"), line)
            switches.append(
                Switch(
                    name=str(item["switch"]),
                    line=line,
                    switches=children,
                    nodes=self._names(item.get("nodes"), line),
                )
            )
        return tree_topology(self.source, "slurm-yaml-tree", switches)

    def _block(self, body: dict[str, Any]) -> Topology:
        blocks = []
        for i, item in enumerate(self._items(body, "blocks", "block")):
            line = self.doc.line(*self.path, "blocks", i)
            blocks.append(
                Block(name=str(item["block"]), line=line, nodes=self._names(item.get("nodes"), line))
            )
        sizes = body.get("block_sizes") or []
        if not isinstance(sizes, list) or not all(isinstance(s, int) and s > 0 for s in sizes):
            line = self.doc.line(*self.path, "block_sizes")
            raise self.source.error(line, f"block_sizes {sizes!r}", "a list of whole numbers", _HINT)
        return block_topology(self.source, "slurm-yaml-block", blocks, sizes)

    def _groups(self, body: dict[str, Any], key: str, label: str, level: str) -> Topology:
        blocks = []
        for i, item in enumerate(self._items(body, key, label)):
            line = self.doc.line(*self.path, key, i)
            nodes = self._names(item.get("nodes"), line)
            volume = self._volume(item["dims"], line) if item.get("dims") else len(nodes)
            if volume != len(nodes):
                got = f"{len(nodes)} nodes in a torus of {volume}"
                raise self.source.error(line, got, "one node a place", "fix dims or nodes")
            blocks.append(Block(name=str(item[label]), line=line, nodes=nodes))
        plain = block_topology(self.source, f"slurm-yaml-{level}", blocks, ())
        base = plain.levels[0]
        renamed = Level(name=level, groups=base.groups, member=base.member)
        return node_topology(plain.kind, plain.nodes, (renamed,), plain.notes)

    def _volume(self, dims: Any, line: int) -> int:
        sizes = list(dims.values()) if isinstance(dims, dict) else []
        if not sizes or not all(isinstance(size, int) and 0 < size <= MAX_NODES for size in sizes):
            raise self.source.error(line, f"dims {dims!r}", "whole numbers such as {x: 4, y: 4, z: 2}", _HINT)
        return math.prod(sizes)

    def _items(self, body: dict[str, Any], key: str, label: str) -> list[dict[str, Any]]:
        items = body.get(key)
        if not isinstance(items, list) or not items:
            raise self.source.error(self.doc.line(*self.path), f"no {key}", f"a list {key}", _HINT)
        for i, item in enumerate(items):
            if not isinstance(item, dict) or label not in item:
                line = self.doc.line(*self.path, key, i)
                raise self.source.error(
                    line, f"an entry of {key} without {label}", f"`- {label}: NAME`", _HINT
                )
        return items

    def _names(self, text: Any, line: int) -> tuple[str, ...]:
        if text is None:
            return ()
        try:
            return tuple(
                n for part in (text if isinstance(text, list) else [text]) for n in hostlist.expand(str(part))
            )
        except ValueError as err:
            raise self.source.error(
                line, str(err), "a host list such as n[01-16]", "is the line cut?"
            ) from err
