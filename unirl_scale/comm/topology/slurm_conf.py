"""SLURM `topology.conf` (tree and block) and what `scontrol show topology` prints of it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from unirl_scale.comm.topology import hostlist
from unirl_scale.comm.topology.model import Topology
from unirl_scale.comm.topology.slurm_levels import Block, Switch, block_topology, tree_topology
from unirl_scale.comm.topology.source import Source

_KEYS = {
    "switchname",
    "switches",
    "nodes",
    "linkspeed",
    "level",
    "blockname",
    "blocksizes",
    "blocksize",
    "blockindex",
    "aggregatedblock",
}
_PAIR = re.compile(r'([A-Za-z_]+)\s*=\s*("[^"]*"|\S+)')
_HINT = "see `man topology.conf`"


def looks_like(source: Source) -> bool:
    """A line that starts with SwitchName=, BlockName= or BlockSizes=, whatever the case."""
    return any(
        re.match(r"\s*(SwitchName|BlockName|BlockSizes|AggregatedBlock)\s*=", line, re.IGNORECASE)
        for line in source.lines
    )


@dataclass(slots=True)
class _Parsed:
    switches: list[Switch] = field(default_factory=list)
    blocks: list[Block] = field(default_factory=list)
    sizes: tuple[int, ...] = ()
    printed: bool = False  # scontrol output rather than a configuration file


def read(source: Source) -> Topology:
    """Read switches into levels (leaf first), or blocks into block levels.

    Raises:
        PlanError: an unknown key, a switch or node defined twice or not at all, a cycle, switches and
            blocks together, a bad host list, or block sizes that do not double.
    """
    parsed = _Parsed()
    for line, record in _records(source):
        _take(source, parsed, line, record)
    if parsed.switches and parsed.blocks:
        got = f"switches (line {parsed.switches[0].line}) and blocks together"
        raise source.error(parsed.blocks[0].line, got, "a tree or blocks", "keep one of the two in this file")
    kind = "scontrol" if parsed.printed else "slurm-conf"
    if parsed.blocks:
        return block_topology(source, f"{kind}-block", parsed.blocks, parsed.sizes)
    if not parsed.switches:
        raise source.error(1, "no switch and no block", "SwitchName= or BlockName= lines", _HINT)
    return tree_topology(source, f"{kind}-tree", parsed.switches, printed=parsed.printed)


def _records(source: Source) -> Iterator[tuple[int, dict[str, str]]]:
    """Key -> value of each logical line: comments dropped, a trailing backslash joins lines."""
    pending, first = "", 0
    for number, raw in enumerate(source.lines, 1):
        text = raw.split("#", 1)[0].rstrip()
        first = first or number
        if text.endswith("\\"):
            pending += text[:-1] + " "
            continue
        text, line, pending, first = pending + text, first, "", 0
        if not text.strip():
            continue
        pairs = _PAIR.findall(text)
        left = _PAIR.sub("", text).strip()
        if left or not pairs:
            included = left.lower().startswith("include")
            hint = "give the included file as well as this one, without the line" if included else _HINT
            raise source.error(line, repr((left or text).strip()[:40]), "Key=Value pairs", hint)
        record: dict[str, str] = {}
        for key, value in pairs:
            if key.lower() not in _KEYS:
                hint = "this looks like slurm.conf; give topology.conf" if key[0].isupper() else _HINT
                raise source.error(
                    line, f"key {key}", "SwitchName, Switches, Nodes, LinkSpeed or Block*", hint
                )
            if key.lower() in record:
                raise source.error(line, f"{key} twice", "each key once a line", "split the line")
            record[key.lower()] = value.strip('"')
        yield line, record


def _take(source: Source, parsed: _Parsed, line: int, record: dict[str, str]) -> None:
    if "level" in record or "blockindex" in record or "aggregatedblock" in record:
        parsed.printed = True
    if "switchname" in record:
        parsed.switches.extend(
            Switch(
                name=name,
                line=line,
                switches=_names(source, line, record.get("switches")),
                nodes=_names(source, line, record.get("nodes")),
            )
            for name in _names(source, line, record["switchname"])
        )
    elif "blockname" in record:
        nodes = _names(source, line, record.get("nodes"))
        parsed.blocks.extend(
            Block(name=name, line=line, nodes=nodes) for name in _names(source, line, record["blockname"])
        )
        if "blocksize" in record:
            parsed.sizes = (*parsed.sizes, *_sizes(source, line, record["blocksize"]))
    elif "aggregatedblock" in record:
        parsed.sizes = (*parsed.sizes, *_sizes(source, line, record.get("blocksize", "")))
    elif "blocksizes" in record:
        parsed.sizes = _sizes(source, line, record["blocksizes"])
    else:
        raise source.error(line, f"{next(iter(record))} without a name", "SwitchName= or BlockName=", _HINT)


def _names(source: Source, line: int, text: str | None) -> tuple[str, ...]:
    if text is None or text.lower() == "(null)":
        return ()
    try:
        return tuple(hostlist.expand(text))
    except ValueError as err:
        raise source.error(line, str(err), "a host list such as n[01-16,20]", "is the line cut?") from err


def _sizes(source: Source, line: int, text: str) -> tuple[int, ...]:
    if not re.fullmatch(r"\d+(,\d+)*", text):
        raise source.error(line, f"block sizes {text!r}", "whole numbers such as 4,8,16", _HINT)
    return tuple(int(n) for n in text.split(","))
