"""HCCL variables: what a plan emits, and what is refused by name."""

from __future__ import annotations

import pytest

from tests.unit.planning import run_config
from unirl_scale.comm.environment_hccl import HcclJob, check_hccl, hccl_environment, port_range_problem
from unirl_scale.comm.plan import Assumptions
from unirl_scale.comm.plan_build import make_plan
from unirl_scale.comm.topology import MACHINES, cluster
from unirl_scale.core.config import MeshConfig
from unirl_scale.core.errors import PlanError

A2 = HcclJob(product="A2", ranks_per_node=(8, 8), communicators=3)
A3 = HcclJob(product="A3", ranks_per_node=(16, 16), communicators=3)
OLD = HcclJob(product="910", ranks_per_node=(8, 8))
NEW = HcclJob(product="950", ranks_per_node=(8, 8))


def refusals(env: dict[str, str], job: HcclJob) -> list[str]:
    """One line a problem."""
    return [str(p) for p in check_hccl(env, job)]


@pytest.mark.parametrize(
    ("job", "env"),
    [
        (A2, {"HCCL_ALGO": "level0:NA;level1:pipeline"}),
        (A2, {"HCCL_ALGO": "allreduce=level0:NA;level1:ring/alltoall=level0:NA;level1:pairwise"}),
        (A3, {"HCCL_ALGO": "level0:NA;level1:NHR;level2:H-D_R"}),
        (A3, {"HCCL_ALGO": "level0:NA;level1:AHC"}),
        (NEW, {"HCCL_ALGO": "level0:NA;level1:NHR"}),
        (A2, {"HCCL_DETERMINISTIC": "strict", "INF_NAN_MODE_ENABLE": "1"}),
        (A2, {"HCCL_EXEC_TIMEOUT": "0", "HCCL_CONNECT_TIMEOUT": "7200"}),
        (A2, {"HCCL_HOST_SOCKET_PORT_RANGE": "61000,61050-61100", "HCCL_NPU_SOCKET_PORT_RANGE": "auto"}),
        (A2, {"HCCL_RDMA_TC": "132", "HCCL_RDMA_SL": "4", "HCCL_RDMA_TIMEOUT": "20"}),
    ],
)
def test_legal_settings_pass(job: HcclJob, env: dict[str, str]) -> None:
    assert refusals(env, job) == []


@pytest.mark.parametrize(
    ("job", "env", "words"),
    [
        (A2, {"HCCL_ALGO": "level0:ring;level1:ring"}, ("level0:ring", "level0 at NA")),
        (A2, {"HCCL_ALGO": "level1:nhr"}, ("level1:nhr", "did you mean NHR")),
        (A2, {"HCCL_ALGO": "level0:NA;level1:NHR;level2:ring"}, ("level2:ring", "no level2 on A2")),
        (A3, {"HCCL_ALGO": "level0:NA;level1:H-D_R"}, ("level1:H-D_R", "ring, NHR, NB, AHC on A3")),
        (
            A3,
            {"HCCL_ALGO": "allgather=level0:NA;level1:NHR;level2:H-D_R"},
            ("must do allgather", "ring, NHR, NB"),
        ),
        (A3, {"HCCL_ALGO": "level0:NA;level1:AHC;level2:NHR"}, ("level2:NHR", "AHC, which decides both")),
        (A2, {"HCCL_ALGO": "allreduce=level0:NA;level1:pairwise"}, ("must do allreduce", "ring")),
        (NEW, {"HCCL_ALGO": "level0:NA;level1:ring"}, ("NHR on 950",)),
        (NEW, {"HCCL_ALGO": "level0:NA;level1:NHR;level2:NHR"}, ("no level2 with", "CCU_SCHED")),
        (A2, {"HCCL_ALGO": "level0:NA;level1:ring/level0:NA;level1:NHR"}, ("name its operators",)),
        (A2, {"HCCL_ALGO": "gather=level0:NA;level1:ring"}, ("must name operators of",)),
        (A2, {"HCCL_ALGO": "ring"}, ("level0:NA;level1:<algorithm>",)),
        (A2, {"HCCL_ALGO": "level1:ring;level1:NHR"}, ("set level1 once",)),
        (
            A2,
            {"HCCL_ALGO": "level0:NA;level1:pipeline", "HCCL_DETERMINISTIC": "true"},
            ("must not be pipeline",),
        ),
        (
            A2,
            {"HCCL_ALGO": "level0:NA;level1:NHR", "HCCL_DETERMINISTIC": "strict"},
            ("must be unset with strict",),
        ),
        (OLD, {"HCCL_DETERMINISTIC": "true"}, ("must be unset on 910",)),
        (
            HcclJob(product="A2", ranks_per_node=(8, 4)),
            {"HCCL_DETERMINISTIC": "strict"},
            ("as many ranks on every node", "[4, 8]"),
        ),
        (HcclJob(product="A2", ranks_per_node=(8,)), {"HCCL_DETERMINISTIC": "strict"}, ("on one node",)),
        (HcclJob(product="A3", ranks_per_node=(1, 1)), {"HCCL_DETERMINISTIC": "strict"}, ("below 3 ranks",)),
        (
            A3,
            {"HCCL_DETERMINISTIC": "strict", "HCCL_INTER_HCCS_DISABLE": "TRUE"},
            ("HCCL_INTER_HCCS_DISABLE",),
        ),
        (A2, {"HCCL_DETERMINISTIC": "strict", "INF_NAN_MODE_ENABLE": "0"}, ("saturation mode",)),
        (A2, {"HCCL_DETERMINISTIC": "1"}, ("false, true, strict",)),
        (A2, {"HCCL_CONNECT_TIMEOUT": "60"}, ("120 to 7200", "nearest legal value 120")),
        (OLD, {"HCCL_EXEC_TIMEOUT": "20000"}, ("1 to 17340", "17340")),
        (A2, {"HCCL_BUFFSIZE": "0"}, ("from 1",)),
        (A2, {"HCCL_IF_BASE_PORT": "65530"}, ("1024 to 65520",)),
        (
            A2,
            {"HCCL_IF_BASE_PORT": "50000", "HCCL_HOST_SOCKET_PORT_RANGE": "auto"},
            ("makes HCCL ignore it",),
        ),
        (OLD, {"HCCL_NPU_SOCKET_PORT_RANGE": "auto"}, ("must be unset on 910",)),
        (A2, {"HCCL_RDMA_TC": "133"}, ("multiple of 4", "132")),
        (A2, {"HCCL_INTRA_PCIE_ENABLE": "1", "HCCL_INTRA_ROCE_ENABLE": "1"}, ("must be 0 beside",)),
        (A2, {"HCCL_OP_EXPANSION_MODE": "CCU_MS"}, ("HOST, HOST_TS, AI_CPU, AIV on A2",)),
        (A2, {"HCCL_OP_EXPANSION_MODE": "AIV"}, ("3 communicators",)),
        (A2, {"HCCL_EXEC_TIMEOT": "3600"}, ("HCCL_EXEC_TIMEOT", "did you mean HCCL_EXEC_TIMEOUT")),
        (
            HcclJob(product="A2", ranks_per_node=(8, 8), communicators=100, memory_bytes=64e9),
            {"HCCL_BUFFSIZE": "200"},
            ("100 communicators take 39.1 GiB", "at most 152"),
        ),
    ],
)
def test_each_limit_is_refused_by_name(job: HcclJob, env: dict[str, str], words: tuple[str, ...]) -> None:
    lines = refusals(env, job)
    assert len(lines) == 1
    assert all(word in lines[0] for word in words)
    assert lines[0].split(":")[0] in env


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("61050-61000", "ascending"),
        ("1-70000", "65535"),
        ("80", "system"),
        ("5000-5010,5005", "once"),
        ("a", "neither"),
    ],
)
def test_port_ranges(text: str, word: str) -> None:
    assert word in port_range_problem(text)


def test_emitted_variables_pass_their_own_check_and_say_why() -> None:
    topology = cluster(MACHINES["910b-8"], 4)
    plan = make_plan(run_config(MeshConfig(tp=4, dp=8)), topology, Assumptions(transport="hccl"))
    environment = hccl_environment(plan, "A2", {"HCCL_RDMA_TC": "132", "PATH": "/bin"}, deterministic=True)
    assert environment.variables["HCCL_DETERMINISTIC"] == "true"
    assert environment.variables["HCCL_RDMA_TC"] == "132"
    assert "PATH" not in environment.variables
    assert set(environment.variables) == set(environment.reasons)
    assert any(line.startswith("export HCCL_BUFFSIZE=64 ") for line in environment.lines())


def test_all_problems_of_the_user_are_shown_at_once() -> None:
    topology = cluster(MACHINES["910b-8"], 4)
    plan = make_plan(run_config(MeshConfig(tp=4, dp=8)), topology, Assumptions(transport="hccl"))
    with pytest.raises(PlanError, match=r"HCCL_BUFFSIZE(.|\n)*HCCL_ALGO"):
        hccl_environment(plan, "A2", {"HCCL_BUFFSIZE": "x", "HCCL_ALGO": "level0:NA;level1:AHC"})
