"""topograph's cluster model: switches, and blocks of nodes with an accelerator domain."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from unirl_scale.comm.topology import hostlist
from unirl_scale.comm.topology.documents import YamlDoc, read_yaml
from unirl_scale.comm.topology.model import Level, Topology
from unirl_scale.comm.topology.slurm_levels import Switch, tree_topology
from unirl_scale.comm.topology.source import Source


def looks_like(source: Source) -> bool:
    """`switches:` and `blocks:` at the start of a line."""
    return bool(re.search(r"^switches:", source.text, re.MULTILINE)) and bool(
        re.search(r"^(blocks|capacity_blocks):", source.text, re.MULTILINE)
    )


def read(source: Source) -> Topology:
    """Switches into levels; blocks that name an accelerator domain into a level "block" below them.

    Raises:
        PlanError: a malformed entry, or switches that form no tree.
    """
    doc = read_yaml(source)
    body = doc.value if isinstance(doc.value, dict) else {}
    switches, leaf_of_block = _switches(source, doc, body.get("switches"))
    domains: dict[str, str] = {}
    leaves: dict[str, tuple[int, list[str]]] = {}
    key = "blocks" if "blocks" in body else "capacity_blocks"
    blocks = body.get(key)
    if not isinstance(blocks, list) or not blocks:
        raise source.error(doc.line(key), f"{key} {blocks!r}", "a list of blocks", "is the file cut?")
    for i, block in enumerate(blocks):
        line = doc.line(key, i)
        leaf = _leaf(block, leaf_of_block)
        if leaf is None:
            raise source.error(line, "a block under no switch", "`switch: NAME`", "name its leaf switch")
        nodes = _names(source, line, block.get("nodes"))
        leaves.setdefault(leaf, (line, []))[1].extend(nodes)
        if _domain(block):
            domains.update(dict.fromkeys(nodes, _domain(block)))
    switches += [Switch(name=n, line=line, nodes=tuple(nodes)) for n, (line, nodes) in leaves.items()]
    tree = tree_topology(source, "topograph", switches)
    if not domains:
        return tree
    position = {name: i for i, name in enumerate(dict.fromkeys(domains.values()))}
    member = np.array([position[domains[n]] if n in domains else -1 for n in tree.nodes], np.int32)
    return Topology(
        kind="topograph",
        nodes=tree.nodes,
        box_of=tree.box_of,
        devices_per_node=tree.devices_per_node,
        levels=(Level(name="block", groups=tuple(position), member=member), *tree.levels),
        notes=tree.notes,
    )


def _leaf(block: Any, leaf_of_block: Mapping[str, str]) -> str | None:
    """The leaf switch a block names, or the one that names the block."""
    if not isinstance(block, dict):
        return None
    return str(block["switch"]) if "switch" in block else leaf_of_block.get(str(block.get("name")))


def _domain(block: Mapping[str, Any]) -> str:
    """The accelerator domain: an annotation that ends in /domain, or the older `nvlink` field."""
    annotations = block.get("annotations")
    for name, value in annotations.items() if isinstance(annotations, dict) else ():
        if str(name).endswith("/domain"):
            return str(value)
    return str(block["nvlink"]) if block.get("nvlink") else ""


def _switches(source: Source, doc: YamlDoc, value: Any) -> tuple[list[Switch], dict[str, str]]:
    """Switches above the blocks, and the leaf of each block that a leaf lists; a mapping or a list."""
    entries: list[tuple[str, int, Any]] = []
    if isinstance(value, dict):
        entries = [(str(name), doc.line("switches", str(name)), entry) for name, entry in value.items()]
    elif isinstance(value, list):
        named = [(i, e) for i, e in enumerate(value) if isinstance(e, dict) and "name" in e]
        entries = [(str(e["name"]), doc.line("switches", i), e) for i, e in named]
    if not entries:
        raise source.error(doc.line("switches"), f"switches {value!r}", "named switches", "is the file cut?")
    found = []
    leaf_of_block: dict[str, str] = {}
    for name, line, entry in entries:
        if not isinstance(entry, dict):
            raise source.error(line, f"{entry!r} as switch {name}", "a mapping", "list its switches or nodes")
        blocks = entry.get("capacity_blocks") or entry.get("blocks") or []
        leaf_of_block.update({str(b): name for b in blocks} if isinstance(blocks, list) else {})
        children = _names(source, line, entry.get("switches"))
        nodes = _names(source, line, entry.get("nodes"))
        if children or nodes:
            found.append(Switch(name=name, line=line, switches=children, nodes=nodes))
    return found, leaf_of_block


def _names(source: Source, line: int, value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    try:
        parts = value if isinstance(value, list) else [value]
        return tuple(n for part in parts for n in hostlist.expand(str(part)))
    except ValueError as err:
        raise source.error(line, str(err), "host lists", "is the line cut?") from err
