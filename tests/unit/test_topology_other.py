"""Host files, our own YAML, simulators' files, the recogniser, and damage of every kind."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from unirl_scale.comm.topology import read_topology, recognise, write_yaml
from unirl_scale.comm.topology.source import load
from unirl_scale.core.errors import PlanError

FIXTURES = Path(__file__).parent / "fixtures" / "topology"
FILES = sorted(FIXTURES.iterdir())
KINDS = {
    "smi_": "nvidia-smi topo -m",
    "npu_": "npu-smi info -t topo",
    "nccl_": "NCCL/RCCL/FlagCX topology XML",
    "rccl_": "NCCL/RCCL/FlagCX topology XML",
    "flag_": "NCCL/RCCL/FlagCX topology XML",
    "rank_": "HCCL rank table",
    "topo_v2": "HCCL topology file",
    "tree.": "SLURM topology.conf or scontrol show topology",
    "blocks.": "SLURM topology.conf or scontrol show topology",
    "scontrol_": "SLURM topology.conf or scontrol show topology",
    "topology.yaml": "SLURM topology.yaml",
    "addresses": "SLURM_TOPOLOGY_ADDR",
    "hosts": "host file",
    "native": "our YAML",
    "dims": "ASTRA-sim network",
    "fat": "htsim topology",
    "links_ns3": "ns-3 topology",
    "taccl": "TACCL topology",
    "topograph": "topograph model",
}


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.name)
def test_formats_are_told_by_content(path: Path) -> None:
    want = next(kind for start, kind in KINDS.items() if path.name.startswith(start))
    assert recognise(load(path.read_text())) == want


@pytest.mark.parametrize("path", [p for p in FILES if p.name != "nccl_graph.xml"], ids=lambda p: p.name)
def test_our_yaml_keeps_everything(path: Path) -> None:
    before = read_topology(path)
    after = read_topology(write_yaml(before))
    assert after.nodes == before.nodes
    assert after.box_of.tolist() == before.box_of.tolist()
    assert after.devices_per_node.tolist() == before.devices_per_node.tolist()
    assert [box.paths for box in after.boxes] == [box.paths for box in before.boxes]
    assert [dict(box.degraded) for box in after.boxes] == [dict(box.degraded) for box in before.boxes]
    assert [[d.nics for d in box.devices] for box in after.boxes] == [
        [d.nics for d in box.devices] for box in before.boxes
    ]
    assert [level.member.tolist() for level in after.levels] == [
        level.member.tolist() for level in before.levels
    ]


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.name)
def test_damage_ends_in_a_topology_or_a_refusal_with_a_hint(path: Path) -> None:
    text, rng = path.read_text(), random.Random(path.name)
    for _ in range(30):
        cut = text[: rng.randrange(1, len(text))]
        at = rng.randrange(len(text))
        changed = text[:at] + rng.choice(' x0,:"{}[]<>-\t') + text[at + 1 :] + "\n"
        lines = text.splitlines()
        del lines[rng.randrange(len(lines))]
        for damaged in (cut + "\n", changed, "\n".join(lines) + "\n"):
            try:
                read_topology(damaged)
            except PlanError as err:
                assert "; hint: " in str(err)


def test_host_file_spellings() -> None:
    topology = read_topology(FIXTURES / "hosts.txt")
    assert topology.nodes == ("gpu.a008", "gpu.a009", "gpu.b1n0")
    assert topology.devices_per_node.tolist() == [4, 4, 4]
    assert read_topology("a\nb\na\nb\n").devices_per_node.tolist() == [2, 2]
    assert read_topology("[fe80::7]:3\n").nodes == ("fe80::7",)
    assert read_topology("a\nb\n").num_devices is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a slots=0\nb slots=2\n", ":1: got 0 slots"),
        ("a slots=4\na slots=2\n", ":2: got a with slots again"),
        ("a slots=4 max_slots=2\n", ":1: got slots=4 over max_slots=2"),
        ("a:4 slots=2\n", ":1: got 4 and 2 slots"),
    ],
)
def test_bad_host_files(text: str, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        read_topology(text)


def test_our_yaml_reads_figures_links_down_and_levels() -> None:
    topology = read_topology(FIXTURES / "native.yaml")
    box = topology.boxes[0]
    assert sorted(box.degraded) == [1, 2]
    assert [nic.link.beta_gb_per_s for nic in box.nics] == [24.5, 12.5]
    assert box.devices[3].nics == (1,)
    assert topology.devices_per_node.tolist() == [4, 4, 4, -1]
    leaf = topology.levels[0].link
    assert leaf is not None
    assert (leaf.alpha_us, leaf.beta_gb_per_s) == (None, 12.0)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "beta_gb_per_s: 12.5",
            "beta_gb_per_s: 0",
            r":16: got 0; must be a positive number.*carries nothing",
        ),
        ("fabric: mesh", "fabirc: mesh", r":11: got key 'fabirc'.*did you mean fabric"),
        ("box: quad}", "box: hexa}", r":18: got box 'hexa'"),
        ("m[3-4]", "m[3-5]", r":22: got node m5"),
        ("[[1, 2]]", "[[1, 4]]", r":12: got \[1, 4\]"),
        (": 1\n", ": 2\n", r":1: got version 2"),
    ],
)
def test_our_yaml_is_strict(old: str, new: str, message: str) -> None:
    text = (FIXTURES / "native.yaml").read_text().replace(old, new, 1)
    with pytest.raises(PlanError, match=message):
        read_topology(text)


def test_astra_dimensions_and_unknown_figures() -> None:
    topology = read_topology(FIXTURES / "dims.yml")
    assert (len(topology.nodes), topology.num_devices) == (6, 24)
    assert topology.boxes[0].fabric == "mesh"
    assert topology.boxes[0].links["dim0"].alpha_us == 0.8
    dim1, dim2 = topology.levels
    assert dim1.member.tolist() == [0, 0, 0, 1, 1, 1]
    assert dim1.link is not None
    assert dim1.link.beta_gb_per_s is None
    assert dim2.link is not None
    assert (dim2.link.beta_gb_per_s, dim2.link.alpha_us) == (12.5, None)


def test_htsim_and_ns3_fabrics() -> None:
    fat = read_topology(FIXTURES / "fat.topo")
    assert [len(level.groups) for level in fat.levels] == [4, 2]
    assert fat.network is not None
    assert fat.network.beta_gb_per_s == 50.0
    flat = read_topology(FIXTURES / "links_ns3.txt")
    assert flat.levels[0].member.tolist() == [0, 0, 1, 1]
    assert flat.network is not None
    assert flat.network.beta_gb_per_s == 6.25
    assert "slowest" in flat.notes[0].what


def test_cut_fabrics_are_refused() -> None:
    text = (FIXTURES / "links_ns3.txt").read_text()
    with pytest.raises(PlanError, match="got 4 links; must be 5"):
        read_topology("\n".join(text.splitlines()[:-1]) + "\n")
    text = (FIXTURES / "fat.topo").read_text()
    with pytest.raises(PlanError, match="got 1 tiers of 2"):
        read_topology(text[: text.index("Tier 1")])


def test_taccl_rates_only_in_a_known_unit() -> None:
    topology = read_topology(FIXTURES / "taccl.json")
    assert topology.network is not None
    assert topology.network.beta_gb_per_s == 12.5
    other = read_topology((FIXTURES / "taccl.json").read_text().replace("1MB", "1KB"))
    assert other.network is not None
    assert other.network.beta_gb_per_s is None


def test_topograph_domains_come_below_the_switches() -> None:
    topology = read_topology(FIXTURES / "topograph.yaml")
    assert [level.name for level in topology.levels] == ["block", "leaf", "tier2"]
    assert topology.levels[0].member.tolist() == [0, 0, -1, -1, -1]


def test_unreadable_things_are_named(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"absent\.conf:1: got No such file"):
        read_topology(tmp_path / "absent.conf")
    (tmp_path / "empty").write_text(" \n")
    with pytest.raises(PlanError, match="empty file"):
        read_topology(tmp_path / "empty")
    (tmp_path / "core").write_bytes(b"\x7fELF\x00\x01")
    with pytest.raises(PlanError, match="binary file"):
        read_topology(tmp_path / "core")
    with pytest.raises(PlanError, match=r"one of: our YAML.*unchanged output"):
        read_topology("The quick brown fox\njumps over the dog\n")
    (tmp_path / "utf16").write_bytes((FIXTURES / "hosts.txt").read_text().encode("utf-16"))
    assert len(read_topology(tmp_path / "utf16").nodes) == 3


def test_topographs_older_form_lists_blocks_under_switches() -> None:
    text = (
        "switches:\n- name: core\n  switches: [leaf1, leaf2]\n- name: leaf1\n  capacity_blocks: [cb1, cb2]\n"
        "- name: leaf2\n  capacity_blocks: [cb3]\ncapacity_blocks:\n"
        "- name: cb1\n  nvlink: nvA\n  nodes: [n11, n12]\n"
        "- name: cb2\n  nodes: [n13]\n- name: cb3\n  nodes: ['n[21-22]']\n"
    )
    topology = read_topology(text)
    assert topology.nodes == ("n11", "n12", "n13", "n21", "n22")
    assert [level.name for level in topology.levels] == ["block", "leaf", "tier2"]
    assert topology.levels[0].member.tolist() == [0, 0, -1, -1, -1]
