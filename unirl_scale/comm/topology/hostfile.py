"""Host files of Open MPI, MPICH, Horovod and DeepSpeed, and plain lists of names."""

from __future__ import annotations

import re

import numpy as np

from unirl_scale.comm.topology import hostlist
from unirl_scale.comm.topology.model import MAX_DEVICES, Note, Topology
from unirl_scale.comm.topology.source import Source

_HOST = r"\[[0-9A-Fa-f:]+\]|[A-Za-z0-9](?:[A-Za-z0-9._\-]|\[[\d,\-]+\])*"
_ENTRY = re.compile(rf"({_HOST})(?::(\d+))?((?:\s+[\w\-]+=\S+)*)\s*\Z")
_HINT = "one host a line: `node01 slots=8`, `node01:8`, or `node01`"


def looks_like(source: Source) -> bool:
    """Every line that is not a comment is one host entry."""
    lines = [line for line in (_strip(t) for t in source.lines) if line]
    return bool(lines) and all(_ENTRY.match(line) and not line.isdecimal() for line in lines)


def looks_damaged(source: Source) -> bool:
    """Host entries for the most part, so that `read` can say which line is none."""
    lines = [line for line in (_strip(t) for t in source.lines) if line]
    return sum(bool(_ENTRY.match(line)) for line in lines) * 2 >= max(len(lines), 2)


def _strip(text: str) -> str:
    return text.split("#", 1)[0].strip()


def read(source: Source) -> Topology:
    """Nodes and, where the file gives slots or repeats a name, devices a node.

    Raises:
        PlanError: a line that is no host entry, slots of 0, or more slots than max_slots.
    """
    slots: dict[str, int] = {}
    stated: set[str] = set()
    for number, raw in enumerate(source.lines, 1):
        text = _strip(raw)
        if not text:
            continue
        match = _ENTRY.match(text)
        if not match:
            raise source.error(number, repr(text[:60]), "a host entry", _HINT)
        options = dict(pair.split("=", 1) for pair in match[3].split())
        count = _count(source, number, match[2], options)
        for name in _hosts(source, number, match[1]):
            if count is not None:
                if name in stated:
                    got = f"{name} with slots again"
                    raise source.error(number, got, "each host once", "add the two numbers, or drop one line")
                stated.add(name)
            slots[name] = slots.get(name, 0) + (1 if count is None else count)
    if not slots:
        raise source.error(1, "only comments", "at least one host", _HINT)
    notes = []
    known = stated or any(n > 1 for n in slots.values())
    if not known:
        notes.append(Note(what="no slots given: devices a node unknown", source=source.name))
    counts = np.fromiter(slots.values(), np.int32, len(slots))
    return Topology(
        kind="hostfile",
        nodes=tuple(slots),
        box_of=np.full(len(slots), -1, np.int32),
        devices_per_node=counts if known else np.full(len(slots), -1, np.int32),
        notes=tuple(notes),
    )


def _count(source: Source, line: int, colon: str | None, options: dict[str, str]) -> int | None:
    texts = [colon, options.get("slots"), options.get("cpu"), options.get("count")]
    numbers = [t for t in texts if t is not None]
    if len(numbers) > 1:
        raise source.error(line, " and ".join(numbers) + " slots", "one number", _HINT)
    if not numbers:
        return None
    if not numbers[0].isdecimal() or not 1 <= int(numbers[0]) <= MAX_DEVICES:
        rule = f"a whole number from 1 to {MAX_DEVICES}"
        raise source.error(line, f"{numbers[0]} slots", rule, "drop the host to leave it out")
    most = options.get("max_slots", options.get("max-slots"))
    if most is not None and most.isdecimal() and int(most) < int(numbers[0]):
        raise source.error(line, f"slots={numbers[0]} over max_slots={most}", "slots <= max_slots", "fix one")
    return int(numbers[0])


def _hosts(source: Source, line: int, text: str) -> list[str]:
    if text.startswith("["):  # an IPv6 address
        return [text[1:-1]]
    try:
        return hostlist.expand(text)
    except ValueError as err:
        raise source.error(line, str(err), "a host or a SLURM host list", _HINT) from err
