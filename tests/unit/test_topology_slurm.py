"""SLURM: host lists, trees, blocks, topology.yaml, scontrol output and topology addresses."""

from __future__ import annotations

from pathlib import Path

import pytest

from unirl_scale.comm.topology import hostlist, read_topology
from unirl_scale.comm.topology.slurm_yaml import read as read_yaml_topology
from unirl_scale.comm.topology.source import load
from unirl_scale.core.errors import PlanError

FIXTURES = Path(__file__).parent / "fixtures" / "topology"


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("n[08-11]", ["n08", "n09", "n10", "n11"]),
        ("n[8-11]", ["n8", "n9", "n10", "n11"]),
        ("a.b[1,3].c,d", ["a.b1.c", "a.b3.c", "d"]),
        ("r[1-2]n[0-1]", ["r1n0", "r1n1", "r2n0", "r2n1"]),
    ],
)
def test_host_lists_expand_as_slurm_does(text: str, names: list[str]) -> None:
    assert hostlist.expand(text) == names


def test_fold_is_the_inverse_of_expand() -> None:
    names = hostlist.expand("n[008-011],n[14-15],login,x[7-12]y")
    assert hostlist.expand(hostlist.fold(names)) == names
    assert hostlist.fold(["n08", "n09", "n10"]) == "n[08-10]"


@pytest.mark.parametrize("text", ["n[1-", "n[3-1]", "n]1[", "a,,b", "n[a-b]", "n[1-99999999]"])
def test_bad_host_lists_raise(text: str) -> None:
    with pytest.raises(ValueError, match=r"\S"):
        hostlist.expand(text)


def test_tree_with_dots_padding_and_continuation() -> None:
    topology = read_topology(FIXTURES / "tree.conf")
    assert topology.nodes[:4] == ("gpu.a008", "gpu.a009", "gpu.a010", "gpu.a011")
    assert topology.nodes[-1] == "gpu.b2n1"
    leaf, tier2, tier3 = topology.levels
    assert leaf.groups == ("edge.0.01", "edge.0.02", "edge.1.01")
    assert tier2.member.tolist() == [0] * 7 + [1] * 4
    assert tier3.groups == ("core.0",)
    assert topology.num_devices is None


def test_several_roots_are_kept_apart_and_reported() -> None:
    topology = read_topology("SwitchName=a Nodes=x[1-2]\nSwitchName=b Nodes=x[3-4]\n")
    assert topology.levels[0].groups == ("a", "b")
    assert "2 separate trees" in topology.notes[0].what


def test_scontrol_output_repeats_nodes_above_the_leaves() -> None:
    topology = read_topology(FIXTURES / "scontrol_tree.txt")
    assert topology.nodes == tuple(f"x{i}" for i in range(6))
    assert [len(level.groups) for level in topology.levels] == [2, 1]


def test_scontrol_blocks_with_addresses_as_names() -> None:
    topology = read_topology(FIXTURES / "scontrol_block.txt")
    assert topology.nodes[1] == "10.2.88.5"
    assert [level.name for level in topology.levels] == ["block", "block4"]


def test_blocks_and_a_short_one() -> None:
    topology = read_topology(FIXTURES / "blocks.conf")
    assert topology.levels[0].member.tolist() == [0, 0, 0, 1, 1, 1, 2, 2]
    assert topology.levels[1].member.tolist() == [0, 0, 0, 0, 0, 0, 1, 1]
    assert {note.severity for note in topology.notes} == {"degraded", "info"}


def test_yaml_takes_the_default_and_names_the_others() -> None:
    topology = read_topology(FIXTURES / "topology.yaml")
    assert [level.groups for level in topology.levels] == [("l1", "l2"), ("r",)]
    assert "fast, cube" in topology.notes[-1].what
    source = load(FIXTURES / "topology.yaml")
    assert read_yaml_topology(source, "fast").levels[0].groups == ("k0", "k1")
    assert read_yaml_topology(source, "cube").levels[0].name == "torus"


def test_topology_addresses_with_dots_need_the_node_name() -> None:
    topology = read_topology(FIXTURES / "addresses.txt")
    assert topology.levels[0].groups == ("leaf.1", "leafB")
    text = (FIXTURES / "addresses.txt").read_text().replace("SLURMD_NODENAME=io-3", "X=1")
    with pytest.raises(PlanError, match=r"leaf\.1\.io-3, more parts than switch\.node.*SLURMD_NODENAME"):
        read_topology(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "SwitchName=a Switches=b,c\nSwitchName=b Nodes=n1\n",
            r":1: got switch c under a, but no line defines it",
        ),
        ("SwitchName=a Nodes=n1\nSwitchName=a Nodes=n2\n", r":2: got switch a again \(first on line 1\)"),
        ("SwitchName=a Nodes=n[1-2]\nSwitchName=b Nodes=n2\n", r":2: got node n2 under b and a"),
        ("SwitchName=a Switches=b\nSwitchName=b Switches=a\n", r":1: got switch a above itself"),
        ("SwitchName=a Nodes=n1 Switches=b\nSwitchName=b Nodes=n2\n", r":1: .*both Switches and Nodes"),
        ("SwitchName=a Nodes=n[1-4\n", r":1: .*never closed"),
        ("SwitchName=a\n", r":1: got switch a without children"),
        ("SwitchName=a Nodes=n1\nBlockName=b Nodes=n2\n", r":2: got switches \(line 1\) and blocks together"),
        ("BlockName=b Nodes=n[1-4]\nBlockSizes=4,12\n", r"block size 12 over a base of 4"),
        ("SwitchName=a Nodez=n1\n", r":1: got key Nodez"),
        (
            "SwitchName=a Nodes=n1\nSwitchName=p Switches=a\nSwitchName=q Switches=a\n",
            r":3: got switch a under q and p",
        ),
    ],
)
def test_bad_trees_are_refused_with_the_line(text: str, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        read_topology(text)
