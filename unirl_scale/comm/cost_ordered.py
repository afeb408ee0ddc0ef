"""What our ordered reductions cost, and which algorithm a call should use.

An ordered reduction is, at each level, an all-to-all of bytes and a local sum in tree order; see ordered.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from unirl_scale.comm.cost import (
    EVERYTHING,
    Collective,
    Cost,
    Tier,
    direct_all_to_all,
    exchange,
    hierarchical,
    ring,
    total_size,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Local additions: bytes a microsecond of the device's memory, None = not counted."""

    gb_per_s: float | None = None

    def time_us(self, local_bytes: float) -> float:
        """Time to read and write this much."""
        return local_bytes / (self.gb_per_s * 1e3) if self.gb_per_s else 0.0


_NO_MEMORY = Memory()


def ordered_reduce_scatter(
    size: float, tiers: Sequence[Tier], blocks: Sequence[int] = (), memory: Memory = _NO_MEMORY
) -> Cost:
    """Our reduce-scatter: at each level an all-to-all among the parts, then a local sum in tree order.

    Args:
        size: bytes of one member's node (fp32, or bf16 leaves).
        tiers: of the group, innermost first.
        blocks: members of each inner level, ascending, each a product of whole tiers; () = flat.

    Raises:
        PlanError: a block that does not end at a tier.
    """
    sent, steps, local = [0.0] * len(tiers), [0.0] * len(tiers), 0.0
    for inner, outer in pairwise([1, *blocks, total_size(tiers)]):
        held, parts = size / inner, outer // inner  # `held` is left to reduce when the level starts
        bytes_here, steps_here = exchange(held, tiers, inner, outer)
        sent = [a + b for a, b in zip(sent, bytes_here)]
        steps = [a + b for a, b in zip(steps, steps_here)]
        local += held + held / parts if parts > 1 else 0.0
    times = [t.exchange_us(s, b) for t, s, b in zip(tiers, steps, sent)]
    total = None if None in times else math.fsum(t or 0 for t in times) + memory.time_us(local)
    name = "ordered_flat" if not blocks else f"ordered_{len(blocks) + 1}_level"
    return Cost(algorithm=name, time_us=total, sent_bytes=tuple(sent), steps=tuple(steps), local_bytes=local)


def ordered_all_reduce(
    size: float,
    tiers: Sequence[Tier],
    blocks: Sequence[int] = (),
    memory: Memory = _NO_MEMORY,
    *,
    gathered_size: float | None = None,
    allowed: frozenset[str] = EVERYTHING,
) -> Cost:
    """Ordered reduce-scatter, then an all-gather of the result in its own dtype (`gathered_size` bytes)."""
    down = ordered_reduce_scatter(size, tiers, blocks, memory)
    up = hierarchical("all_gather", size if gathered_size is None else gathered_size, tiers, allowed)
    known = down.time_us is not None and up.time_us is not None
    return Cost(
        algorithm=down.algorithm,
        time_us=(down.time_us or 0.0) + (up.time_us or 0.0) if known else None,
        sent_bytes=tuple(a + b for a, b in zip(down.sent_bytes, up.sent_bytes)),
        steps=tuple(a + b for a, b in zip(down.steps, up.steps)),
        local_bytes=down.local_bytes,
    )


def gather_tree(
    size: float, tiers: Sequence[Tier], memory: Memory = _NO_MEMORY, allowed: frozenset[str] = EVERYTHING
) -> Cost:
    """Small all-reduce: gather every node everywhere, add locally. One exchange instead of two."""
    n = total_size(tiers)
    gathered = hierarchical("all_gather", size * n, tiers, allowed)
    local = size * (n + 1)
    time = None if gathered.time_us is None else gathered.time_us + memory.time_us(local)
    return Cost(
        algorithm="gather_tree",
        time_us=time,
        sent_bytes=gathered.sent_bytes,
        steps=gathered.steps,
        local_bytes=local,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The algorithm picked for a call, and what it was picked over."""

    cost: Cost
    blocks: tuple[int, ...] = ()
    others: tuple[Cost, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Fixed:
    """What is decided of an ordered reduction before its turn; None = free.

    Attributes:
        blocks: members of its inner levels.
        gather: an all-reduce gathers its nodes, or does not.
    """

    blocks: tuple[int, ...] | None = None
    gather: bool | None = None


_FREE = Fixed()
_NEAR = 1.03


def _top_bytes(cost: Cost, tiers: Sequence[Tier]) -> float:
    return next((b for b, t in zip(cost.sent_bytes[::-1], tiers[::-1]) if t.size > 1), 0.0)


def choose(
    collective: Collective,
    size: float,
    tiers: Sequence[Tier],
    *,
    ordered: bool,
    allowed: frozenset[str] = EVERYTHING,
    memory: Memory = _NO_MEMORY,
    gathered_size: float | None = None,
    fixed: Fixed = _FREE,
) -> Choice:
    """The cheapest algorithm that keeps the contract.

    `ordered` reductions may only use our own algorithms; everything else moves bytes and may use any that the
    vendor has (`allowed`). Within 3 % of the best time, and where figures are unknown, the choice falls on
    fewest bytes on the outermost tier, whose switches other groups share, then fewest steps.

    Args:
        fixed: what is decided already.
    """
    choices = _block_choices(tiers) if fixed.blocks is None else [fixed.blocks]
    found: list[tuple[Cost, tuple[int, ...]]] = []
    if ordered and collective == "reduce_scatter":
        found += [(ordered_reduce_scatter(size, tiers, b, memory), b) for b in choices]
    elif ordered and collective == "all_reduce":
        found += [
            (ordered_all_reduce(size, tiers, b, memory, gathered_size=gathered_size, allowed=allowed), b)
            for b in (choices if not fixed.gather else ())
        ]
        if fixed.gather is not False:
            found.append((gather_tree(size, tiers, memory, allowed), ()))
    elif collective == "all_to_all":
        found.append((direct_all_to_all(size, tiers), ()))
    else:
        found.append((hierarchical(collective, size, tiers, allowed), ()))
        rings = collective in ("all_reduce", "reduce_scatter", "all_gather") and "ring" in allowed
        if rings and not any(t.of(collective) for t in tiers):
            found.append((ring(collective, size, tiers), ()))

    def order(item: tuple[Cost, tuple[int, ...]]) -> tuple[float, float, float, int]:
        cost, levels = item
        known = cost.time_us if cost.time_us is not None else math.inf
        near = best if known <= best * _NEAR else known
        return near, _top_bytes(cost, tiers), known if known < math.inf else sum(cost.steps), len(levels)

    best = min(c.time_us if c.time_us is not None else math.inf for c, _ in found)
    cost, chosen = min(found, key=order)
    return Choice(cost=cost, blocks=chosen, others=tuple(c for c, _ in found if c is not cost))


def _block_choices(tiers: Sequence[Tier]) -> list[tuple[int, ...]]:
    """Every subset of tier boundaries, flat first."""
    edges, members = [], 1
    for tier in tiers[:-1]:
        members *= tier.size
        if members > 1:
            edges.append(members)
    edges = sorted({e for e in edges if e < total_size(tiers)})
    subsets = [
        tuple(e for k, e in enumerate(edges) if mask >> k & 1) for mask in range(1 << min(len(edges), 6))
    ]
    return sorted(subsets, key=len)
