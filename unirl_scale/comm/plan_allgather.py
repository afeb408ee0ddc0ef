"""A throughput-optimal all-gather over equal boxes: every link of a device works at once.

Every shard is cut into pieces, and each piece reaches everybody along a tree. Device j of box B sends its
shard to device j of every other box over the network, and to the rest of box B over the scale-up links.
Device i of box A gets it from device j of its own box, except for a fraction that comes from device i of
box B over the network; that fraction, one number a device, is set so that inner links and network finish
together. A pair without its wire relays through all common peers; a device without any inner link hangs
on the network. The loads are counted edge by edge by `measure`, which does not know how the trees were
made.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from unirl_scale.comm.cost_bounds import BoxRates, all_gather_bound_gb_per_s
from unirl_scale.core.errors import PlanError

_ONE = Fraction(1)


@dataclass(frozen=True, slots=True, kw_only=True)
class BoxWires:
    """The inside of a box: what each ordered pair, or each device through a switch, can carry.

    Attributes:
        wires: [g][g] 1e9 bytes a second of the pair's own wire; 0.0 = none. Ignored with `switch`.
        switch: by device, its way to and from a switch that joins all; () = wires only.
        network: by device, its way to other boxes.
    """

    wires: tuple[tuple[float, ...], ...]
    switch: tuple[float, ...] = ()
    network: tuple[float, ...] = ()

    @property
    def size(self) -> int:
        """Devices."""
        return len(self.wires)

    def joined(self, a: int, b: int) -> bool:
        """Whether a direct inner path exists."""
        return bool(self.switch[a] and self.switch[b]) if self.switch else bool(self.wires[a][b])

    def rates(self) -> BoxRates:
        """What each device can take in."""
        inner = self.switch or tuple(sum(row) for row in self.wires)
        return BoxRates(inner=inner, outer=self.network or (0.0,) * self.size)

    @classmethod
    def switched(cls, size: int, rate: float, network: float = 0.0, off: Sequence[int] = ()) -> BoxWires:
        """Equal devices around a switch, except those in `off`, which have lost it."""
        return cls(
            wires=((0.0,) * size,) * size,
            switch=tuple(0.0 if i in off else rate for i in range(size)),
            network=(network,) * size,
        )

    @classmethod
    def mesh(
        cls, size: int, rate: float, network: float = 0.0, down: Sequence[tuple[int, int]] = ()
    ) -> BoxWires:
        """Every pair wired, except those in `down`."""
        lost = {frozenset(p) for p in down}
        wires = tuple(
            tuple(0.0 if i == j or frozenset((i, j)) in lost else rate for j in range(size))
            for i in range(size)
        )
        return cls(wires=wires, network=(network,) * size)


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A fraction of one shard and the tree that spreads it: `parent[d]` hands it to device d."""

    shard: int
    fraction: Fraction
    parent: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What a schedule does to the links.

    `gb_per_s` is the algorithm bandwidth in the limit of large buffers, `optimal` the closed-form bound.
    """

    gb_per_s: float
    optimal_gb_per_s: float

    @property
    def ratio(self) -> float:
        """How close to the bound."""
        return self.gb_per_s / self.optimal_gb_per_s


def build(box: BoxWires, boxes: int = 1) -> list[Piece]:
    """Trees for every shard of `boxes` equal boxes.

    Raises:
        PlanError: a device that no path reaches.
    """
    shares = [_network_share(box, d, boxes) for d in range(box.size)]
    return [piece for shard in range(boxes * box.size) for piece in _pieces(box, boxes, shard, shares)]


def _network_share(box: BoxWires, device: int, boxes: int) -> Fraction:
    """The fraction of far shards of other rails that a device takes from the network: what is left of its
    network's time, set by the tightest cut, once its own rail's shards are in."""
    if boxes == 1:
        return Fraction(0)
    g, n = box.size, boxes * box.size
    if not box.rates().inner[device]:
        return _ONE
    seconds = Fraction(n) / Fraction(all_gather_bound_gb_per_s(box.rates(), boxes))
    inner = Fraction(box.rates().inner[device])
    local = Fraction(g - 1)
    # inner load: local + (boxes - 1) * local * (1 - share) must take no longer than `seconds`
    share = 1 - (inner * seconds - local) / (local * (boxes - 1)) if g > 1 else Fraction(0)
    return min(_ONE, max(Fraction(0), share)).limit_denominator(10**6)


def _pieces(box: BoxWires, boxes: int, shard: int, shares: Sequence[Fraction]) -> Iterator[Piece]:
    g = box.size
    own = shard % g
    helpers = [k for k in range(g) if k != own and (not box.switch or box.switch[k])]
    cuts = {Fraction(0), _ONE, *shares}
    for d in range(g):
        relays = _relays(box, own, d)
        if d != own and not box.joined(own, d) and relays:
            low = shares[d] if boxes > 1 else Fraction(0)
            cuts |= {low + (1 - low) * Fraction(k, len(relays)) for k in range(len(relays))}
            cuts |= {Fraction(k, len(relays)) for k in range(len(relays))}
    if not box.rates().inner[own]:
        cuts |= {Fraction(k, len(helpers)) for k in range(len(helpers))}
    edges = sorted(cuts)
    for low, high in pairwise(edges):
        parent = tuple(
            -1 if d == shard else _parent(box, shard, d, low, shares, helpers) for d in range(boxes * g)
        )
        yield Piece(shard=shard, fraction=high - low, parent=parent)


def _relays(box: BoxWires, own: int, device: int) -> list[int]:
    return [
        k for k in range(box.size) if k not in (own, device) and box.joined(own, k) and box.joined(k, device)
    ]


def _parent(
    box: BoxWires, shard: int, device: int, at: Fraction, shares: Sequence[Fraction], helpers: Sequence[int]
) -> int:
    """Who hands the piece that starts at `at` (0 to 1) of the shard to the device."""
    g = box.size
    home, own = divmod(shard, g)
    here, mine = divmod(device, g)
    far = here != home
    if not box.rates().inner[own]:  # the shard's owner has the network only: one helper a piece spreads it
        helper = helpers[int(at * len(helpers))]
        if far:
            return shard if mine == own else home * g + mine
        return shard if mine == helper or not box.rates().inner[mine] else home * g + helper
    if far and (mine == own or at < shares[mine]):
        return home * g + mine
    if not box.rates().inner[mine]:
        return shard
    if box.joined(own, mine):
        return here * g + own
    relays = _relays(box, own, mine)
    if not relays:
        raise PlanError(
            f"all-gather: got no path from device {own} to device {mine}; must have one; "
            "hint: leave one of them out"
        )
    low = shares[mine] if far else Fraction(0)
    return here * g + relays[min(len(relays) - 1, int((at - low) / (1 - low) * len(relays)))]


def measure(pieces: Sequence[Piece], box: BoxWires, boxes: int = 1) -> Measured:
    """Check that every device gets every shard exactly once, and count what each link carries.

    Raises:
        PlanError: a piece that does not reach a device, loops, or pieces that do not add up to a shard; a
            link that does not exist.
    """
    g, n = box.size, boxes * box.size
    have: dict[int, Fraction] = {}
    wire: npt.NDArray[np.float64] = np.zeros((n, n))
    for piece in pieces:
        have[piece.shard] = have.get(piece.shard, Fraction(0)) + piece.fraction
        _check_tree(piece, n)
        parent = np.array(piece.parent)
        to = np.flatnonzero(parent >= 0)
        np.add.at(wire, (parent[to], to), float(piece.fraction))
    wrong = [s for s in range(n) if have.get(s) != 1]
    if wrong:
        raise PlanError(
            f"all-gather: got {have.get(wrong[0], 0)} of shard {wrong[0]}; must be all of it, once"
        )
    seconds = _slowest(wire, box, g, n)
    return Measured(gb_per_s=n / seconds, optimal_gb_per_s=all_gather_bound_gb_per_s(box.rates(), boxes))


def _check_tree(piece: Piece, n: int) -> None:
    parent = np.array(piece.parent)
    if len(parent) != n or parent[piece.shard] != -1 or (np.delete(parent, piece.shard) < 0).any():
        raise PlanError(f"all-gather: a piece of shard {piece.shard} has not one sender for each device")
    jump = np.where(parent < 0, piece.shard, parent)
    for _ in range(n.bit_length()):  # pointer doubling: 2^k steps towards the root after k rounds
        jump = jump[jump]
    if (jump == piece.shard).all():
        return
    raise PlanError(f"all-gather: a piece of shard {piece.shard} goes round in a circle")


def _slowest(wire: npt.NDArray[np.float64], box: BoxWires, g: int, n: int) -> float:
    """Seconds (shards of 1 GB) of the busiest link."""
    index = np.arange(n)
    same = index[:, None] // g == index[None, :] // g
    rates = np.tile(np.array(box.wires), (n // g, n // g))
    alive = np.array(box.switch, bool) if box.switch else np.zeros(g, bool)
    fast = np.tile(
        alive[:, None] & alive[None, :] if box.switch else np.array(box.wires) > 0, (n // g, n // g)
    )
    inner, outer = np.where(same & fast, wire, 0.0), np.where(same & fast, 0.0, wire)
    network = np.tile(np.array(box.network or (0.0,) * g), n // g)
    loads = [(outer.sum(0), network), (outer.sum(1), network)]
    if box.switch:
        switch = np.tile(np.array(box.switch), n // g)
        loads += [(inner.sum(0), switch), (inner.sum(1), switch)]
    else:
        loads.append((inner.ravel(), rates.ravel()))
    worst = 0.0
    for load, rate in loads:
        used = load > 1e-12
        if (rate[used] <= 0).any():
            raise PlanError("all-gather: the schedule uses a link that does not exist")
        worst = max(worst, float((load[used] / rate[used]).max(initial=0.0)))
    return worst
