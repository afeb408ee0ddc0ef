"""Measuring links on the running ranks: who exchanges with whom, and what the times say. Imports no torch.

Ranks exchange in pairs, one class of link after the other: inside a node, between nodes of a leaf switch,
between leaves. Each round pairs as many ranks as it can, so that shared wires are measured under load, as
training uses them. Then the ranks of each node, and rank i of every node, run the two collectives that carry
all training traffic: what a library makes of the links is not seen in pairs. probe_ranks.py does the
transfers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from unirl_scale.comm.cost import Collective
from unirl_scale.comm.cost_fit import Curve, Fit, fit
from unirl_scale.comm.topology.model import Link, Note, Topology
from unirl_scale.comm.topology.native_write import write_yaml
from unirl_scale.core.errors import PlanError

PROBE_SIZES = tuple(1 << k for k in range(10, 27, 2))
"""Bytes of each message: 1 KiB to 64 MiB."""

PROBED: tuple[Collective, ...] = ("all_gather", "all_to_all")
"""Collectives that are measured on whole groups."""

_SLOW = 0.8


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """Pairs that exchange at the same time over one class of link."""

    kind: str
    pairs: tuple[tuple[int, int], ...]

    def peer(self, rank: int) -> int | None:
        """Whom a rank exchanges with, if anyone."""
        for a, b in self.pairs:
            if rank in (a, b):
                return b if rank == a else a
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One pair's times: microseconds of an exchange, by the bytes each side sends."""

    kind: str
    pair: tuple[int, int]
    time_us: Mapping[int, float]


def probe_rounds(node: Sequence[str], leaf: Sequence[int] | None = None) -> tuple[Round, ...]:
    """Rounds for ranks on these nodes.

    Args:
        node: of each rank.
        leaf: leaf switch of each rank, -1 = unknown; None = no switches known.

    Returns:
        "node": neighbours, and partners two apart, inside each node; "nic" and, across leaves, "tier": rank i
        of a node with rank i of the next. Classes that the ranks do not have are left out.
    """
    members: dict[str, list[int]] = {}
    for rank, name in enumerate(node):
        members.setdefault(name, []).append(rank)
    groups = list(members.values())
    rounds = []
    for step in (1, 2):
        pairs = tuple(pair for g in groups for pair in _within(g, step))
        if pairs:
            rounds.append(Round(kind="node", pairs=pairs))
    leaves = list(leaf) if leaf is not None else [-1] * len(node)
    for kind, far in (("nic", False), ("tier", True)):
        pairs = tuple(_between(groups, leaves, far=far))
        if pairs:
            rounds.append(Round(kind=kind, pairs=pairs))
    return tuple(rounds)


def probe_groups(node: Sequence[str]) -> dict[str, tuple[tuple[int, ...], ...]]:
    """Groups on which collectives are measured, all of a kind at once: "node", the ranks of each node; "nic",
    rank i of every node. Nodes with fewer ranks than the fullest stand aside."""
    members: dict[str, list[int]] = {}
    for rank, name in enumerate(node):
        members.setdefault(name, []).append(rank)
    most = max(map(len, members.values()), default=0)
    full = [tuple(ranks) for ranks in members.values() if len(ranks) == most]
    kinds = {"node": tuple(full), "nic": tuple(zip(*full))}
    return {kind: groups for kind, groups in kinds.items() if groups and len(groups[0]) > 1}


def _within(ranks: Sequence[int], step: int) -> list[tuple[int, int]]:
    pairs, used = [], set()
    for i, rank in enumerate(ranks):
        if rank not in used and i + step < len(ranks) and ranks[i + step] not in used:
            pairs.append((rank, ranks[i + step]))
            used |= {rank, ranks[i + step]}
    return pairs


def _between(groups: Sequence[list[int]], leaf: Sequence[int], *, far: bool) -> list[tuple[int, int]]:
    pairs = []
    waiting = list(range(len(groups)))
    while waiting:
        a = waiting.pop(0)
        match = next((b for b in waiting if (leaf[groups[a][0]] != leaf[groups[b][0]]) == far), None)
        if match is not None:
            waiting.remove(match)
            pairs += list(zip(groups[a], groups[match]))
    return pairs


@dataclass(frozen=True, slots=True, kw_only=True)
class Probed:
    """A class of link as measured: its fit over all pairs, and the pairs that are slower than the rest."""

    kind: str
    fit: Fit
    slow: tuple[str, ...]

    def link(self) -> Link:
        """The measured figures."""
        text = f"probed: {self.fit.points} points, mean error {100 * self.fit.mean_error:.1f} %"
        return Link(
            kind=self.kind,
            alpha_us=round(self.fit.base_us, 3),
            beta_gb_per_s=round(self.fit.gb_per_s, 3),
            source=text,
        )


def evaluate(samples: Sequence[Sample]) -> tuple[Probed, ...]:
    """Fit each class and name the pairs that reach less than 0.8 of the class's median bandwidth.

    Raises:
        PlanError: no samples, or too few sizes to fit.
    """
    if not samples:
        raise PlanError("probe: got no measurement; must be two ranks or more; hint: start more ranks")
    found = []
    for kind in dict.fromkeys(s.kind for s in samples):
        mine = [s for s in samples if s.kind == kind]
        sizes = sorted(set.intersection(*(set(s.time_us) for s in mine)))
        times = [float(np.median([s.time_us[n] for s in mine])) for n in sizes]
        curve = Curve(
            collective="p2p", ranks=2, size_bytes=tuple(sizes), time_us=tuple(times), source=f"probe {kind}"
        )
        largest, usual = sizes[-1], times[-1]
        slow = tuple(
            f"ranks {s.pair[0]} and {s.pair[1]}: {largest / s.time_us[largest] / 1e3:.3g} GB/s where the "
            f"median pair has {largest / usual / 1e3:.3g}"
            for s in mine
            if usual / s.time_us[largest] < _SLOW
        )
        found.append(Probed(kind=kind, fit=fit(curve), slow=slow))
    return tuple(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSample:
    """Times of a collective on groups of one kind: microseconds of the slowest rank, by S in bytes."""

    kind: str
    collective: Collective
    ranks: int
    time_us: Mapping[int, float]

    def link(self) -> Link:
        """Figures of the collective: (n - 1) alpha, and a member's bytes over beta.

        Raises:
            PlanError: too few sizes to fit.
        """
        name = f"{self.kind}.{self.collective}"
        curve = Curve(
            collective=self.collective,
            ranks=self.ranks,
            size_bytes=tuple(self.time_us),
            time_us=tuple(self.time_us.values()),
            source=f"probe {name}",
        )
        found = fit(curve).link(name, self.collective, self.ranks)
        text = f"probed on {self.ranks} ranks: {found.source}"
        return replace(
            found,
            alpha_us=round(found.alpha_us or 0.0, 3) or 0.001,
            beta_gb_per_s=round(found.beta_gb_per_s or 0.0, 3),
            source=text,
        )


def probed_topology(
    topology: Topology, probed: Sequence[Probed], groups: Sequence[GroupSample] = ()
) -> Topology:
    """The topology with measured figures: "node" replaces every fast link class inside the boxes, "nic" the
    network, "tier" the level above the leaves; collectives stand beside them. Slow pairs become notes."""
    by_kind = {p.kind: p for p in probed}
    constants = {**topology.constants, **{link.kind: link for link in (g.link() for g in groups)}}
    if "node" in by_kind:
        link = by_kind["node"].link()
        kinds = {k for box in topology.boxes for k in box.links} or {"node"}
        constants.update({k: replace(link, kind=k) for k in kinds})
    if "nic" in by_kind:
        constants["nic"] = by_kind["nic"].link()
    if "tier" in by_kind and topology.levels:
        constants[topology.levels[0].name] = by_kind["tier"].link()
    notes = [
        Note(what=text, source=f"probe {p.kind}", severity="degraded") for p in probed for text in p.slow
    ]
    return replace(topology, constants=constants, notes=(*topology.notes, *notes))


def probe_yaml(topology: Topology, samples: Sequence[Sample], groups: Sequence[GroupSample] = ()) -> str:
    """The YAML that `unirl-scale probe` writes, for --topology of later plans.

    Raises:
        PlanError: no samples, or too few sizes to fit.
    """
    return write_yaml(probed_topology(topology, evaluate(samples), groups))
