"""What a collective costs: latency and bandwidth terms for each algorithm, per tier of the machine.

A group is described by tiers, innermost first: 8 members a node over NVLink, 64 nodes over NICs. `size` is
the full buffer S in bytes: what every rank contributes to an all-reduce, reduce-scatter or all-to-all, and
what every rank ends up with in an all-gather or broadcast. Imports no torch.

Formulas. Ring, halving-doubling, pairwise: Thakur, Rabenseifner, Gropp 2005. Double binary tree: Sanders,
Speck, Traeff 2009. NHR: HCCL's non-uniform hierarchical ring, ceil(log2 n) steps for any n. Pipelined chain:
Chan, Heimlich, Purkayastha, van de Geijn 2007.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from unirl_scale.core.errors import PlanError

EVERYTHING = frozenset({"ring", "tree", "halving_doubling", "nhr", "pairwise", "mesh", "chain", "direct"})
VENDOR_ALGORITHMS = {
    "nccl": frozenset({"ring", "tree", "pairwise", "chain", "direct"}),
    "hccl": frozenset({"ring", "halving_doubling", "nhr", "pairwise", "mesh", "tree", "direct"}),
    "gloo": frozenset({"ring", "halving_doubling", "pairwise", "tree", "direct"}),
}
"""What each transport library can run on one tier."""

Collective = Literal["all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast", "p2p"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A collective as its library ran it on all members of a tier, whatever its algorithm: with n members,
    (n - 1) alpha and a member's bytes over beta."""

    collective: Collective
    alpha_us: float
    beta_gb_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Tier:
    """One level of a group: `size` parts exchange over links of one class.

    Attributes:
        size: parts joined at this tier, >= 1.
        alpha_us: start-up of one step.
        beta_gb_per_s: what one member can send and receive at this tier, 1e9 bytes a second each way.
        s0_bytes: message size at which half the bandwidth is reached; adds s0/beta to each step.
        floor_us: least time of a call at this tier.
        mesh: each pair has wires of its own, so all peers are reached in one step.
        port: tiers of one port share its wire: a device's NIC serves its leaf and what lies beyond.
        measured: collectives with figures of their own; they stand in place of any algorithm's.
    """

    name: str
    size: int
    alpha_us: float | None = None
    beta_gb_per_s: float | None = None
    s0_bytes: float = 0.0
    floor_us: float = 0.0
    mesh: bool = False
    port: str = ""
    measured: tuple[Measured, ...] = ()

    def of(self, collective: Collective) -> Tier | None:
        """The tier with a collective's own figures, where it was measured."""
        found = next((m for m in self.measured if m.collective == collective), None)
        if found is None:
            return None
        return replace(self, alpha_us=found.alpha_us, beta_gb_per_s=found.beta_gb_per_s, measured=())

    def exchange_us(self, peers: float, sent_bytes: float) -> float | None:
        """Time in which a member exchanges these bytes with so many peers, in an all-to-all."""
        return (self.of("all_to_all") or self).time_us(peers, sent_bytes)

    def time_us(self, steps: float, sent_bytes: float) -> float | None:
        """Time of `steps` steps that send `sent_bytes` in all; None when a figure that matters is unknown."""
        if not steps and not sent_bytes:
            return 0.0
        if self.alpha_us is None or self.beta_gb_per_s is None:
            return None
        rate = self.beta_gb_per_s * 1e3  # bytes a microsecond
        return max(self.floor_us, steps * (self.alpha_us + self.s0_bytes / rate)) + sent_bytes / rate


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """The price of one call.

    Attributes:
        time_us: predicted; None when a tier it uses has an unknown figure.
        sent_bytes: bytes one member sends at each tier, innermost first.
        steps: steps at each tier.
        local_bytes: bytes one member reads and writes in its own memory to add.
    """

    algorithm: str
    time_us: float | None
    sent_bytes: tuple[float, ...]
    steps: tuple[float, ...]
    local_bytes: float = 0.0


def total_size(tiers: Sequence[Tier]) -> int:
    """Members of the group."""
    return math.prod(t.size for t in tiers)


def _log2(n: int) -> int:
    return (n - 1).bit_length()


def _share(n: int) -> float:
    return (n - 1) / n


# Steps and sent bytes (as a multiple of S) of one tier of n parts. None: the algorithm does not apply.
_Term = Callable[[int], tuple[float, float] | None]


def _power_of_two_only(term: _Term) -> _Term:
    return lambda n: term(n) if n & (n - 1) == 0 else None


_ONE_TIER: dict[str, dict[str, _Term]] = {
    "reduce_scatter": {
        "ring": lambda n: (n - 1, _share(n)),
        "halving_doubling": _power_of_two_only(lambda n: (_log2(n), _share(n))),
        "nhr": lambda n: (_log2(n), _share(n)),
        "pairwise": lambda n: (n - 1, _share(n)),
    },
    "all_reduce": {
        "ring": lambda n: (2 * (n - 1), 2 * _share(n)),
        "tree": lambda n: (2 * _log2(n), 2.0),
        "halving_doubling": lambda n: _halving_doubling(n),
        "nhr": lambda n: (2 * _log2(n), 2 * _share(n)),
    },
    "all_to_all": {"pairwise": lambda n: (n - 1, _share(n))},
    "broadcast": {"tree": lambda n: (_log2(n), 1.0)},
    "p2p": {"direct": lambda n: (1, 1.0)},
}
_ONE_TIER["all_gather"] = _ONE_TIER["reduce_scatter"]


def _halving_doubling(n: int) -> tuple[float, float]:
    """Ranks beyond a power of two fold into it first and are told the result last."""
    extra = 0 if n & (n - 1) == 0 else 1
    inside = 1 << (n.bit_length() - 1)
    return 2 * _log2(inside) + 2 * extra, 2 * _share(inside) + 2.0 * extra


def one_tier(collective: Collective, algorithm: str, size: float, tier: Tier) -> Cost | None:
    """Cost on a single tier, or None where the algorithm does not apply."""
    if tier.size == 1:
        return Cost(algorithm="none", time_us=0.0, sent_bytes=(0.0,), steps=(0.0,))
    if algorithm == "mesh":
        if not tier.mesh or collective in ("broadcast", "p2p"):
            return None
        rounds = 2 if collective == "all_reduce" else 1
        term: tuple[float, float] | None = (rounds, rounds * _share(tier.size))
    elif algorithm == "chain" and collective == "broadcast":
        return _chain(size, tier)
    else:
        make = _ONE_TIER[collective].get(algorithm)
        term = make(tier.size) if make else None
    if term is None:
        return None
    steps, factor = term
    sent = factor * size
    return Cost(algorithm=algorithm, time_us=tier.time_us(steps, sent), sent_bytes=(sent,), steps=(steps,))


def _chain(size: float, tier: Tier) -> Cost:
    """Pipelined chain with the number of pieces that costs least: k = sqrt((n - 2) S / (alpha beta))."""
    n = tier.size
    pieces = 1.0
    if n > 2 and tier.alpha_us and tier.beta_gb_per_s:
        pieces = max(1.0, math.sqrt((n - 2) * size / (tier.alpha_us * tier.beta_gb_per_s * 1e3)))
    steps = n - 2 + pieces
    time = tier.time_us(steps, size * steps / pieces)
    return Cost(algorithm="chain", time_us=time, sent_bytes=(size,), steps=(steps,))


def _as_measured(size: float, tier: Tier) -> Cost:
    steps, sent = tier.size - 1, _share(tier.size) * size
    return Cost(
        algorithm="measured", time_us=tier.time_us(steps, sent), sent_bytes=(sent,), steps=(float(steps),)
    )


def best_one_tier(
    collective: Collective, size: float, tier: Tier, allowed: frozenset[str] = EVERYTHING
) -> Cost:
    """The cheapest allowed algorithm on one tier; by bytes, then steps, when no time is known.

    Raises:
        PlanError: none of the allowed algorithms does this collective.
    """
    own = tier.of(collective)
    if own is not None and tier.size > 1:
        return _as_measured(size, own)
    names = [name for name in (*_ONE_TIER[collective], "mesh", "chain") if name in allowed]
    found = [c for name in names if (c := one_tier(collective, name, size, tier)) is not None]
    if not found:
        legal = ", ".join([*_ONE_TIER[collective], "mesh"])
        raise PlanError(
            f"algorithms: got {', '.join(sorted(allowed)) or 'none'} for {collective}; must hold one that "
            f"does it; hint: one of {legal}"
        )
    return min(found, key=_order)  # min keeps the first of equals: the table's order decides


def _order(cost: Cost) -> tuple[float, float, float]:
    known = cost.time_us if cost.time_us is not None else math.inf
    return known, sum(cost.sent_bytes), sum(cost.steps)


def ring(collective: Collective, size: float, tiers: Sequence[Tier]) -> Cost:
    """One ring over all members; where it leaves a node, the node's members carry a slice of it each."""
    n = total_size(tiers)
    rounds = 2 if collective == "all_reduce" else 1
    moved = rounds * _share(n) * size
    steps, sent, ports = [], [], list(dict.fromkeys(t.port or t.name for t in tiers))
    members, carriers = 1, dict.fromkeys(ports, 1)
    for tier in tiers:
        port = tier.port or tier.name
        if carriers[port] == 1:  # tiers of one port carry the same slice, one or the other at a time
            carriers[port] = members
        steps.append(rounds * (n // members) * _share(tier.size) * _share(n))
        sent.append(moved / carriers[port] if tier.size > 1 else 0.0)
        members *= tier.size
    waits = [t.time_us(s, 0.0) for t, s in zip(tiers, steps)]
    flows = [t.time_us(0.0, b) for t, b in zip(tiers, sent)]
    time = None if None in (*waits, *flows) else math.fsum(w or 0 for w in waits) + max(f or 0 for f in flows)
    return Cost(algorithm="ring", time_us=time, sent_bytes=tuple(sent), steps=tuple(steps))


def hierarchical(
    collective: Collective, size: float, tiers: Sequence[Tier], allowed: frozenset[str] = EVERYTHING
) -> Cost:
    """What vendors run: the inner part, the collective on what is left outside, the inner part back."""
    inner, *outer = tiers
    if not outer:
        return best_one_tier(collective, size, inner, allowed)
    if total_size(outer) == 1 or inner.size == 1:  # nothing to join on one side: no hierarchy
        alone = inner.size > 1 or total_size(outer) == 1
        only = (
            best_one_tier(collective, size, inner, allowed)
            if alone
            else hierarchical(collective, size, outer, allowed)
        )
        rest = (0.0,) * len(outer) if alone else ()
        head = () if alone else (0.0,)
        return replace(only, sent_bytes=(*head, *only.sent_bytes, *rest), steps=(*head, *only.steps, *rest))
    stages: dict[Collective, tuple[Collective, ...]] = {"all_reduce": ("reduce_scatter", "all_gather")}
    parts = [best_one_tier(c, size, inner, allowed) for c in stages.get(collective, (collective,))]
    shrinks = collective in ("all_reduce", "reduce_scatter", "all_gather")
    above = hierarchical(collective, size / inner.size if shrinks else size, outer, allowed)
    times = [p.time_us for p in (*parts, above)]
    return Cost(
        algorithm=f"hierarchical({'+'.join(dict.fromkeys(p.algorithm for p in parts))},{above.algorithm})",
        time_us=None if None in times else math.fsum(t or 0 for t in times),
        sent_bytes=(math.fsum(p.sent_bytes[0] for p in parts), *above.sent_bytes),
        steps=(math.fsum(p.steps[0] for p in parts), *above.steps),
    )


def direct_all_to_all(size: float, tiers: Sequence[Tier]) -> Cost:
    """Every pair exchanges its own piece; nothing is forwarded."""
    sent, steps = exchange(size, tiers, 1, total_size(tiers))
    times = [t.exchange_us(s, b) for t, s, b in zip(tiers, steps, sent)]
    time = None if None in times else math.fsum(t or 0 for t in times)
    return Cost(algorithm="pairwise", time_us=time, sent_bytes=tuple(sent), steps=tuple(steps))


def exchange(size: float, tiers: Sequence[Tier], inner: int, outer: int) -> tuple[list[float], list[float]]:
    """Bytes and steps of each tier when blocks of `inner` exchange `size` bytes inside blocks of `outer`."""
    sent, steps = [0.0] * len(tiers), [0.0] * len(tiers)
    parts, below = outer // inner, 1
    for i, share in enumerate(_tier_parts(tiers, inner, outer)):
        peers = below * (share - 1)
        sent[i] = size * peers / parts
        steps[i] = min(peers, 1) if tiers[i].mesh and not tiers[i].measured else peers
        below *= share
    return sent, steps


def _tier_parts(tiers: Sequence[Tier], inner: int, outer: int) -> list[int]:
    """How many parts each tier contributes to the step from blocks of `inner` to blocks of `outer`."""
    shares, below = [], 1
    for tier in tiers:
        above = below * tier.size
        low, high = max(below, inner), min(above, outer)
        shares.append(high // low if high > low else 1)
        below = above
    if math.prod(shares) != outer // inner:
        sizes = [t.size for t in tiers]
        raise PlanError(
            f"blocks: got a level from {inner} to {outer} members over tiers of {sizes}; must nest in "
            "the tiers; hint: end each block at a node or a leaf switch"
        )
    return shares
