"""Closed-form optima: no schedule can be faster than these. Printed beside every prediction.

Each bound is the time to move what must cross the tightest cut: into the weakest device, or into a box.
For the all-gather on boxes of equal devices the cuts are tight: a throughput-optimal schedule reaches them
(plan_allgather.py builds one).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from unirl_scale.comm.cost import Collective, Tier, total_size
from unirl_scale.core.errors import PlanError


@dataclass(frozen=True, slots=True, kw_only=True)
class BoxRates:
    """What the devices of one box can take in, 1e9 bytes a second each.

    Attributes:
        inner: from peers in the box, by device; 0.0 for a device that has lost all its fast links.
        outer: from other boxes (or around a dead fast link), by device; 0.0 = no network.
    """

    inner: tuple[float, ...]
    outer: tuple[float, ...]

    @classmethod
    def uniform(cls, size: int, inner: float, outer: float = 0.0) -> BoxRates:
        """`size` equal devices."""
        return cls(inner=(inner,) * size, outer=(outer,) * size)


def all_gather_bound_gb_per_s(box: BoxRates, boxes: int = 1) -> float:
    """Highest algorithm bandwidth (gathered bytes over time) of an all-gather over `boxes` equal boxes.

    With N = b*g devices: N * (inner + outer) / (N - 1) for the weakest device, where `outer` counts for one
    box only if the device has no inner links; and b * sum(outer) / (b - 1), the way into a box.

    Raises:
        PlanError: a device without any link, or boxes without a network.
    """
    g = len(box.inner)
    n = boxes * g
    if n < 2:
        return math.inf
    used = [inner + (outer if boxes > 1 or not inner else 0.0) for inner, outer in zip(box.inner, box.outer)]
    if min(used) <= 0:
        raise PlanError(
            f"bound: got device {used.index(min(used))} without a link; must have one; hint: leave it out"
        )
    device = min(n * rate / (n - 1) for rate in used)
    if boxes == 1:
        return device
    way_in = sum(box.outer)
    if way_in <= 0:
        raise PlanError(f"bound: got {boxes} boxes without a network; must have one; hint: state links.nic")
    return min(device, boxes * way_in / (boxes - 1))


def bound_us(collective: Collective, size: float, tiers: Sequence[Tier]) -> float | None:
    """Least time of any algorithm on these tiers; None when a bandwidth is unknown.

    `size` as in cost.py. An all-reduce must do a reduce-scatter and an all-gather's work, unless a switch
    adds (NVLS, SHARP), which no ordered reduction may use. A broadcast or p2p brings S into a device.
    """
    used = [t for t in tiers if t.size > 1]
    if any(t.beta_gb_per_s is None for t in used):
        return None
    if not used:
        return 0.0
    n = total_size(tiers)
    rates = [(t.beta_gb_per_s or 0.0) * 1e3 for t in used]
    ports: dict[str, float] = {}
    for tier, rate in zip(used, rates):
        port = tier.port or tier.name
        ports[port] = max(ports.get(port, 0.0), rate)
    if collective in ("broadcast", "p2p"):
        return size / math.fsum(ports.values())
    rounds = 2 if collective == "all_reduce" else 1
    device = (n - 1) / n * size / math.fsum(ports.values())
    times = [device]
    below = 1
    for tier, rate in zip(used, rates):
        if below > 1:  # the way into a part that holds `below` members
            outside = (n - below) / n * size
            carried = outside if collective != "all_to_all" else outside * below
            times.append(carried / (below * rate))
        below *= tier.size
    return rounds * max(times)
