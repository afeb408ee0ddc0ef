"""Write any topology as our own YAML, for `probe`, for review, and to repair a damaged file by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import yaml

from unirl_scale.comm.topology import hostlist
from unirl_scale.comm.topology.model import Box, Link, Topology
from unirl_scale.comm.topology.native import KEY


def write_yaml(topology: Topology) -> str:
    """The topology as YAML that `read_topology` reads back; notes become comments."""
    body: dict[str, Any] = {KEY: 1}
    figures: dict[str, Link] = {}
    for box in topology.boxes:
        figures.update(box.links)
    for level in topology.levels:
        if level.link is not None:
            figures[level.name] = level.link
        if level.inside is not None:
            figures[f"{level.name}.inside"] = level.inside
    if topology.network is not None:
        figures["nic"] = topology.network
    figures.update(topology.constants)
    if figures:
        body["links"] = {kind: _link(link) for kind, link in sorted(figures.items())}
    if topology.boxes:
        body["boxes"] = {f"box{i}": _box(box) for i, box in enumerate(topology.boxes)}
    if topology.nodes and topology.nodes != ("",):
        body["nodes"] = _nodes(topology)
        body["levels"] = [
            {
                "name": level.name,
                "groups": {
                    group: hostlist.fold([topology.nodes[i] for i in np.flatnonzero(level.member == g)])
                    for g, group in enumerate(level.groups)
                    if (level.member == g).any()
                },
            }
            for level in topology.levels
        ]
        body = {k: v for k, v in body.items() if v != []}
    head = f"# from {topology.kind}\n" + "".join(f"# {note}\n" for note in topology.notes)
    text: str = yaml.safe_dump(body, sort_keys=False, width=110, default_flow_style=None)
    return head + text


def _link(link: Link) -> dict[str, Any]:
    figures = {"alpha_us": link.alpha_us, "beta_gb_per_s": link.beta_gb_per_s, "source": link.source}
    return {k: v for k, v in figures.items() if v is not None}


def _box(box: Box) -> dict[str, Any]:
    body: dict[str, Any] = {
        "vendor": box.devices[0].vendor,
        "devices": [d.name for d in box.devices],
        "fabric": box.fabric,
        "paths": [list(row) for row in box.paths],
    }
    if any(d.numa is not None for d in box.devices):
        body["numa"] = [d.numa for d in box.devices]
    if box.nics:
        body["nics"] = [
            {
                "name": nic.name,
                "ports": nic.ports,
                "near": [i for i, d in enumerate(box.devices) if k in d.nics],
                **({} if nic.numa is None else {"numa": nic.numa}),
                **_link(nic.link),
            }
            for k, nic in enumerate(box.nics)
        ]
    return body


def _nodes(topology: Topology) -> list[dict[str, Any]]:
    out: list[dict[str, Any]] = []
    keys = np.stack([topology.box_of, topology.devices_per_node])
    starts = np.flatnonzero(np.any(np.diff(keys, axis=1) != 0, axis=0)) + 1
    for low, high in zip([0, *starts], [*starts, len(topology.nodes)]):
        entry: dict[str, Any] = {"names": hostlist.fold(topology.nodes[low:high])}
        if topology.box_of[low] >= 0:
            entry["box"] = f"box{topology.box_of[low]}"
        if topology.devices_per_node[low] >= 0:
            entry["devices"] = int(topology.devices_per_node[low])
        out.append(entry)
    return out
