"""Switch trees and blocks, however they were written, checked and turned into levels."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from unirl_scale.comm.topology.model import Level, Note, Topology, node_topology
from unirl_scale.comm.topology.source import Source


@dataclass(frozen=True, slots=True)
class Switch:
    """One switch: its child switches or its nodes."""

    name: str
    line: int
    switches: tuple[str, ...] = ()
    nodes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Block:
    """One base block of a block topology."""

    name: str
    line: int
    nodes: tuple[str, ...]


def natural(name: str) -> tuple[tuple[int, int | str], ...]:
    """Sort key under which n2 comes before n10."""
    return tuple((0, int(p)) if p.isdecimal() else (1, p) for p in re.split(r"(\d+)", name) if p)


def tree_topology(
    source: Source, kind: str, switches: Sequence[Switch], *, printed: bool = False
) -> Topology:
    """Levels from the leaf switches up; nodes in the order of a walk down the tree.

    `printed`: scontrol repeats a switch's nodes at every tier, so nodes beside child switches are normal.

    Raises:
        PlanError: a switch defined twice, undefined, under two parents, in a cycle, with both children and
            nodes, or with neither; a node under two leaves.
    """
    table: dict[str, Switch] = {}
    for switch in switches:
        if switch.name in table:
            got = f"switch {switch.name} again (first on line {table[switch.name].line})"
            raise source.error(switch.line, got, "each switch once", "merge the two lines")
        if not switch.switches and not switch.nodes:
            raise source.error(
                switch.line, f"switch {switch.name} without children", "Switches= or Nodes=", "add one"
            )
        if switch.switches and switch.nodes and not printed:
            got = f"switch {switch.name} with both Switches and Nodes"
            raise source.error(
                switch.line, got, "one of the two", "give the nodes a leaf switch of their own"
            )
        table[switch.name] = switch
    parent = _parents(source, table)
    roots = [s.name for s in switches if s.name not in parent]
    leaves = _walk(source, table, roots)
    nodes, leaf_of = _place(source, [table[leaf] for leaf in leaves])
    notes = []
    if len(roots) > 1:
        what = f"{len(roots)} separate trees ({', '.join(roots[:4])}{', ...' if len(roots) > 4 else ''})"
        notes.append(Note(what=f"{what}: the network between them is not described", source=source.name))
    return node_topology(kind, nodes, _tiers(table, parent, leaves, leaf_of), tuple(notes))


def _parents(source: Source, table: Mapping[str, Switch]) -> dict[str, str]:
    parent: dict[str, str] = {}
    for switch in table.values():
        for child in switch.switches:
            if child not in table:
                got = f"switch {child} under {switch.name}, but no line defines it"
                raise source.error(
                    switch.line, got, "every switch defined", "the file is cut, or the name is wrong"
                )
            if child in parent:
                got = f"switch {child} under {switch.name} and {parent[child]}"
                raise source.error(switch.line, got, "one parent a switch", "give the tree of one plane only")
            parent[child] = switch.name
    return parent


def _walk(source: Source, table: Mapping[str, Switch], roots: Sequence[str]) -> list[str]:
    """Leaf switches, depth first, children in file order."""
    leaves: list[str] = []
    seen: set[str] = set()
    stack = list(reversed(roots))
    while stack:
        name = stack.pop()
        seen.add(name)
        children = table[name].switches
        if children:
            stack.extend(reversed(children))
        else:
            leaves.append(name)
    lost = [s for s in table.values() if s.name not in seen]
    if lost:
        raise source.error(lost[0].line, f"switch {lost[0].name} above itself", "a tree", "break the cycle")
    return leaves


def _place(
    source: Source, leaves: Sequence[Switch]
) -> tuple[tuple[str, ...], np.ndarray[tuple[int], np.dtype[np.int32]]]:
    where: dict[str, int] = {}
    for i, leaf in enumerate(leaves):
        for node in leaf.nodes:
            if node in where:
                got = f"node {node} under {leaf.name} and {leaves[where[node]].name}"
                raise source.error(
                    leaf.line, got, "one leaf switch a node", "give the tree of one plane only"
                )
            where[node] = i
    return tuple(where), np.fromiter(where.values(), np.int32, len(where))


def _tiers(
    table: Mapping[str, Switch],
    parent: Mapping[str, str],
    leaves: Sequence[str],
    leaf_of: np.ndarray[tuple[int], np.dtype[np.int32]],
) -> tuple[Level, ...]:
    """One level a tier, counted from the leaves; a shorter branch keeps its top switch further up."""
    levels = []
    at = list(leaves)
    tier = 1
    while True:
        groups = list(dict.fromkeys(at))
        position = {name: i for i, name in enumerate(groups)}
        member = np.array([position[name] for name in at], np.int32)[leaf_of]
        levels.append(Level(name="leaf" if tier == 1 else f"tier{tier}", groups=tuple(groups), member=member))
        above = [parent.get(name, name) for name in at]
        if above == at:
            return tuple(levels)
        at, tier = above, tier + 1


def block_topology(source: Source, kind: str, blocks: Sequence[Block], sizes: Sequence[int]) -> Topology:
    """Base blocks as level "block", then one level for each larger block size that fits.

    Raises:
        PlanError: a block or node twice, a block without nodes, or sizes that do not grow by powers of two.
    """
    names: dict[str, Block] = {}
    where: dict[str, int] = {}
    for i, block in enumerate(blocks):
        if block.name in names:
            got = f"block {block.name} again (first on line {names[block.name].line})"
            raise source.error(block.line, got, "each block once", "merge the two lines")
        names[block.name] = block
        if not block.nodes:
            raise source.error(block.line, f"block {block.name} without nodes", "Nodes=", "add its nodes")
        for node in block.nodes:
            if node in where:
                got = f"node {node} in {block.name} and {blocks[where[node]].name}"
                raise source.error(block.line, got, "one block a node", "remove it from one")
            where[node] = i
    notes: list[Note] = []
    ordered = sorted(set(sizes))
    line = source.line_of("lockSize", blocks[0].line)
    for size in ordered:
        ratio, rest = divmod(size, ordered[0]) if ordered[0] else (0, 1)
        if rest or ratio & (ratio - 1):
            got = f"block size {size} over a base of {ordered[0]}"
            raise source.error(
                line, got, "the base times a power of two", "see BlockSizes in `man topology.conf`"
            )
    member = np.fromiter(where.values(), np.int32, len(where))
    levels = [Level(name="block", groups=tuple(names), member=member)]
    for size in ordered[1:]:
        joined = size // ordered[0]
        if joined > len(blocks):
            notes.append(
                Note(
                    what=f"block size {size} is larger than the {len(where)} nodes listed", source=source.name
                )
            )
            continue
        groups = tuple(f"{joined}blocks{i}" for i in range(-(-len(blocks) // joined)))
        levels.append(Level(name=f"block{size}", groups=groups, member=(member // joined).astype(np.int32)))
    if ordered:
        for block in blocks:
            if len(block.nodes) < ordered[0]:
                what = (
                    f"block {block.name} has {len(block.nodes)} nodes, fewer than the base size {ordered[0]}"
                )
                notes.append(Note(what=what, source=source.name, line=block.line, severity="degraded"))
    return node_topology(kind, tuple(where), tuple(levels), tuple(notes))
