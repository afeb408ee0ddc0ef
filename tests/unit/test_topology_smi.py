"""nvidia-smi and npu-smi matrices: shuffled, coloured, ragged, cut, contradictory, with dead links."""

from __future__ import annotations

from pathlib import Path

import pytest

from unirl_scale.comm.topology import read_topology
from unirl_scale.core.errors import PlanError

FIXTURES = Path(__file__).parent / "fixtures" / "topology"


def test_shuffled_coloured_columns_are_read_by_name() -> None:
    box = read_topology(FIXTURES / "smi_quad_shuffled_ansi.txt").boxes[0]
    assert [d.name for d in box.devices] == ["GPU0", "GPU1", "GPU2", "GPU3"]
    assert [d.numa for d in box.devices] == [1, 1, 0, 0]
    assert box.devices[2].cpus == "0-31,64-95"
    nearest = [box.nics[d.nics[0]].name for d in box.devices]
    assert nearest == ["rdma_c", "rdma_a", "rdma_d", "rdma_b"]


def test_six_links_to_each_of_three_peers_is_a_mesh_of_wires() -> None:
    box = read_topology(FIXTURES / "smi_quad_shuffled_ansi.txt").boxes[0]
    assert box.fabric == "mesh"
    assert box.links["NV6"].beta_gb_per_s == 150.0


def test_a_nic_without_a_rate_is_unknown_and_not_zero() -> None:
    box = read_topology(FIXTURES / "smi_quad_shuffled_ansi.txt").boxes[0]
    assert {nic.link.beta_gb_per_s for nic in box.nics} == {None}


def test_cut_file_names_the_dead_device_and_fills_only_what_a_switch_explains() -> None:
    topology = read_topology(FIXTURES / "smi_cut_gpu5_dead.txt")
    box = topology.boxes[0]
    assert box.fabric == "switch"
    assert list(box.degraded) == [5]
    assert "GPU5" in topology.degraded()[0]
    assert box.paths[6][7] == "NV12"
    assert any("GPU6-GPU7" in note.what and note.severity == "filled" for note in topology.notes)
    assert box.devices[7].numa is None
    assert box.devices[7].cpus == ""


def test_hybrid_cube_of_unequal_pairs_has_no_degraded_device() -> None:
    box = read_topology(FIXTURES / "smi_hybrid_cube.txt").boxes[0]
    assert box.degraded == {}
    assert {sum(int(k[2:]) for k in row if k.startswith("NV")) for row in box.paths} == {6}


def test_two_dies_of_a_chip_and_the_switch_between_chips() -> None:
    box = read_topology(FIXTURES / "npu_three_chips.txt").boxes[0]
    assert box.paths[2][3] == "SIO"
    assert box.paths[2][4] == "HCCS_SW"
    assert box.fabric == "switch"
    assert box.links["SIO"].beta_gb_per_s is None


def test_mesh_pair_down_degrades_its_two_ends_only() -> None:
    box = read_topology(FIXTURES / "npu_mesh_pair_down.txt").boxes[0]
    assert sorted(box.degraded) == [1, 4]
    assert "NPU4" in box.degraded[1]


def test_ragged_rows_are_filled_from_the_other_rows_and_reported() -> None:
    topology = read_topology(FIXTURES / "npu_ragged.txt")
    box = topology.boxes[0]
    assert all(box.paths[i][j] == "UB" for i in range(5) for j in range(5) if i != j)
    assert {note.line for note in topology.notes if note.severity == "filled"} >= {2, 5}
    assert box.devices[3].cpus == ""


def test_rows_that_disagree_are_refused_with_both_lines() -> None:
    text = (FIXTURES / "npu_mesh_pair_down.txt").read_text()
    lines = text.splitlines()
    lines[2] = lines[2].replace("PHB", "HCCS")
    with pytest.raises(PlanError, match=r"<text>:6: got PHB from NPU4 to NPU1, but line 3 has HCCS"):
        read_topology("\n".join(lines) + "\n")


def test_two_machines_in_one_file_are_refused() -> None:
    text = (FIXTURES / "smi_hybrid_cube.txt").read_text()
    with pytest.raises(PlanError, match=r":10: .*second header.*one file a node"):
        read_topology(text + text)


def test_a_cell_cut_in_half_does_not_contradict_the_whole_one() -> None:
    text = (FIXTURES / "smi_cut_gpu5_dead.txt").read_text()
    lines = text.splitlines()[:5]
    lines[4] = lines[4][: lines[4].index("NV12") + 3]  # "NV1" of "NV12", no line end
    assert read_topology("\n".join(lines)).boxes[0].paths[3][0] == "NV12"


@pytest.mark.parametrize(
    ("text", "word"),
    [
        (
            "NVIDIA-SMI has failed because it couldn't communicate with the driver.\nMake sure\n",
            "fix the driver",
        ),
        ("\tGPU0\tGPU1\n GPU0\tX\tOK\n GPU1\tOK\tX\n", "nvidia-smi topo -m"),
        ("\tGPU0\tGPU1\tCPU Affinity\n", "header without rows"),
    ],
)
def test_other_outputs_of_the_tool_are_named(text: str, word: str) -> None:
    with pytest.raises(PlanError, match=word):
        read_topology(text)
