"""Join what several files say of one machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from unirl_scale.comm.topology.model import UNKNOWN, Box, IntArray, Level, Link, Note, RankMap, Topology
from unirl_scale.core.errors import PlanError


def merge(parts: Sequence[Topology]) -> Topology:
    """Join topologies.

    A host file or rank table says which nodes the job has; switch files say where they hang, and must know
    all of them; a one-box file (nvidia-smi, npu-smi, NCCL XML) describes every node whose inside nothing
    else describes. Link figures of our own YAML win over defaults.

    Raises:
        PlanError: nothing given, or two parts that contradict each other: different nodes, device counts
            or link figures, two rank tables.
    """
    if not parts:
        raise PlanError("topology: got no file; must be at least one; hint: pass --topology FILE")
    if len(parts) == 1:
        return _apply_constants(parts[0])
    notes = [note for part in parts for note in part.notes]
    allocated = [p for p in parts if _has_nodes(p) and (p.ranks is not None or p.kind == "hostfile")]
    placed = [p for p in parts if _has_nodes(p)]
    names = _node_names(allocated, placed, notes)
    alone = [p for p in parts if not _has_nodes(p) and p.boxes]
    box = _one_box([b for p in alone for b in p.boxes])
    counts, boxes, box_of = _insides(names, placed, box, notes)
    ranked = [p for p in parts if p.ranks is not None and _has_nodes(p)]
    if len(ranked) > 1:
        raise PlanError(f"topology: got {len(ranked)} rank tables; must be one; hint: drop all but one")
    return _apply_constants(
        Topology(
            kind="+".join(dict.fromkeys(p.kind for p in parts)),
            nodes=names,
            boxes=boxes,
            box_of=box_of,
            devices_per_node=counts,
            levels=_levels(names, placed),
            network=next((p.network for p in parts if p.network is not None), None),
            ranks=_ranks(names, ranked[0]) if ranked else None,
            constants=_constants(parts),
            notes=tuple(notes),
        )
    )


def _has_nodes(part: Topology) -> bool:
    return bool(part.nodes) and part.nodes != ("",)


def _constants(parts: Sequence[Topology]) -> Mapping[str, Link]:
    found: dict[str, Link] = {}
    for part in parts:
        for kind, link in part.constants.items():
            known = found.get(kind)
            if known and (known.alpha_us, known.beta_gb_per_s) != (link.alpha_us, link.beta_gb_per_s):
                raise PlanError(
                    f"links.{kind}: got {known.beta_gb_per_s} GB/s ({known.source}) and "
                    f"{link.beta_gb_per_s} GB/s ({link.source}); must be one figure; hint: drop one file"
                )
            found[kind] = link
    return found


def with_figures(topology: Topology, figures: Mapping[str, Link]) -> Topology:
    """The topology with these figures in place of the readers' defaults, not of what the operator stated."""
    return _apply_constants(replace(topology, constants={**figures, **topology.constants}))


def _apply_constants(topology: Topology) -> Topology:
    """Put the operator's figures in place of the readers' defaults."""
    given = topology.constants
    if not given:
        return topology
    nic = given.get("nic")

    def box_with(box: Box) -> Box:
        nics = tuple(
            replace(n, link=nic) if nic is not None and n.link.beta_gb_per_s is None else n for n in box.nics
        )
        return replace(box, links={k: given.get(k, link) for k, link in box.links.items()}, nics=nics)

    return replace(
        topology,
        boxes=tuple(box_with(b) for b in topology.boxes),
        levels=tuple(
            replace(lv, link=given.get(lv.name, lv.link), inside=given.get(f"{lv.name}.inside", lv.inside))
            for lv in topology.levels
        ),
        network=nic or topology.network,
    )


def _node_names(
    allocated: Sequence[Topology], placed: Sequence[Topology], notes: list[Note]
) -> tuple[str, ...]:
    """The job's nodes, in the order of the switch tree where there is one."""
    if not placed:
        return ("",)
    trees = [p for p in placed if p.levels]
    if not allocated:
        names = (trees or placed)[0].nodes
    else:
        names = allocated[0].nodes
        for other in allocated[1:]:
            _require_known(names, other.nodes, other.kind)
            _require_known(other.nodes, names, allocated[0].kind)
    for tree in trees:
        _require_known(names, tree.nodes, tree.kind)
    if trees and allocated:
        wanted = set(names)
        ordered = tuple(n for n in trees[0].nodes if n in wanted)
        if len(trees[0].nodes) > len(ordered):
            what = f"{len(ordered)} of the {len(trees[0].nodes)} nodes in {trees[0].kind} belong to the job"
            notes.append(Note(what=what))
        return ordered
    return names


def _require_known(names: Sequence[str], known: Sequence[str], kind: str) -> None:
    have = set(known)
    lost = [n for n in names if n not in have]
    if lost:
        shown = ", ".join(lost[:5]) + (f" and {len(lost) - 5} more" if len(lost) > 5 else "")
        near = next((k for k in known if k.split(".")[0] == lost[0].split(".")[0]), None)
        hint = (
            f"{near} looks like {lost[0]}; use one spelling" if near else "give the file of the same cluster"
        )
        raise PlanError(
            f"topology: got nodes {shown} that {kind} does not list; must be listed; hint: {hint}"
        )


def _one_box(boxes: Sequence[Box]) -> Box | None:
    """The one machine that all box-only files describe."""
    if not boxes:
        return None
    first = boxes[0]
    for other in boxes[1:]:
        if other.size != first.size:
            raise PlanError(
                f"topology: got boxes of {first.size} and {other.size} devices; must be one machine; "
                "hint: name the nodes of each in a topology YAML"
            )
        first = _join_boxes(first, other)
    return first


def _join_boxes(a: Box, b: Box) -> Box:
    """Fill what one view does not know from the other."""
    paths = []
    for i, (row_a, row_b) in enumerate(zip(a.paths, b.paths)):
        row = []
        for j, (x, y) in enumerate(zip(row_a, row_b)):
            slow = {"PIX", "PXB", "PHB", "NODE", "SYS"}
            if UNKNOWN not in (x, y) and x != y and not (x in slow and y in slow):
                raise PlanError(
                    f"topology: got {x} and {y} between devices {i} and {j}; must agree; "
                    "hint: the two files come from different machines or times"
                )
            row.append(y if x == UNKNOWN else x)
        paths.append(tuple(row))
    nics, rows = (a.nics, a.nic_paths) if len(a.nics) >= len(b.nics) else (b.nics, b.nic_paths)
    if len(a.nics) == len(b.nics):
        nics = tuple(x if x.link.beta_gb_per_s is not None else y for x, y in zip(a.nics, b.nics))
    near = a if len(a.nics) >= len(b.nics) else b
    devices = tuple(
        replace(
            d,
            vendor=d.vendor if d.vendor != "unknown" else e.vendor,
            numa=d.numa if d.numa is not None else e.numa,
            cpus=d.cpus or e.cpus,
            busid=d.busid or e.busid,
            nics=near.devices[i].nics,
        )
        for i, (d, e) in enumerate(zip(a.devices, b.devices))
    )
    return Box(
        devices=devices,
        paths=tuple(paths),
        links={
            **b.links,
            **{k: v for k, v in a.links.items() if v.beta_gb_per_s is not None or k not in b.links},
        },
        nics=nics,
        nic_paths=rows,
        fabric=a.fabric if a.fabric != "unknown" else b.fabric,
        degraded={**b.degraded, **a.degraded},
    )


def _insides(
    names: tuple[str, ...], placed: Sequence[Topology], box: Box | None, notes: list[Note]
) -> tuple[IntArray, tuple[Box, ...], IntArray]:
    counts = np.full(len(names), -1, np.int32)
    box_of = np.full(len(names), -1, np.int32)
    found: list[Box] = []
    position = {name: i for i, name in enumerate(names)}
    for part in placed:
        for n, name in enumerate(part.nodes):
            i, count = position.get(name, -1), int(part.devices_per_node[n])
            if i < 0 or count < 0:
                continue
            if counts[i] not in (-1, count):
                raise PlanError(
                    f"topology: got {counts[i]} and {count} devices on node {name}; must agree; "
                    "hint: correct the slots in the host file"
                )
            counts[i] = count
    for part in placed:
        offset = len(found)
        found.extend(part.boxes)
        for n, name in enumerate(part.nodes):
            i = position.get(name, -1)
            if i >= 0 and part.box_of[n] >= 0 and (box_of[i] < 0 or _knows_more(part.boxes[part.box_of[n]])):
                box_of[i] = offset + part.box_of[n]
    if box is None:
        return counts, tuple(found), box_of
    bare = np.array([b < 0 or not _knows_more(found[b]) for b in box_of])
    wrong = bare & (counts > box.size)
    if wrong.any():
        i = int(np.argmax(wrong))
        raise PlanError(
            f"topology: got {counts[i]} devices on node {names[i] or '(the node)'}, but the box file "
            f"has {box.size}; must be at most as many; "
            "hint: correct the slots, or give the box file of this kind of node"
        )
    fewer = bare & (counts > 0) & (counts < box.size)
    if fewer.any():
        notes.append(Note(what=f"{int(fewer.sum())} nodes use fewer devices than their box has"))
    box_of[bare] = len(found)
    counts[bare & (counts < 0)] = box.size
    return counts, (*found, box), box_of


def _knows_more(box: Box) -> bool:
    """Whether any path inside is known; a rank table's box has names only."""
    return box.size == 1 or any(
        k != UNKNOWN for i, row in enumerate(box.paths) for j, k in enumerate(row) if i != j
    )


def _levels(names: tuple[str, ...], placed: Sequence[Topology]) -> tuple[Level, ...]:
    """Levels of every part on the job's nodes, finest first, one of each name."""
    found: dict[str, Level] = {}
    for part in placed:
        position = {name: i for i, name in enumerate(part.nodes)}
        index = np.array([position.get(name, -1) for name in names], np.int64)
        for level in part.levels:
            member = np.where(index >= 0, level.member[index], -1)
            used = np.unique(member[member >= 0])
            renumber = np.full(len(level.groups) + 1, -1, np.int32)
            renumber[used] = np.arange(len(used), dtype=np.int32)
            groups = tuple(level.groups[g] for g in used)
            found.setdefault(level.name, replace(level, groups=groups, member=renumber[member]))
    return tuple(sorted(found.values(), key=lambda lv: -len(lv.groups)))


def _ranks(names: tuple[str, ...], part: Topology) -> RankMap:
    assert part.ranks is not None
    position = {name: i for i, name in enumerate(names)}
    moved = np.array([position[name] for name in part.nodes], np.int32)
    return replace(part.ranks, node=moved[part.ranks.node])
