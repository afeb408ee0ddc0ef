"""Which device each rank gets: TP inside a node, DP in aligned blocks of nodes and leaves, PP close."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from unirl_scale.comm.plan_machine import Machine
from unirl_scale.comm.topology.model import IntArray
from unirl_scale.core.config import MeshConfig
from unirl_scale.core.errors import PlanError


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Placement:
    """The slot of every rank: int32 [ranks], an index into the machine's slots, each at most once.

    `order` says in words how the units of TP ranks were laid out.
    """

    slot: IntArray
    order: str

    @property
    def ranks(self) -> int:
        """Ranks placed."""
        return len(self.slot)


Score = Callable[[IntArray], tuple[float, ...]]
"""Slots of a role's ranks -> what is to be small."""


def mesh_ranks(mesh: MeshConfig) -> IntArray:
    """Ranks of a role, relative to its first: int32 [pp, dp, tp]."""
    size = mesh.pp * mesh.dp * mesh.tp
    return np.arange(size, dtype=np.int32).reshape(mesh.pp, mesh.dp, mesh.tp)


def place_role(machine: Machine, free: IntArray, mesh: MeshConfig, score: Score) -> tuple[IntArray, str]:
    """Slots of one role's ranks.

    Args:
        free: slots that may be used, in the machine's order.
        score: what a layout costs; the smallest wins, the first of equals.

    Returns:
        int32 [pp*dp*tp] slots by rank, and the layout in words.

    Raises:
        PlanError: too few devices, or TP groups that do not fit.
    """
    needed = mesh.dp * mesh.pp
    units = tp_units(machine, free, mesh.tp)
    if len(units) < needed:
        raise PlanError(
            f"mesh: got tp {mesh.tp} x dp {mesh.dp} x pp {mesh.pp} = {needed} groups of {mesh.tp}; "
            f"the machine holds {len(units)}; must fit; hint: {_nearest(mesh, len(units))}"
        )
    places = machine.places[:, units[:, 0]]
    best: tuple[tuple[float, ...], IntArray, str] | None = None
    for chosen, words in _selections(places, needed):
        for block in _blocks(mesh.dp):
            order = units[chosen][_sequence(mesh, block)].reshape(-1)
            value = score(order)
            text = f"{words}; {_describe(mesh, block)}"
            if best is None or value < best[0]:
                best = value, order, text
    assert best is not None
    return best[1], best[2]


def _nearest(mesh: MeshConfig, units: int) -> str:
    if not units:
        return "a smaller tp"
    fits = [
        f"dp {units // mesh.pp}" if units >= mesh.pp else "",
        f"pp {units // mesh.dp}" if units >= mesh.dp else "",
    ]
    return " or ".join(f for f in fits if f) or f"dp x pp of at most {units}"


def tp_units(machine: Machine, free: IntArray, tp: int) -> npt.NDArray[np.int32]:
    """Groups of `tp` neighbouring slots, [units, tp]: inside a node if they fit, else in whole nodes of a
    leaf, else of the next level, never split in another way.

    Raises:
        PlanError: tp is larger than a node and no multiple of it.
    """
    node = machine.places[0, free]
    starts, counts = _runs(node)
    largest = int(counts.max(initial=0))
    if tp <= largest:
        return _cut(free, starts, counts, tp)
    for row in range(1, len(machine.places)):
        if tp % largest:
            break
        full = np.repeat(counts == largest, counts)
        ids = machine.places[row, free[full]]
        starts, lengths = _runs(ids)
        if int(lengths.max(initial=0)) >= tp:
            return _cut(free[full], starts, lengths, tp)
    if tp % max(largest, 1) == 0 and len(free) >= tp:
        whole = free[np.repeat(counts == largest, counts)]
        return _cut(whole, np.zeros(1, np.int64), np.array([len(whole)]), tp)
    raise PlanError(
        f"mesh: got tp {tp} on nodes of {largest} devices; must be at most that, or a multiple of it that "
        f"the machine holds; hint: tp {largest}"
    )


def _runs(ids: IntArray) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Start and length of each run of equal ids."""
    if not len(ids):
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    starts = np.concatenate([[0], np.flatnonzero(np.diff(ids)) + 1])
    return starts, np.diff(np.concatenate([starts, [len(ids)]]))


def _cut(
    free: IntArray, starts: npt.NDArray[np.int64], counts: npt.NDArray[np.int64], tp: int
) -> npt.NDArray[np.int32]:
    per_run = counts // tp
    first = np.repeat(starts, per_run)
    offset = np.arange(len(first)) - np.repeat(np.cumsum(per_run) - per_run, per_run)
    units: npt.NDArray[np.int32] = free[(first + offset * tp)[:, None] + np.arange(tp)]
    return units


def _selections(places: IntArray, needed: int) -> list[tuple[npt.NDArray[np.int64], str]]:
    """Which units to use, best aligned first: runs a node and a leaf rounded down to a multiple of the
    largest power of two for which the machine has enough, so that blocks are subtrees of the canonical tree.
    """
    kept, words = np.arange(places.shape[1]), []
    choices = [(kept[:needed], "units in order")]
    for row, ids in enumerate(places):
        starts, counts = _runs(ids[kept])
        power = 1 << (int(counts.max(initial=1)).bit_length() - 1)
        while int((counts // power * power).sum()) < needed:
            power //= 2
        caps = counts // power * power
        if power == 1 or (caps == counts).all():
            continue
        offset = np.arange(len(kept)) - np.repeat(starts, counts)
        kept = kept[offset < np.repeat(caps, counts)]
        words.append(f"multiples of {power} a {('node', 'leaf')[row] if row < 2 else 'group'}")
        choices.insert(0, (kept[:needed], f"units in {', '.join(words)}"))
    return choices


def _blocks(dp: int) -> list[int]:
    """DP block sizes to try, largest first: dp itself, then the powers of two that divide it."""
    powers = [1 << k for k in range(dp.bit_length()) if dp % (1 << k) == 0]
    return list(dict.fromkeys([dp, *reversed(powers)]))


def _sequence(mesh: MeshConfig, block: int) -> npt.NDArray[np.int64]:
    """Position of each unit (p, d) when blocks of `block` DP ranks keep all their stages together."""
    p, d = np.meshgrid(np.arange(mesh.pp), np.arange(mesh.dp), indexing="ij")
    position: npt.NDArray[np.int64] = (((d // block) * mesh.pp + p) * block + d % block).reshape(-1)
    return position


def _describe(mesh: MeshConfig, block: int) -> str:
    if mesh.pp == 1 or block == mesh.dp:
        return "stage after stage" if mesh.pp > 1 else "one stage"
    return f"blocks of {block} DP ranks with all {mesh.pp} stages side by side"


def block_shape(places: IntArray, groups: IntArray) -> tuple[int, ...]:
    """Members of a group by tier: a node, nodes a leaf, ...; their product is the group's size.

    Args:
        places: int32 [rows, ranks], finest first.
        groups: int32 [count, size] ranks.

    The members a block are the greatest common divisor of all positions where a group leaves a place, so
    that every block of every group lies in one place; 1 where runs are irregular.
    """
    size = groups.shape[1]
    sizes = [1]
    for row in places:
        moved = np.flatnonzero((np.diff(row[groups], axis=1) != 0).any(axis=0)) + 1
        block = math.gcd(size, *moved.tolist())
        sizes.append(max(block, sizes[-1]))
    sizes.append(size)
    return tuple(outer // inner for inner, outer in pairwise(sizes))


def place_all(
    machine: Machine, roles: Sequence[tuple[str, MeshConfig]], score_of: Callable[[MeshConfig], Score]
) -> Placement:
    """Place every role. Roles that share ranks share the placement of the largest of them.

    Raises:
        PlanError: more ranks than usable devices, or a role that does not fit.
    """
    world = max(m.first_rank + m.tp * m.pp * m.dp for _, m in roles)
    if world > machine.slots:
        lost = f", {len(machine.excluded)} excluded" if machine.excluded else ""
        raise PlanError(
            f"mesh: got {world} ranks; the machine has {machine.slots} usable devices{lost}; must fit; "
            f"hint: a mesh of at most {machine.slots} ranks, or more nodes"
        )
    slot = np.full(world, -1, np.int32)
    free = np.arange(machine.slots, dtype=np.int32)
    words = []
    for cluster in _clusters(roles):
        name, mesh = max(cluster, key=lambda r: r[1].tp * r[1].pp * r[1].dp)  # the first of equals
        low = min(m.first_rank for _, m in cluster)
        high = max(m.first_rank + m.tp * m.pp * m.dp for _, m in cluster)
        slots, text = place_role(machine, free, mesh, score_of(mesh))
        slot[mesh.first_rank : mesh.first_rank + len(slots)] = slots
        free = np.setdiff1d(free, slots, assume_unique=True).astype(np.int32)
        rest = np.flatnonzero(slot[low:high] < 0) + low
        slot[rest], free = free[: len(rest)], free[len(rest) :]
        words.append(f"{name}: {text}")
    idle = np.flatnonzero(slot < 0)
    slot[idle] = free[: len(idle)]
    return Placement(slot=slot, order="; ".join(words))


def _clusters(roles: Sequence[tuple[str, MeshConfig]]) -> list[list[tuple[str, MeshConfig]]]:
    """Roles whose rank ranges overlap, together; in rank order."""
    out: list[list[tuple[str, MeshConfig]]] = []
    end = -1
    for role in sorted(roles, key=lambda r: r[1].first_rank):
        mesh = role[1]
        if mesh.first_rank >= end:
            out.append([])
        out[-1].append(role)
        end = max(end, mesh.first_rank + mesh.tp * mesh.pp * mesh.dp)
    return out
