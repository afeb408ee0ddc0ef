"""What a probe measures and what it concludes; no ranks needed."""

from __future__ import annotations

import pytest

from unirl_scale.comm.probe import PROBE_SIZES, Sample, evaluate, probe_rounds, probe_yaml, probed_topology
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
