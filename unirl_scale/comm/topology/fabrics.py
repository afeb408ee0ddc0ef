"""Switch fabrics of packet simulators: htsim `.topo` files and ns-3 link lists."""

from __future__ import annotations

import re
from collections import defaultdict

import numpy as np

from unirl_scale.comm.topology.model import MAX_NODES, Level, Link, Note, Topology
from unirl_scale.comm.topology.source import Source

_NUMBER = r"\d{1,12}(?:\.\d*)?"
_RATE = re.compile(rf"({_NUMBER})\s*([KMGT]?)bps\Z", re.IGNORECASE)
_DELAY = re.compile(rf"({_NUMBER})\s*(ns|us|ms|s)\Z")
_SCALE = {"": 1e-9, "K": 1e-6, "M": 1e-3, "G": 1.0, "T": 1e3}
_MICROSECONDS = {"ns": 1e-3, "us": 1.0, "ms": 1e3, "s": 1e6}


def looks_like_htsim(source: Source) -> bool:
    """`Nodes N` and `Tiers T` lines."""
    return bool(re.search(r"^Nodes\s+\d+", source.text, re.M)) and bool(
        re.search(r"^Tiers\s+\d+", source.text, re.M)
    )


def read_htsim(source: Source) -> Topology:
    """A fat tree: leaf groups of tier 0's Radix_Down, then pods, then the top.

    Raises:
        PlanError: fewer tiers than stated (a cut file), or hosts that do not fill the leaves.
    """
    head: dict[str, float] = {}
    tiers: list[dict[str, float]] = []
    for number, raw in enumerate(source.lines, 1):
        words = raw.split("#", 1)[0].split()
        if not words:
            continue
        if len(words) != 2 or not re.fullmatch(_NUMBER, words[1]):
            raise source.error(
                number, repr(raw.strip()[:40]), "`Key number`", "see the htsim fat-tree format"
            )
        if words[0] == "Tier":
            if float(words[1]) != len(tiers):
                raise source.error(number, f"tier {words[1]}", f"tier {len(tiers)}", "tiers come in order")
            tiers.append({})
        else:
            (tiers[-1] if tiers else head)[words[0]] = float(words[1])
    if len(tiers) != int(head.get("Tiers", 0)):
        got = f"{len(tiers)} tiers of {int(head.get('Tiers', 0))}"
        raise source.error(len(source.lines), got, "every tier", "the file is cut; copy it again")
    nodes = int(head.get("Nodes", 0))
    if nodes > MAX_NODES:
        raise source.error(
            source.line_of("Nodes"), f"Nodes {nodes}", f"at most {MAX_NODES}", "fix the number"
        )
    per_leaf = int(tiers[0].get("Radix_Down", 0)) if tiers else 0
    pod = int(head.get("Podsize", nodes))
    for name, per in (("Radix_Down", per_leaf), ("Podsize", pod)):
        if per < 1 or nodes % per:
            raise source.error(
                source.line_of(name), f"{name} {per} for {nodes} nodes", "a divisor", "fix one"
            )
    index = np.arange(nodes, dtype=np.int32)
    levels = [
        Level(
            name=name,
            groups=tuple(f"{name}{g}" for g in range(nodes // per)),
            member=(index // per).astype(np.int32),
            link=_tier_link(source, tiers, t),
        )
        for t, (name, per) in enumerate((("leaf", per_leaf), ("pod", pod)))
        if t < len(tiers)
    ]
    return Topology(
        kind="htsim",
        nodes=tuple(f"host{i}" for i in range(nodes)),
        box_of=np.full(nodes, -1, np.int32),
        devices_per_node=np.full(nodes, -1, np.int32),
        levels=tuple(levels),
        network=levels[0].link if levels else None,
    )


def _tier_link(source: Source, tiers: list[dict[str, float]], tier: int) -> Link:
    speed = tiers[tier].get("Downlink_speed_Gbps")
    latency = tiers[tier].get("Downlink_Latency_ns")
    return Link(
        kind=f"tier{tier}",
        alpha_us=latency / 1e3 if latency else None,
        beta_gb_per_s=speed / 8 if speed else None,
        source=f"{source.name}, tier {tier}, one downlink",
    )


def looks_like_ns3(source: Source) -> bool:
    """Three counts, the switch numbers, then links with a rate and a delay."""
    lines = [line for line in source.lines if line.strip() and not line.startswith("#")]
    return (
        len(lines) >= 3
        and bool(re.fullmatch(r"\s*\d+\s+\d+\s+\d+\s*", lines[0]))
        and bool(re.fullmatch(r"[\d\s]+", lines[1]))
        and "bps" in lines[2]
    )


def read_ns3(source: Source) -> Topology:
    """Hosts and the switches they hang from; a host on several switches is one leaf group with its like.

    Raises:
        PlanError: counts that contradict the lists, an unknown node, or a bad rate or delay.
    """
    rows = [
        (n, line.split())
        for n, line in enumerate(source.lines, 1)
        if line.strip() and not line.startswith("#")
    ]
    total, num_switches, num_links = (int(w) for w in rows[0][1])
    if total > MAX_NODES:
        raise source.error(rows[0][0], f"{total} nodes", f"at most {MAX_NODES}", "fix the number")
    switches = {int(w) for w in rows[1][1]}
    if len(switches) != num_switches:
        raise source.error(
            rows[1][0], f"{len(switches)} switches", f"{num_switches}, as line 1 says", "fix one"
        )
    links = rows[2:]
    if len(links) != num_links:
        got = f"{len(links)} links"
        raise source.error(rows[-1][0], got, f"{num_links}, as line 1 says", "the file is cut; copy it again")
    above: dict[int, list[tuple[int, float, float]]] = defaultdict(list)
    for number, words in links:
        if len(words) < 4 or not (words[0].isdecimal() and words[1].isdecimal()):
            raise source.error(number, " ".join(words)[:40], "`a b rate delay error`", "fix the line")
        a, b = int(words[0]), int(words[1])
        rate, delay = _RATE.match(words[2]), _DELAY.match(words[3])
        if max(a, b) >= total or not rate or not delay:
            raise source.error(
                number, " ".join(words)[:40], f"nodes below {total}, a rate and a delay", "fix the line"
            )
        gb = float(rate[1]) * _SCALE[rate[2].upper()] / 8
        us = float(delay[1]) * _MICROSECONDS[delay[2]]
        for host, peer in ((a, b), (b, a)):
            if host not in switches:
                above[host].append((peer, gb, us))
    hosts = [h for h in range(total) if h not in switches]
    lost = [h for h in hosts if h not in above]
    if lost:
        raise source.error(rows[0][0], f"host {lost[0]} without a link", "every host linked", "add its link")
    sets = [tuple(sorted({peer for peer, _, _ in above[h]})) for h in hosts]
    groups = list(dict.fromkeys(sets))
    rates = {sum(gb for _, gb, _ in above[h]) for h in hosts}
    notes = []
    if len(rates) > 1:
        notes.append(Note(what=f"hosts of {sorted(rates)} GB/s; the slowest is used", source=source.name))
    delay_us = max(us for h in hosts for _, _, us in above[h])
    return Topology(
        kind="ns-3",
        nodes=tuple(f"host{h}" for h in hosts),
        box_of=np.full(len(hosts), -1, np.int32),
        devices_per_node=np.full(len(hosts), -1, np.int32),
        levels=(
            Level(
                name="leaf",
                groups=tuple("+".join(f"switch{s}" for s in g) for g in groups),
                member=np.array([groups.index(s) for s in sets], np.int32),
            ),
        ),
        network=Link(
            kind="nic",
            alpha_us=delay_us,
            beta_gb_per_s=min(rates),
            source=f"{source.name}: all links of a host together; propagation delay only",
        ),
        notes=tuple(notes),
    )
