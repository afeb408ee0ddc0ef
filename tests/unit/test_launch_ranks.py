"""A rank finds its place from each launcher's variables, and contradictions are shown, never guessed at."""

from __future__ import annotations

import pytest

from unirl_scale.core.errors import ConfigError
from unirl_scale.core.ranks import RankInfo
from unirl_scale.launch.hostlist import expand_hosts, first_host
from unirl_scale.launch.mpi import MpiView
from unirl_scale.launch.ranks import LOCAL_MARK, discover

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "MASTER_ADDR": "host-a",
    "MASTER_PORT": "29500",
}
OPENMPI = {
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "2",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "OMPI_COMM_WORLD_NODE_RANK": "2",
    "PMIX_NAMESPACE": "prterun-host-17@1",
}
MPICH = {
    "PMI_RANK": "3",
    "PMI_SIZE": "4",
    "MPI_LOCALRANKID": "1",
    "MPI_LOCALNRANKS": "2",
    "MASTER_ADDR": "host-a",
    "PMI_JOBID": "7",
}
# What sbatch leaves in a batch script: an allocation, but no step.
ALLOCATION = {
    "SLURM_JOB_ID": "42",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_NTASKS": "8",
    "SLURM_JOB_NODELIST": "node[08-09]",
}
STEP = {
    **ALLOCATION,
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
    "SLURM_STEP_NODELIST": "node[08-09]",
}
ONE_A_NODE = {
    **STEP,
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "0",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
}


def test_nothing_set_is_one_process() -> None:
    assert discover({"PATH": "/bin"}) == RankInfo()
    assert RankInfo().launcher == "none"


def test_torchrun() -> None:
    assert discover(TORCHRUN) == RankInfo(
        rank=5,
        world_size=8,
        local_rank=1,
        local_world_size=4,
        node_rank=1,
        launcher="torchrun",
        master_addr="host-a",
        master_port=29500,
    )


def test_open_mpi_on_one_host() -> None:
    info = discover(OPENMPI)
    assert (info.rank, info.world_size, info.local_rank, info.node_rank) == (2, 4, 2, 0)
    assert (info.launcher, info.master_addr) == ("openmpi", "127.0.0.1")


def test_open_mpi_does_not_tell_the_node() -> None:
    several = {**OPENMPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "3", "MASTER_ADDR": "host-a"}
    assert discover(several).node_rank is None


def test_mpich() -> None:
    info = discover(MPICH)
    assert (info.rank, info.world_size, info.local_rank, info.local_world_size) == (3, 4, 1, 2)
    assert (info.launcher, info.master_addr) == ("mpich", "host-a")


def test_slurm_step() -> None:
    info = discover(STEP)
    assert (info.rank, info.world_size, info.local_rank, info.local_world_size) == (5, 8, 1, 4)
    assert (info.launcher, info.node_rank, info.master_addr) == ("slurm", 1, "node08")


def test_slurm_step_with_uneven_nodes() -> None:
    uneven = {**STEP, "SLURM_STEP_TASKS_PER_NODE": "3(x2),2", "SLURM_NODEID": "2", "SLURM_PROCID": "7"}
    assert discover(uneven).local_world_size == 2


def test_an_allocation_is_not_a_launcher() -> None:
    assert discover(ALLOCATION).launcher == "none"
    # salloc's interactive shell is a step of its own, with a reserved number
    assert discover({**STEP, "SLURM_STEP_ID": str(0xFFFFFFFA)}).launcher == "none"


@pytest.mark.parametrize("around", [ALLOCATION, ONE_A_NODE])
def test_torchrun_inside_slurm_wins(around: dict[str, str]) -> None:
    info = discover({**around, **TORCHRUN})
    assert (info.launcher, info.rank) == ("torchrun", 5)


def test_mpirun_daemons_started_by_srun_are_not_ranks() -> None:
    info = discover({**ONE_A_NODE, **OPENMPI})
    assert (info.launcher, info.rank, info.world_size) == ("openmpi", 2, 4)


def test_a_script_that_exports_rank_from_slurm_agrees_with_it() -> None:
    exported = {**TORCHRUN, "RANK": STEP["SLURM_PROCID"], "WORLD_SIZE": STEP["SLURM_STEP_NUM_TASKS"]}
    assert discover({**STEP, **exported}).rank == 5


@pytest.mark.parametrize(
    ("variables", "both"),
    [
        (
            {**TORCHRUN, **OPENMPI},
            ("torchrun says rank 5 of 8", "openmpi says rank 2 of 4"),
        ),
        (
            {**STEP, **TORCHRUN, "RANK": "3"},
            ("torchrun says rank 3 of 8", "slurm says rank 5 of 8"),
        ),
        # a stale WORLD_SIZE=1 in the user's profile is not an agent's work: fewer ranks than nodes
        (
            {
                **ONE_A_NODE,
                **TORCHRUN,
                "RANK": "0",
                "WORLD_SIZE": "1",
                "LOCAL_WORLD_SIZE": "1",
                "LOCAL_RANK": "0",
            },
            ("torchrun says rank 0 of 1", "slurm says rank 1 of 2"),
        ),
    ],
)
def test_a_contradiction_shows_both(variables: dict[str, str], both: tuple[str, str]) -> None:
    with pytest.raises(ConfigError) as caught:
        discover(variables)
    assert all(side in str(caught.value) for side in both)


VIEW = MpiView(
    rank=2,
    world_size=4,
    local_rank=0,
    local_world_size=2,
    node_rank=1,
    master_addr="host-b",
    master_port=12345,
)


def test_mpi_tells_what_its_variables_leave_out() -> None:
    several = {**OPENMPI, "OMPI_COMM_WORLD_LOCAL_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
    with pytest.raises(ConfigError, match="no MASTER_ADDR"):
        discover(several)
    info = discover(several, lambda: VIEW)
    assert (info.launcher, info.rank, info.world_size, info.node_rank) == ("openmpi", 2, 4, 1)
    assert (info.master_addr, info.master_port) == ("host-b", 12345)
    exported = {**several, "MASTER_ADDR": "host-c", "MASTER_PORT": "29500"}
    assert discover(exported, lambda: VIEW).master_addr == "host-c"
    assert discover(exported, lambda: VIEW).master_port == 29500


def test_mpi4py_of_another_mpi_is_refused() -> None:
    alone = MpiView(
        rank=0,
        world_size=1,
        local_rank=0,
        local_world_size=1,
        node_rank=0,
        master_addr="host-b",
        master_port=12345,
    )
    with pytest.raises(
        ConfigError, match=r"openmpi says rank 2 of 4 but mpi4py says rank 0 of 1.*hint: install"
    ):
        discover(OPENMPI, lambda: alone)


@pytest.mark.parametrize("variables", [{}, TORCHRUN, STEP, {**ALLOCATION, **TORCHRUN}])
def test_mpi_is_asked_only_where_mpirun_started_the_rank(variables: dict[str, str]) -> None:
    def never() -> MpiView:
        raise AssertionError("asked")

    discover(variables, never)
    with pytest.raises(AssertionError, match="asked"):
        discover(OPENMPI, never)


def test_our_own_launcher_wins_over_what_surrounds_it() -> None:
    info = discover({**OPENMPI, **TORCHRUN, LOCAL_MARK: "1"})
    assert (info.launcher, info.rank, info.world_size) == ("local", 5, 8)


@pytest.mark.parametrize(
    ("variables", "reason"),
    [
        ({"RANK": "0", "WORLD_SIZE": "2"}, "without LOCAL_WORLD_SIZE"),
        ({**TORCHRUN, "RANK": "x"}, "RANK=x"),
        ({**TORCHRUN, "RANK": "8"}, "must be below its world size"),
        ({**TORCHRUN, "MASTER_PORT": "70000"}, "must be 1..65535"),
        ({name: value for name, value in TORCHRUN.items() if name != "MASTER_PORT"}, "no MASTER_PORT"),
        ({name: value for name, value in TORCHRUN.items() if name != "MASTER_ADDR"}, "no MASTER_ADDR"),
        ({**OPENMPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "3"}, "no MASTER_ADDR"),
        ({**STEP, "SLURM_STEP_TASKS_PER_NODE": "two"}, "must be like 2(x3),1"),
        ({**STEP, "SLURM_NODEID": "2"}, "SLURM_NODEID=2"),
    ],
)
def test_missing_or_malformed_variables_are_named(variables: dict[str, str], reason: str) -> None:
    with pytest.raises(ConfigError) as caught:
        discover(variables)
    assert reason in str(caught.value)


def test_the_port_is_the_jobs_own() -> None:
    ranks = [discover({**STEP, "SLURM_PROCID": str(rank)}) for rank in (4, 5)]
    assert ranks[0].master_port == ranks[1].master_port
    assert 15000 <= ranks[0].master_port < 32000
    assert discover({**STEP, "SLURM_JOB_ID": "43"}).master_port != ranks[0].master_port
    assert discover({**STEP, "MASTER_PORT": "1234"}).master_port == 1234


def test_mpirun_inside_slurm_meets_at_one_place() -> None:
    # on the node where mpirun runs there is no step; on the others the daemons' step names the others only
    first = discover({**ALLOCATION, **OPENMPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "3"})
    other = discover(
        {**ONE_A_NODE, "SLURM_STEP_NODELIST": "node09", **OPENMPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "3"}
    )
    assert (first.master_addr, first.master_port) == (other.master_addr, other.master_port)
    assert first.master_addr == "node08"


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("login1", ["login1"]),
        ("n[1-3]", ["n1", "n2", "n3"]),
        ("n[08-11]", ["n08", "n09", "n10", "n11"]),
        ("gpu[001-002,007],cpu5", ["gpu001", "gpu002", "gpu007", "cpu5"]),
        ("r[1-2]n[01-02].x", ["r1n01.x", "r1n02.x", "r2n01.x", "r2n02.x"]),
        ("a.b-c[9-10]", ["a.b-c9", "a.b-c10"]),
        ("", []),
    ],
)
def test_host_lists_expand_in_order(text: str, hosts: list[str]) -> None:
    assert list(expand_hosts(text)) == hosts


@pytest.mark.parametrize("text", ["n[1-2", "n1]", "n[[1]]", "n[a-b]", "n[3-1]", "n[]"])
def test_malformed_host_lists_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="host list: got"):
        list(expand_hosts(text))


def test_the_first_host_of_a_huge_list_is_cheap() -> None:
    assert first_host("n[000000001-999999999]") == "n000000001"
    with pytest.raises(ConfigError, match="an empty list"):
        first_host("")
