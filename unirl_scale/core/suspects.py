"""Who is the odd one out: copies that differ, ranks that are slow. Plain values in, ranks out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median


@dataclass(frozen=True, slots=True, kw_only=True)
class Disagreement:
    """Copies of the same bytes that differ.

    Attributes:
        name: of what they are copies.
        odd: ranks that differ from the majority; () where there is none, as with two ranks.
        others: the rest of the ranks that hold a copy.
    """

    name: str
    odd: tuple[int, ...]
    others: tuple[int, ...]

    def text(self, nodes: Sequence[str]) -> str:
        """For people.

        Args:
            nodes: node of each rank.
        """
        if not self.others:
            return f"{listed(self.odd, nodes)}: {self.name} differ from the copy that was made of them"
        if self.odd:
            return f"{listed(self.odd, nodes)}: {self.name} differ from those of {listed(self.others)}"
        return f"{listed(self.others, nodes)}: {self.name} differ, and no majority tells which are right"


def listed(ranks: Sequence[int], nodes: Sequence[str] = (), most: int = 8) -> str:
    """E.g. `ranks 2 (node-1), 3 (node-1)`; the nodes are left out where none are given."""
    shown = ", ".join(f"{rank} ({nodes[rank]})" if nodes else f"{rank}" for rank in ranks[:most])
    more = f", ... ({len(ranks)} in all)" if len(ranks) > most else ""
    return f"rank{'s' * (len(ranks) > 1)} {shown}{more}"


def odd_copies(held: Sequence[Mapping[str, str]]) -> list[Disagreement]:
    """Compare copies by their checksums.

    Args:
        held: for each rank, copy name -> checksum. Ranks that share a name should share its checksum.

    Returns:
        In the order of first appearance; empty when all copies are equal.
    """
    names: dict[str, dict[int, str]] = {}
    for rank, copies in enumerate(held):
        for name, checksum in copies.items():
            names.setdefault(name, {})[rank] = checksum
    found = []
    for name, by_rank in names.items():
        (winner, votes), *others = Counter(by_rank.values()).most_common(2)
        if others:
            clear = 2 * votes > len(by_rank)
            odd = tuple(r for r, checksum in by_rank.items() if clear and checksum != winner)
            rest = tuple(r for r in by_rank if r not in odd)
            found.append(Disagreement(name=name, odd=odd, others=rest))
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Straggler:
    """A rank that was slow for several steps in a row.

    Attributes:
        ratio: its seconds of computing in the newest step to the median of its peers.
        phase: the part of the step in which it loses most against the median.
        steps: slow steps in a row.
    """

    rank: int
    ratio: float
    phase: str
    steps: int

    def text(self, nodes: Sequence[str]) -> str:
        """For people.

        Args:
            nodes: node of each rank.
        """
        return (
            f"{listed((self.rank,), nodes)} computes {self.ratio:.1f} times as long as the median of its "
            f"peers, {self.steps} steps in a row, most of it in {self.phase}"
        )


class Stragglers:
    """Finds ranks that compute longer than the others, step after step.

    A rank is held against the median of its peers, which have the same work; half of them must be slow
    before that moves. A rank without peers is never slow.

    Args:
        ratio: to the median, from which a rank counts as slow; 0 = never.
        places: for each rank, what its work follows from, e.g. its pipeline rank; peers have the same.
        steps: slow steps in a row after which it is reported, once until it was faster again.
    """

    def __init__(self, ratio: float, places: Sequence[Hashable], steps: int = 5) -> None:
        self._ratio, self._steps = ratio, steps
        self._peers = [[r for r, other in enumerate(places) if other == place] for place in places]
        self._slow = [0] * len(places)

    def note(self, computing_s: Mapping[str, Sequence[float]]) -> list[Straggler]:
        """Take in a step.

        Args:
            computing_s: phase -> for each rank, seconds it computed, outside collectives.

        Returns:
            Those to report now.
        """
        totals, reports = total_s(computing_s), []
        for rank, seconds in enumerate(totals):
            middle = self._median(totals, rank)
            self._slow[rank] = self._slow[rank] + 1 if 0 < self._ratio * middle < seconds else 0
            if self._slow[rank] == self._steps:
                lost_s = {p: s[rank] - self._median(s, rank) for p, s in computing_s.items()}
                phase = max(lost_s, key=lost_s.__getitem__)
                ratio = seconds / middle
                reports.append(Straggler(rank=rank, ratio=ratio, phase=phase, steps=self._steps))
        return reports

    def _median(self, seconds: Sequence[float], rank: int) -> float:
        return median(seconds[peer] for peer in self._peers[rank])


def total_s(computing_s: Mapping[str, Sequence[float]]) -> list[float]:
    """Seconds of each rank over all phases."""
    return [sum(seconds) for seconds in zip(*computing_s.values(), strict=True)]


def step_balance(computing_s: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Metrics of how evenly ranks computed; the loop logs them with the step after.

    Args:
        computing_s: phase -> for each rank, seconds it computed.

    Returns:
        `ranks/median_s`, `ranks/slowest_s` and the slowest rank's number, `ranks/slowest`; and for each phase
        `ranks/PHASE_slowest_ratio`, its slowest rank's seconds to the median (absent where that is 0).
    """
    totals = total_s(computing_s)
    if not totals:
        return {}
    slowest = max(range(len(totals)), key=totals.__getitem__)
    out = {
        "ranks/median_s": median(totals),
        "ranks/slowest_s": totals[slowest],
        "ranks/slowest": float(slowest),
    }
    for phase, seconds in computing_s.items():
        if median(seconds) > 0:
            out[f"ranks/{phase}_slowest_ratio"] = max(seconds) / median(seconds)
    return out
