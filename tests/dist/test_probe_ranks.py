"""A probe over gloo ranks returns the times of every pair and collective on every rank. The figures are not
asserted."""

from __future__ import annotations

from tests.dist.run_ranks import RankPool
from unirl_scale.comm.groups import GroupFactory
from unirl_scale.comm.probe import GroupSample, Sample, probe_groups, probe_rounds
from unirl_scale.comm.probe_ranks import probe, probe_collectives


def measure(factory: GroupFactory) -> list[Sample]:
    """Four ranks as if on two nodes."""
    rounds = probe_rounds(["a", "a", "b", "b"])
    return probe(factory.world, rounds, sizes=(1024, 65536, 1 << 20), repeats=4)


def test_every_rank_learns_every_pair(run_ranks: RankPool) -> None:
    results = run_ranks(measure, 4)
    assert all(r == results[0] for r in results)
    found = {(s.kind, s.pair) for s in results[0]}
    assert found == {("node", (0, 1)), ("node", (2, 3)), ("nic", (0, 2)), ("nic", (1, 3))}
    assert all(t > 0 for s in results[0] for t in s.time_us.values())


def measure_groups(factory: GroupFactory) -> list[GroupSample]:
    """Five ranks: two on each of two nodes, and one on a third, which stands aside."""
    kinds = probe_groups(["a", "a", "b", "b", "c"])
    return probe_collectives(factory, kinds, sizes=(1024, 65536, 1 << 20), repeats=3)


def test_every_rank_learns_every_collective(run_ranks: RankPool) -> None:
    results = run_ranks(measure_groups, 5)
    assert all(r == results[0] for r in results)
    found = {(s.kind, s.collective, s.ranks) for s in results[0]}
    assert found == {(k, c, 2) for k in ("node", "nic") for c in ("all_gather", "all_to_all")}
    assert all(t > 0 for s in results[0] for t in s.time_us.values())
