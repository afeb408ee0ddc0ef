"""NCCL, RCCL and FlagCX XML: switches, merged NICs, static files, one-sided links, wrong documents."""

from __future__ import annotations

from pathlib import Path

import pytest

from unirl_scale.comm.topology import read_topology
from unirl_scale.core.errors import PlanError

FIXTURES = Path(__file__).parent / "fixtures" / "topology"


def test_devices_follow_dev_and_ranks_follow_rank() -> None:
    topology = read_topology(FIXTURES / "nccl_merged_nic.xml")
    box = topology.boxes[0]
    assert [d.busid for d in box.devices] == ["0000:43:00.0", "0000:c3:00.0", "0000:61:00.0"]
    assert topology.ranks is not None
    assert topology.ranks.device.tolist() == [0, 1, 2]


def test_links_to_several_switches_add_up() -> None:
    box = read_topology(FIXTURES / "nccl_merged_nic.xml").boxes[0]
    assert box.paths[0][1] == "NV18"
    assert box.links["NV18"].beta_gb_per_s == 450.0


def test_a_gpu_without_nvlink_among_peers_with_it_is_degraded() -> None:
    box = read_topology(FIXTURES / "nccl_merged_nic.xml").boxes[0]
    assert list(box.degraded) == [2]


def test_merged_nic_keeps_joint_speed_and_a_socket_nic_counts_once() -> None:
    topology = read_topology(FIXTURES / "nccl_merged_nic.xml")
    box = topology.boxes[0]
    found = {nic.name: (nic.ports, nic.link.beta_gb_per_s) for nic in box.nics}
    assert found == {"roce_2+roce_3": (2, 100.0), "eth0": (1, 1.25), "roce_0+roce_1": (2, 100.0)}
    assert any("listed again" in note.what for note in topology.notes)


def test_static_file_claims_no_device_links() -> None:
    topology = read_topology(FIXTURES / "nccl_static_npu.xml")
    box = topology.boxes[0]
    assert [d.vendor for d in box.devices] == ["npu", "npu"]
    assert box.paths[0][1] == "?"
    assert box.devices[0].nics == (0,)
    assert box.nics[0].link.beta_gb_per_s is None


def test_a_link_listed_on_one_side_only_is_filled_and_reported() -> None:
    topology = read_topology(FIXTURES / "rccl_ring.xml")
    box = topology.boxes[0]
    assert box.paths[1][2] == box.paths[2][1] == "XGMI1"
    assert box.paths[0][2] == "PHB"
    assert next(n.severity for n in topology.notes if "GPU2" in n.what) == "filled"
    assert box.devices[0].vendor == "rocm"


def test_link_counts_that_contradict_are_refused() -> None:
    text = (FIXTURES / "rccl_ring.xml").read_text().replace('11:00.0" count="2"', '11:00.0" count="1"')
    with pytest.raises(PlanError, match=r"2 link\(s\) from GPU0 to GPU1, but line 10 has 1 back"):
        read_topology(text)


def test_flagcx_accelerators_carry_their_nic() -> None:
    box = read_topology(FIXTURES / "flag_demo.xml").boxes[0]
    assert [box.nics[d.nics[0]].name for d in box.devices] == ["bond_0", "bond_0", "bond_1"]


def test_graph_dump_is_recognised_as_no_topology() -> None:
    with pytest.raises(PlanError, match=r"graph dump.*NCCL_TOPO_DUMP_FILE, not NCCL_GRAPH_DUMP_FILE"):
        read_topology(FIXTURES / "nccl_graph.xml")


def test_cut_xml_names_the_element_left_open() -> None:
    text = (FIXTURES / "rccl_ring.xml").read_text()
    with pytest.raises(PlanError, match=r"inside <gpu> opened on line 9.*the file is cut"):
        read_topology(text[: text.index("0000:13") + 3])


def test_system_without_accelerators_is_refused() -> None:
    with pytest.raises(PlanError, match="no accelerator"):
        read_topology('<system version="1">\n<cpu numaid="0"/>\n</system>')


def test_entities_are_refused() -> None:
    with pytest.raises(PlanError, match="DOCTYPE"):
        read_topology('<!DOCTYPE x [<!ENTITY a "b">]>\n<system/>')


def test_a_narrow_slot_among_wide_ones_is_reported() -> None:
    wide = (FIXTURES / "rccl_ring.xml").read_text()
    first = wide.index('link_width="16"')
    narrow = wide[:first] + 'link_width="8"' + wide[first + len('link_width="16"') :]
    notes = read_topology(narrow).notes
    assert any("GPU0: PCIe at 50 % of its peers' rate" in note.what for note in notes)
    assert not any("PCIe at" in note.what for note in read_topology(wide).notes)


def test_devices_of_all_different_strength_are_no_norm_to_fall_short_of() -> None:
    assert read_topology(FIXTURES / "rccl_ring.xml").boxes[0].degraded == {}
