"""NCCL variables, and the files that carry a plan to launchers and vendors."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.unit.planning import run_config
from unirl_scale.comm.environment_files import (
    addresses_of,
    host_file,
    nccl_topology,
    rank_file,
    rank_table,
)
from unirl_scale.comm.environment_nccl import NcclJob, check_nccl, compute_nics, nccl_environment
from unirl_scale.comm.plan import Assumptions
from unirl_scale.comm.plan_build import make_plan
from unirl_scale.comm.topology import MACHINES, cluster, make_box, merge, read_topology
from unirl_scale.comm.topology.model import Link
from unirl_scale.core.config import MeshConfig
from unirl_scale.core.errors import PlanError

FIXTURES = Path(__file__).parent / "fixtures" / "topology"
H100 = NcclJob(nodes=4, box=MACHINES["h100-8"])
PCIE = NcclJob(nodes=1, box=make_box(4, Link(kind="PHB")))


@pytest.mark.parametrize(
    "env",
    [
        {"NCCL_ALGO": "Ring,Tree", "NCCL_PROTO": "Simple"},
        {"NCCL_ALGO": "^NVLS,NVLSTree"},
        {"NCCL_ALGO": "allreduce:tree,nvls;allgather:ring,pat"},
        {"NCCL_PROTO": "^LL128", "NCCL_NTHREADS": "512", "NCCL_MIN_CTAS": "8", "NCCL_MAX_CTAS": "16"},
        {"NCCL_IB_HCA": "=nic0,nic1:1", "NCCL_IB_TIMEOUT": "22", "NCCL_NET_GDR_LEVEL": "PHB"},
    ],
)
def test_legal_settings_pass(env: dict[str, str]) -> None:
    assert check_nccl(env, H100) == []


@pytest.mark.parametrize(
    ("job", "env", "words"),
    [
        (H100, {"NCCL_ALGO": "Rings"}, ("must be one of ring, tree",)),
        (H100, {"NCCL_ALGO": "allgather:tree"}, ("an algorithm allgather has", "ring, nvls, pat")),
        (H100, {"NCCL_ALGO": "gather:ring"}, ("must name functions of",)),
        (H100, {"NCCL_ALGO": "allreduce:ring;tree"}, ("a function in each part",)),
        (H100, {"NCCL_PROTO": "LL256"}, ("LL, LL128 and Simple",)),
        (PCIE, {"NCCL_PROTO": "LL128"}, ("LL128 without NVLink",)),
        (H100, {"NCCL_P2P_DISABLE": "1"}, ("turns NVLink off",)),
        (H100, {"NCCL_NTHREADS": "300"}, ("64, 128, 256, 512",)),
        (H100, {"NCCL_MIN_CTAS": "32", "NCCL_MAX_CTAS": "16"}, ("at most NCCL_MAX_CTAS=16",)),
        (H100, {"NCCL_IB_TIMEOUT": "30"}, ("1 to 22", "22")),
        (H100, {"NCCL_IB_HCA": "=mlx5_0"}, ("must name a NIC of the topology",)),
        (H100, {"NCCL_SOKET_IFNAME": "eth0"}, ("did you mean NCCL_SOCKET_IFNAME",)),
        (H100, {"NCCL_NET_GDR_LEVEL": "NEAR"}, ("LOC, NVL, PIX",)),
    ],
)
def test_each_limit_is_refused_by_name(job: NcclJob, env: dict[str, str], words: tuple[str, ...]) -> None:
    lines = [str(p) for p in check_nccl(env, job)]
    assert len(lines) == 1
    assert all(word in lines[0] for word in words)


def test_repeatable_reductions_pin_algorithm_and_protocol_and_keep_switches_from_adding() -> None:
    topology = cluster(MACHINES["h100-8"], 2)
    plan = make_plan(run_config(MeshConfig(tp=4, dp=4)), topology)
    variables = nccl_environment(plan, topology, deterministic=True).variables
    assert (variables["NCCL_ALGO"], variables["NCCL_PROTO"], variables["NCCL_NVLS_ENABLE"]) == (
        "Ring",
        "Simple",
        "0",
    )
    assert "NCCL_ALGO" not in nccl_environment(plan, topology).variables
    with pytest.raises(PlanError, match="the switch adds in an order of its own"):
        nccl_environment(plan, topology, {"NCCL_NVLS_ENABLE": "1", "NCCL_ALGO": "NVLS"}, deterministic=True)


def test_management_nics_are_left_out() -> None:
    box = read_topology(FIXTURES / "smi_quad_shuffled_ansi.txt").boxes[0]
    assert compute_nics(box) == ("rdma_a", "rdma_b", "rdma_c", "rdma_d")
    topology = merge(
        [read_topology("h1 slots=4\nh2 slots=4\n"), read_topology(FIXTURES / "smi_quad_shuffled_ansi.txt")]
    )
    plan = make_plan(run_config(MeshConfig(tp=4, dp=2)), topology)
    assert nccl_environment(plan, topology).variables["NCCL_IB_HCA"] == "=rdma_a,rdma_b,rdma_c,rdma_d"


def test_host_files_follow_the_ranks() -> None:
    plan = make_plan(run_config(MeshConfig(tp=8, dp=2)), cluster(MACHINES["h100-8"], 2))
    assert host_file(plan) == "n0 slots=8\nn1 slots=8\n"
    assert host_file(plan, "mpich") == "n0:8\nn1:8\n"
    assert host_file(plan, "slurm").splitlines() == ["n0"] * 8 + ["n1"] * 8
    mixed = replace(
        plan, node=np.array([0, 1] * 8, np.int32), device=np.repeat(np.arange(8, dtype=np.int32), 2)
    )
    with pytest.raises(PlanError, match="visits 2 nodes 16 times"):
        host_file(mixed)
    assert rank_file(mixed).splitlines()[2:4] == ["rank 2=n0 slot=1", "rank 3=n1 slot=1"]


def test_rank_tables_read_back_as_the_plan() -> None:
    topology = read_topology(FIXTURES / "rank_v12.json")
    plan = make_plan(run_config(MeshConfig(tp=2, dp=3)), topology, Assumptions(transport="hccl"))
    pods = {"s-a": "7", "s-b": "7", "s-c": "9"}
    identity = {("s-b", 0): "2", ("s-b", 1): "3"}
    text = rank_table(
        plan,
        addresses_of(topology),
        version="1.2",
        super_device=lambda node, device: identity.get((node, device), str(device)),
        super_pods=pods,
    )
    again = read_topology(text)
    assert again.ranks is not None
    names = [again.nodes[n] for n in again.ranks.node]
    assert names == [plan.nodes[n] for n in plan.node]
    assert len(again.levels[0].groups) == 2
    plain = json.loads(rank_table(plan, addresses_of(topology)))
    assert plain["version"] == "1.0"
    assert plain["server_list"][0]["device"][0]["device_ip"].startswith("10.1.")


def test_rank_tables_refuse_interleaved_servers_and_missing_addresses() -> None:
    topology = cluster(MACHINES["910b-8"], 2)
    plan = make_plan(run_config(MeshConfig(tp=8, dp=2)), topology, Assumptions(transport="hccl"))
    with pytest.raises(PlanError, match="several servers and no addresses"):
        rank_table(plan, None)
    with pytest.raises(PlanError, match=r"no address of device 0 on n0"):
        rank_table(plan, addresses_of(topology))
    mixed = replace(plan, node=np.array([0, 1] * 8, np.int32))
    with pytest.raises(PlanError, match="visit 2 servers 16 times; must be consecutive on each"):
        rank_table(mixed, lambda node, device: "10.0.0.1")


def test_plans_for_hccl_keep_a_servers_ranks_consecutive() -> None:
    topology = cluster(MACHINES["910b-8"], 8, tiers=(2,))
    cfg = run_config(MeshConfig(tp=2, dp=8, pp=4))
    plan = make_plan(cfg, topology, Assumptions(transport="hccl"))
    assert int((np.diff(plan.node) != 0).sum()) + 1 == len(plan.nodes)


def test_a_static_nccl_file_keeps_devices_beside_their_nics() -> None:
    source = read_topology(FIXTURES / "nccl_static_npu.xml").boxes[0]
    again = read_topology(nccl_topology(source)).boxes[0]
    assert [d.busid for d in again.devices] == [d.busid for d in source.devices]
    assert again.nic_paths[0][0] == "PIX"
    with pytest.raises(PlanError, match="no bus id of GPU0"):
        nccl_topology(MACHINES["h100-8"])
