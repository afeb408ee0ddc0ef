"""Joining files: allocation, tree, box and figures, and the ways they can contradict each other."""

from __future__ import annotations

from pathlib import Path

import pytest

from unirl_scale.comm.topology import MACHINES, cluster, merge, read_topology
from unirl_scale.core.errors import PlanError

FIXTURES = Path(__file__).parent / "fixtures" / "topology"
YAML = "unirl_scale_topology: 1\n"


def test_host_file_selects_tree_places_and_box_describes() -> None:
    parts = [
        read_topology(FIXTURES / name) for name in ("hosts.txt", "tree.conf", "smi_quad_shuffled_ansi.txt")
    ]
    topology = merge(parts)
    assert topology.nodes == ("gpu.a008", "gpu.a009", "gpu.b1n0")
    assert topology.num_devices == 12
    assert {int(b) for b in topology.box_of} == {0}
    assert [level.groups for level in topology.levels] == [
        ("edge.0.01", "edge.1.01"),
        ("agg.0", "agg.1"),
        ("core.0",),
    ]


def test_the_order_of_the_files_does_not_matter() -> None:
    names = ("hosts.txt", "tree.conf", "smi_quad_shuffled_ansi.txt")
    one = merge([read_topology(FIXTURES / name) for name in names])
    two = merge([read_topology(FIXTURES / name) for name in reversed(names)])
    assert one.nodes == two.nodes
    assert [level.member.tolist() for level in one.levels] == [level.member.tolist() for level in two.levels]


def test_operator_figures_win_over_defaults() -> None:
    given = read_topology(
        YAML + "links:\n  NV6: {beta_gb_per_s: 300}\n  nic: {beta_gb_per_s: 25, alpha_us: 9}\n"
    )
    topology = merge([read_topology(FIXTURES / "smi_quad_shuffled_ansi.txt"), given])
    assert topology.boxes[0].links["NV6"].beta_gb_per_s == 300
    assert topology.boxes[0].nics[0].link.beta_gb_per_s == 25
    assert topology.network is not None
    assert topology.network.alpha_us == 9


def test_rank_table_and_matrix_describe_one_machine() -> None:
    matrix = read_topology("     NPU0 NPU1\nNPU0 X    HCCS\nNPU1 HCCS X\n")
    topology = merge([read_topology(FIXTURES / "rank_v12.json"), matrix])
    assert topology.ranks is not None
    assert topology.boxes[topology.box_of[0]].paths[0][1] == "HCCS"


def test_static_xml_takes_device_links_from_the_matrix() -> None:
    matrix = read_topology("     NPU0 NPU1\nNPU0 X    HCCS\nNPU1 HCCS X\n")
    box = merge([read_topology(FIXTURES / "nccl_static_npu.xml"), matrix]).boxes[0]
    assert box.paths[0][1] == "HCCS"
    assert box.devices[0].nics == (0,)
    assert box.devices[0].busid == "0000:0a:00.0"


def test_contradictions_between_files_are_refused() -> None:
    tree = read_topology(FIXTURES / "tree.conf")
    with pytest.raises(PlanError, match=r"got nodes gpu\.zz that slurm-conf-tree does not list"):
        merge([tree, read_topology("gpu.zz slots=4\n")])
    with pytest.raises(PlanError, match=r"got 8 devices on node gpu\.a008, but the box file has 4"):
        merge(
            [
                tree,
                read_topology("gpu.a008 slots=8\n"),
                read_topology(FIXTURES / "smi_quad_shuffled_ansi.txt"),
            ]
        )
    one = read_topology(YAML + "links:\n  nic: {beta_gb_per_s: 25}\n")
    two = read_topology(YAML + "links:\n  nic: {beta_gb_per_s: 50}\n")
    with pytest.raises(PlanError, match=r"links\.nic: got 25\.0 GB/s.* and 50\.0"):
        merge([one, two])
    with pytest.raises(PlanError, match=r"boxes of 4 and 8 devices"):
        merge(
            [
                read_topology(FIXTURES / "smi_quad_shuffled_ansi.txt"),
                read_topology(FIXTURES / "smi_hybrid_cube.txt"),
            ]
        )


def test_a_short_name_for_a_full_one_gets_a_hint() -> None:
    tree = read_topology("SwitchName=s Nodes=n1.site.org,n2.site.org\n")
    with pytest.raises(PlanError, match=r"n1\.site\.org looks like n1; use one spelling"):
        merge([tree, read_topology("n1 slots=2\nn2 slots=2\n")])


def test_presets_are_whole_machines() -> None:
    topology = cluster(MACHINES["910b-8"], 6, tiers=(2, 6))
    assert topology.num_devices == 48
    assert topology.nodes[-1] == "n5"
    assert topology.levels[0].member.tolist() == [0, 0, 1, 1, 2, 2]
