"""topograph's cluster model: switches, and blocks of nodes with an accelerator domain."""

from __future__ import annotations

import re
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
    switches = _switches(source, doc, body.get("switches"))
    domains: dict[str, str] = {}
    key = "blocks" if "blocks" in body else "capacity_blocks"
    blocks = body.get(key)
    if not isinstance(blocks, list) or not blocks:
        raise source.error(doc.line(key), f"{key} {blocks!r}", "a list of blocks", "is the file cut?")
    for i, block in enumerate(blocks):
        line = doc.line(key, i)
        if not isinstance(block, dict) or "switch" not in block:
            raise source.error(line, "a block without switch", "`- switch: NAME`", "add its leaf switch")
        nodes = _names(source, line, block.get("nodes"))
        switches.append(Switch(name=str(block["switch"]), line=line, nodes=nodes))
        annotations = block.get("annotations")
        for name, value in annotations.items() if isinstance(annotations, dict) else ():
            if str(name).endswith("/domain"):
                domains.update(dict.fromkeys(nodes, str(value)))
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


def _switches(source: Source, doc: YamlDoc, value: Any) -> list[Switch]:
    if not isinstance(value, dict):
        raise source.error(
            doc.line("switches"), f"switches {value!r}", "a mapping of names", "is the file cut?"
        )
    found = []
    for name, entry in value.items():
        line = doc.line("switches", str(name))
        if not isinstance(entry, dict):
            raise source.error(line, f"{entry!r} as switch {name}", "a mapping", "list its switches or nodes")
        children = _names(source, line, entry.get("switches"))
        nodes = _names(source, line, entry.get("nodes"))
        if children or nodes:
            found.append(Switch(name=str(name), line=line, switches=children, nodes=nodes))
    return found


def _names(source: Source, line: int, value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    try:
        parts = value if isinstance(value, list) else [value]
        return tuple(n for part in parts for n in hostlist.expand(str(part)))
    except ValueError as err:
        raise source.error(line, str(err), "host lists", "is the line cut?") from err
