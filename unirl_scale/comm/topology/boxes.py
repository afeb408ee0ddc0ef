"""From a matrix of path names to a Box: gaps filled by symmetry, fabric recognised, weak devices named."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from unirl_scale.comm.topology.model import SELF, UNKNOWN, Link, Note

_COUNTED = re.compile(r"(NV|XGMI)(\d+)\Z")
_SLOW = ("PIX", "PXB", "PHB", "NODE", "SYS", UNKNOWN, SELF)
PROXIMITY = ("PIX", "PXB", "PHB", "NODE", "SYS")
"""PCIe paths, nearest first."""

MOST_LINKS_ON_A_DEVICE = 18
"""More links than this in a row of the matrix cannot all be wires of one device: there is a switch."""


def weight(kind: str) -> int:
    """How many fast links a path stands for; 0 for PCIe and unknown paths."""
    match = _COUNTED.match(kind)
    if match:
        return int(match[2])
    return 0 if kind in _SLOW else 1


def is_fast(kind: str) -> bool:
    """A path of the scale-up network (NVLink, xGMI, HCCS, SIO, UB, or a name of ours) rather than PCIe."""
    return weight(kind) > 0


def fill_uniform(paths: list[list[str]], names: Sequence[str], notes: list[Note], source: str) -> None:
    """Fill pairs that no row shows, where one switch explains everything that is shown.

    Safe only when every known pair of the two devices, and of at least three devices in all, has one and
    the same fast path with more links than a device has wires to share: the switch is then full-rate to
    everyone. Anything else stays unknown.
    """
    size = len(paths)
    for a in range(size):
        for b in range(a + 1, size):
            if paths[a][b] != UNKNOWN:
                continue
            seen = {paths[d][c] for d in (a, b) for c in range(size) if c not in (a, b)}
            fast = {k for k in seen if is_fast(k)}
            kind = next(iter(fast), UNKNOWN)
            total = sum(weight(paths[a][c]) for c in range(size) if c != a)
            if len(fast) == 1 and total > MOST_LINKS_ON_A_DEVICE and UNKNOWN not in seen:
                paths[a][b] = paths[b][a] = kind
                what = (
                    f"{names[a]}-{names[b]}: in no row; {kind} because both have {kind} to every healthy peer"
                )
                notes.append(Note(what=what, source=source, severity="filled"))
            else:
                notes.append(Note(what=f"{names[a]}-{names[b]}: path unknown, in no row", source=source))


def fabric_of(paths: Sequence[Sequence[str]]) -> Literal["switch", "mesh", "unknown"]:
    """Switched or wired pair by pair, from the number of links a row claims."""
    kinds = {k for row in paths for k in row if is_fast(k)}
    if "HCCS_SW" in kinds:
        return "switch"
    if not kinds or kinds == {"UB"}:
        return "unknown"
    most = max(sum(weight(k) for k in row) for row in paths)
    return "switch" if most > MOST_LINKS_ON_A_DEVICE and kinds != {"HCCS"} else "mesh"


def find_degraded(
    paths: Sequence[Sequence[str]], names: Sequence[str], exempt: Callable[[str], bool] = lambda kind: False
) -> dict[int, str]:
    """Devices with fewer fast links than most of their peers, and why.

    In a switched box the widest path of a row decides, so that one dead device does not make its peers look
    weak; in a mesh the row's sum does. Pairs for which `exempt` holds (unknown, say) count as
    healthy. Where fewer than half of the devices agree, only one without any fast link is degraded.
    """
    size = len(paths)
    switched = fabric_of(paths) == "switch"

    def strength(row: Sequence[str]) -> int:
        weights = [weight(k) for k in row]
        return max(weights) if switched else sum(weights)

    strengths = [strength(row) for row in paths]
    if size < 3 or not any(strengths):
        return {}
    counts = Counter(strengths)
    usual = max(counts, key=lambda s: (counts[s], s))
    found: dict[int, str] = {}
    if 2 * counts[usual] < size:  # no norm to fall short of, except having links at all
        usual = min(s for s in strengths if s)
    for i, own in enumerate(strengths):
        if own >= usual or any(exempt(k) for k in paths[i]):
            continue
        lost = [names[j] for j in range(size) if j != i and not is_fast(paths[i][j])]
        where = f"; no fast path to {', '.join(lost)}" if lost else ""
        found[i] = f"{own} fast link(s) where its peers have {usual}{where}"
    return found


def nearest_nics(row: Sequence[str]) -> tuple[int, ...]:
    """NIC indices on the nearest kind of path of a device's NIC row; () when nothing is known."""
    ranks = {k: [i for i, kind in enumerate(row) if kind == k] for k in PROXIMITY}
    return next((tuple(found) for found in ranks.values() if found), ())


def links_in(paths: Sequence[Sequence[str]], cost: Callable[[str], Link]) -> Mapping[str, Link]:
    """Kind -> Link for every kind that occurs, sorted by name."""
    kinds = {k for row in paths for k in row} - {SELF, UNKNOWN}
    return {kind: cost(kind) for kind in sorted(kinds)}
