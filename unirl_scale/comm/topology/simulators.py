"""Network descriptions of a simulator and a synthesizer: ASTRA-sim and TACCL."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from unirl_scale.comm.topology.documents import YamlDoc, read_json, read_yaml
from unirl_scale.comm.topology.model import (
    MAX_DEVICES,
    MAX_NODES,
    SELF,
    UNKNOWN,
    Box,
    Device,
    Level,
    Link,
    Note,
    Topology,
)
from unirl_scale.comm.topology.source import Source

_SHAPES: dict[str, Literal["switch", "mesh", "unknown"]] = {
    "switch": "switch",
    "fullyconnected": "mesh",
    "ring": "unknown",
}


def looks_like_astra(source: Source) -> bool:
    """An ASTRA-sim analytical network file (YAML) or its logical-dims JSON."""
    if source.text.lstrip().startswith("{"):
        return '"logical-dims"' in source.text
    return bool(re.search(r"^\s*npus_count\s*:", source.text, re.MULTILINE))


def read_astra(source: Source) -> Topology:
    """Dimension 0 becomes the box, the others node counts and levels; `tbd` stays unknown.

    Raises:
        PlanError: dimensions of different counts, an unknown shape, or a figure that is no number.
    """
    if source.text.lstrip().startswith("{"):
        sizes = _sizes(source, read_json(source, dict).get("logical-dims"), "logical-dims", 1)
        shape_only = Note(what="logical dimensions only: no bandwidth or latency", source=source.name)
        return _dimensions(
            "astra-sim-logical", sizes, ["unknown"] * len(sizes), [Link(kind="")] * len(sizes), (shape_only,)
        )
    doc = read_yaml(source)
    body = doc.value if isinstance(doc.value, dict) else {}
    sizes = _sizes(source, body.get("npus_count"), "npus_count", doc.line("npus_count"))
    columns: dict[str, Sequence[Any]] = {}
    for key in ("topology", "bandwidth", "latency"):
        value = body.get(key)
        if not isinstance(value, list) or len(value) != len(sizes):
            got = f"{key} of {len(value) if isinstance(value, list) else value!r}"
            raise source.error(
                doc.line(key), got, f"a list of {len(sizes)}, as npus_count", "fix one of the two"
            )
        columns[key] = value
    shapes = []
    for shape in columns["topology"]:
        if str(shape).lower() not in _SHAPES:
            raise source.error(
                doc.line("topology"), f"{shape!r}", "Ring, Switch or FullyConnected", "fix the name"
            )
        shapes.append(str(shape).lower())
    links = [
        Link(
            kind=f"dim{i}",
            alpha_us=_scaled(source, doc, "latency", columns["latency"][i], 1e-3),
            beta_gb_per_s=_scaled(source, doc, "bandwidth", columns["bandwidth"][i], 1.0),
            source=f"{source.name}, dimension {i}",
        )
        for i in range(len(sizes))
    ]
    unknown = [i for i, link in enumerate(links) if link.beta_gb_per_s is None]
    notes = tuple(Note(what=f"bandwidth of dimension {i} unknown", source=source.name) for i in unknown)
    return _dimensions("astra-sim", sizes, shapes, links, notes)


def _sizes(source: Source, value: Any, key: str, line: int) -> list[int]:
    ok = isinstance(value, list) and value and all(re.fullmatch(r"[1-9]\d{0,11}", str(v)) for v in value)
    if not ok:
        raise source.error(
            line, f"{key} {value!r}", "a list of whole numbers from 1", "write the size of each dimension"
        )
    sizes = [int(v) for v in value]
    if sizes[0] > MAX_DEVICES or math.prod(sizes[1:]) > MAX_NODES:
        rule = f"at most {MAX_DEVICES} in the first dimension and {MAX_NODES} in the others together"
        raise source.error(line, f"{key} {sizes}", rule, "fix the size that is too large")
    return sizes


def _scaled(source: Source, doc: YamlDoc, key: str, value: Any, scale: float) -> float | None:
    if str(value).lower() in ("tbd", "unknown", "none", "?"):
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e12:
        raise source.error(doc.line(key), f"{value!r}", "a positive number or tbd", "fix the figure")
    return float(value) * scale or None


def _dimensions(
    kind: str, sizes: Sequence[int], shapes: Sequence[str], links: Sequence[Link], notes: tuple[Note, ...]
) -> Topology:
    size, nodes = sizes[0], math.prod(sizes[1:])

    def path(i: int, j: int) -> str:
        if i == j:
            return SELF
        ring = shapes[0] == "ring" and (i - j) % size not in (1, size - 1)
        return UNKNOWN if ring or not links[0].kind else links[0].kind

    box = Box(
        devices=tuple(Device(index=i, name=f"NPU{i}") for i in range(size)),
        paths=tuple(tuple(path(i, j) for j in range(size)) for i in range(size)),
        links={links[0].kind: links[0]} if links[0].kind and size > 1 else {},
        fabric=_SHAPES.get(shapes[0], "unknown"),
    )
    index = np.arange(nodes, dtype=np.int32)
    spans = [math.prod(sizes[1 : d + 1]) for d in range(1, len(sizes))]
    levels = tuple(
        Level(
            name=f"dim{d}",
            groups=tuple(f"dim{d}.{g}" for g in range(nodes // span)),
            member=(index // span).astype(np.int32),
            link=links[d] if links[d].kind else None,
        )
        for d, span in enumerate(spans, 1)
    )
    return Topology(
        kind=kind,
        nodes=tuple(f"node{i}" for i in range(nodes)),
        boxes=(box,),
        box_of=np.zeros(nodes, np.int32),
        devices_per_node=np.full(nodes, size, np.int32),
        levels=levels,
        network=levels[0].link if levels else None,
        notes=notes,
    )


def looks_like_taccl(source: Source) -> bool:
    """TACCL's JSON of alphas, betas and GPUs a node."""
    return source.text.lstrip().startswith("{") and '"gpus_per_node"' in source.text


def read_taccl(source: Source) -> Topology:
    """One box. Rates only where the file's own numbers agree that beta is microseconds a megabyte.

    Raises:
        PlanError: a missing field.
    """
    body = read_json(source, dict)
    count = body.get("gpus_per_node")
    if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= MAX_DEVICES:
        rule = f"a whole number from 1 to {MAX_DEVICES}"
        raise source.error(source.line_of("gpus_per_node"), f"gpus_per_node {count!r}", rule, "fix it")
    per_mb = "1MB" in str(body.get("name", ""))
    notes = []
    if not per_mb:
        what = "betas are not for 1 MB messages and their unit is not stated; rates left unknown"
        notes.append(Note(what=what, source=source.name, line=source.line_of("beta")))
    listed = body.get("node_betas_list")
    betas = [b for b in (listed if isinstance(listed, list) else []) if isinstance(b, int | float) and b > 0]
    inside = _taccl_link(source, "intra", body.get("alpha"), min(betas, default=None), per_mb)
    outside = _taccl_link(source, "nic", body.get("remote_alpha"), body.get("remote_beta"), per_mb)
    if len(set(betas)) > 1:
        what = f"{len(set(betas))} link classes and no map of which pair has which; pairs left unknown"
        notes.append(Note(what=what, source=source.name, line=source.line_of("node_betas_list")))
    plain = _dimensions(
        "taccl",
        [count, 1],
        ["unknown", "unknown"],
        [inside if len(set(betas)) == 1 else Link(kind=""), outside],
        tuple(notes),
    )
    return Topology(
        kind="taccl",
        nodes=("",),
        boxes=plain.boxes,
        box_of=plain.box_of,
        devices_per_node=plain.devices_per_node,
        network=outside,
        notes=tuple(notes),
    )


def _taccl_link(source: Source, kind: str, alpha: Any, beta: Any, per_mb: bool) -> Link:
    known = all(isinstance(f, int | float) and 0 <= f < 1e9 for f in (alpha, beta))
    if not per_mb or not known or not beta:
        return Link(kind=kind)
    text = f"{source.name}: {alpha} us + {beta} us a megabyte"
    return Link(kind=kind, alpha_us=float(alpha), beta_gb_per_s=round(1e3 / beta, 4), source=text)
