"""What a probe measures and what it concludes; no ranks needed."""

from __future__ import annotations

import pytest

from unirl_scale.comm.cost import Tier, best_one_tier
from unirl_scale.comm.cost_ordered import choose
from unirl_scale.comm.plan_machine import survey
from unirl_scale.comm.probe import (
    PROBE_SIZES,
    PROBED,
    GroupSample,
    Sample,
    evaluate,
    probe_groups,
    probe_rounds,
    probe_yaml,
    probed_topology,
)
from unirl_scale.comm.topology import MACHINES, cluster, merge, read_topology
from unirl_scale.core.errors import PlanError


def sample(kind: str, pair: tuple[int, int], base_us: float, gb_per_s: float) -> Sample:
    """Exact times of a link."""
    return Sample(kind=kind, pair=pair, time_us={n: base_us + n / gb_per_s / 1e3 for n in PROBE_SIZES})


def test_rounds_cover_each_class_with_disjoint_pairs() -> None:
    nodes = ["a"] * 4 + ["b"] * 4 + ["c"] * 4 + ["d"] * 4
    rounds = probe_rounds(nodes, [0] * 8 + [1] * 8)
    assert [r.kind for r in rounds] == ["node", "node", "nic", "tier"]
    for turn in rounds:
        used = [rank for pair in turn.pairs for rank in pair]
        assert len(used) == len(set(used)) == 16
    assert all(nodes[a] == nodes[b] for a, b in rounds[0].pairs)
    assert set(rounds[2].pairs) >= {(0, 4), (8, 12)}
    assert rounds[3].peer(0) in range(8, 16)


def test_one_node_has_no_network_round() -> None:
    assert {r.kind for r in probe_rounds(["a"] * 3)} == {"node"}
    assert probe_rounds(["a"]) == ()


def test_figures_are_recovered_and_slow_pairs_named() -> None:
    samples = [sample("node", (0, 1), 9.0, 300.0), sample("node", (2, 3), 9.0, 300.0)]
    rates = {(0, 4): 48.0, (1, 5): 48.0, (2, 6): 20.0}
    samples += [sample("nic", pair, 15.0, rate) for pair, rate in rates.items()]
    node, nic = evaluate(samples)
    assert node.link().beta_gb_per_s == pytest.approx(300.0, rel=1e-3)
    assert node.link().alpha_us == pytest.approx(9.0, rel=1e-3)
    assert nic.link().beta_gb_per_s == pytest.approx(48.0, rel=1e-3)
    assert len(nic.slow) == 1
    assert nic.slow[0].startswith("ranks 2 and 6: ")
    assert node.slow == ()


def test_the_written_yaml_replaces_the_data_sheet() -> None:
    topology = cluster(MACHINES["h100-8"], 2)
    text = probe_yaml(topology, [sample("node", (0, 1), 9.0, 300.0), sample("nic", (0, 8), 15.0, 48.0)])
    again = merge([read_topology(text)])
    assert again.boxes[0].links["NV18"].beta_gb_per_s == pytest.approx(300.0, rel=1e-3)
    assert again.network is not None
    assert again.network.alpha_us == pytest.approx(15.0, rel=1e-3)
    assert "probed" in again.network.source


def test_slow_pairs_become_notes() -> None:
    samples = [sample("nic", (i, i + 4), 15.0, 48.0 if i else 20.0) for i in range(3)]
    topology = probed_topology(cluster(MACHINES["h100-8"], 2), evaluate(samples))
    assert [note.severity for note in topology.notes] == ["degraded"]


def test_nothing_measured_is_refused() -> None:
    with pytest.raises(PlanError, match="no measurement"):
        evaluate([])


def group_sample(kind: str, collective: str, ranks: int, alpha_us: float, gb_per_s: float) -> GroupSample:
    """Exact times of a collective: (n - 1) alpha and a member's bytes over its rate."""
    share = (ranks - 1) / ranks
    times = {n: (ranks - 1) * alpha_us + share * n / gb_per_s / 1e3 for n in PROBE_SIZES}
    return GroupSample(kind=kind, collective=collective, ranks=ranks, time_us=times)  # type: ignore[arg-type]


def test_groups_are_the_ranks_of_a_node_and_their_likes_on_others() -> None:
    nodes = ["a"] * 4 + ["b"] * 4 + ["c"] * 2
    assert probe_groups(nodes) == {
        "node": ((0, 1, 2, 3), (4, 5, 6, 7)),
        "nic": ((0, 4), (1, 5), (2, 6), (3, 7)),
    }
    assert probe_groups(["a"] * 3) == {"node": ((0, 1, 2),)}
    assert probe_groups(["a", "b"]) == {"nic": ((0, 1),)}
    assert probe_groups([]) == {}


def measured_tiers(size: int) -> tuple[Tier, ...]:
    """Of a box whose pairs reach 300 GB/s and whose collectives do not, from YAML."""
    pairs = [sample("node", (0, 1), 9.0, 300.0), sample("nic", (0, 8), 15.0, 48.0)]
    groups = [group_sample("node", c, 8, 6.0, r) for c, r in zip(PROBED, (200.0, 350.0))]
    text = probe_yaml(cluster(MACHINES["h100-8"], 2), pairs, groups)
    return survey(merge([read_topology(text)])).tiers((size, 1))


@pytest.mark.parametrize("size", [2, 4, 8])
def test_a_measured_collective_is_predicted_as_measured(size: int) -> None:
    inner = measured_tiers(size)[0]
    gather = best_one_tier("all_gather", 1e9, inner)
    share = (size - 1) / size
    assert gather.algorithm == "measured"
    assert gather.time_us == pytest.approx((size - 1) * 6.0 + share * 1e9 / 200e3, rel=1e-2)
    reduced = choose("reduce_scatter", 1e9, measured_tiers(size), ordered=True).cost
    assert reduced.time_us == pytest.approx((size - 1) * 6.0 + share * 1e9 / 350e3, rel=1e-2)


def test_a_link_carries_at_least_what_a_collective_reached() -> None:
    assert measured_tiers(8)[0].beta_gb_per_s == pytest.approx(350.0, rel=1e-2)


def test_what_was_not_measured_keeps_the_links_figures() -> None:
    broadcast = best_one_tier("broadcast", 1e6, measured_tiers(8)[0])
    assert broadcast.algorithm != "measured"
