"""HCCL rank tables of every version, and the topology file of 2.0."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from unirl_scale.comm.topology import read_topology
from unirl_scale.core.errors import PlanError

FIXTURES = Path(__file__).parent / "fixtures" / "topology"


def test_legacy_ranks_follow_file_order_and_say_so() -> None:
    topology = read_topology(FIXTURES / "rank_legacy.json")
    assert topology.nodes == ("rackA", "rackB")
    assert topology.ranks is not None
    assert topology.ranks.node.tolist() == [0, 0, 1, 1]
    assert topology.boxes[0].devices[0].index == 4
    assert "file order" in topology.notes[0].what


def test_version_1_2_places_ranks_and_super_pods_by_their_ids() -> None:
    topology = read_topology(FIXTURES / "rank_v12.json")
    assert topology.ranks is not None
    assert topology.ranks.device.tolist() == [1, 0, 0, 1, 0, 1]
    assert topology.ranks.addresses[0] == "10.1.2.2"
    assert topology.ranks.super_devices == ("3", "2", "0", "1", "0", "1")
    (pods,) = topology.levels
    assert (pods.name, pods.groups, pods.member.tolist()) == ("pod", ("7", "9"), [0, 0, 1])


def test_version_2_takes_nodes_from_layer_0_and_pods_from_layer_1() -> None:
    topology = read_topology(FIXTURES / "rank_v2.json")
    assert topology.nodes == ("rack7", "rack8")
    assert topology.num_devices == 4
    assert topology.levels[0].member.tolist() == [0, 0]
    assert "/opt/topo/four.json" in topology.notes[0].what


def test_topology_file_gives_paths_and_drops_comments() -> None:
    box = read_topology(FIXTURES / "topo_v2.json").boxes[0]
    assert all(box.paths[i][j] == "UB" for i in range(3) for j in range(3) if i != j)
    assert box.fabric == "mesh"


def test_a_masked_server_id_that_repeats_is_two_machines() -> None:
    text = (FIXTURES / "rank_v12.json").read_text()
    table = json.loads(text)
    table["version"] = "1.0"
    del table["super_pod_list"]
    for server in table["server_list"]:
        server["server_id"] = "10.*.*.*"
    topology = read_topology(json.dumps(table))
    assert len(topology.nodes) == 3
    assert "repeats" in topology.notes[0].what


Change = Callable[[dict[str, Any]], Any]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.update(status="initializing"), "status 'initializing'"),
        (lambda t: t.update(server_count="4"), "server_count '4', but 3 are listed"),
        (lambda t: t.update(version="3.1"), "version '3.1'"),
        (lambda t: t["server_list"][0]["device"][0].update(rank_id="1"), "rank_id 1 twice"),
        (lambda t: t["server_list"][2]["device"][1].update(rank_id="8"), "without rank 5"),
        (lambda t: t["server_list"][0]["device"][1].update(device_id="1"), "listed twice"),
        (
            lambda t: t["server_list"][0]["device"][1].update(super_device_id="1"),
            "super_device_id 1 for ranks",
        ),
        (lambda t: t["super_pod_list"][0]["server_list"].pop(), "server 's-b' in no super pod"),
        (lambda t: t["super_pod_list"][1]["server_list"].append({"server_id": "s-a"}), "in two super pods"),
        (lambda t: t["server_list"][1].update(device="none"), "device 'none'"),
    ],
)
def test_contradictions_are_refused_with_a_line(change: Change, message: str) -> None:
    table = json.loads((FIXTURES / "rank_v12.json").read_text())
    change(table)
    with pytest.raises(PlanError, match=message) as caught:
        read_topology(json.dumps(table, indent=1))
    assert str(caught.value).startswith("<text>:")


def test_cut_json_says_cut() -> None:
    text = (FIXTURES / "rank_v12.json").read_text()
    with pytest.raises(PlanError, match=r"the end of the file.*the file is cut"):
        read_topology(text[: len(text) // 2].rstrip())


def test_a_key_given_twice_is_refused() -> None:
    text = (
        (FIXTURES / "rank_v12.json")
        .read_text()
        .replace('"version": "1.2"', '"version": "1.2", "version": "1.0"')
    )
    with pytest.raises(PlanError, match="key 'version' twice"):
        read_topology(text)
