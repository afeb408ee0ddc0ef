"""Where the ranks of mpirun meet, asked of MPI itself through mpi4py, which is optional.

MPI knows two things that its environment variables do not tell: on which host rank 0 runs, and how many hosts
there are. It is left again before anything else starts: no later fork or exit has MPI in its way.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mpi4py.MPI import Comm


@dataclass(frozen=True, slots=True, kw_only=True)
class MpiView:
    """This process among the others as MPI sees it, and a meeting point that rank 0 chose.

    Attributes:
        rank, world_size: in MPI_COMM_WORLD.
        local_rank, local_world_size: among the ranks that share this host's memory.
        node_rank: number of this host, counted by its lowest rank.
        master_addr: rank 0's host name; 127.0.0.1 when all ranks share one host.
        master_port: was free on rank 0's host.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int
    master_addr: str
    master_port: int


def ask_mpi() -> MpiView | None:
    """Start MPI, exchange the meeting point, and leave MPI; collective over the ranks that mpirun started.

    Returns:
        None where mpi4py is not installed: the environment must then say everything.
    """
    try:
        import mpi4py
    except ModuleNotFoundError:
        return None
    mpi4py.rc(initialize=False, finalize=False)
    from mpi4py import MPI

    MPI.Init()
    try:
        return _view(MPI.COMM_WORLD, MPI.COMM_WORLD.Split_type(MPI.COMM_TYPE_SHARED))
    finally:
        MPI.Finalize()


def _view(world: Comm, host: Comm) -> MpiView:
    leaders = sorted(set(world.allgather(host.bcast(world.rank))))
    alone = len(leaders) == 1
    point = ("127.0.0.1" if alone else socket.gethostname(), free_port()) if world.rank == 0 else None
    master_addr, master_port = world.bcast(point)
    return MpiView(
        rank=world.rank,
        world_size=world.size,
        local_rank=host.rank,
        local_world_size=host.size,
        node_rank=leaders.index(host.bcast(world.rank)),
        master_addr=master_addr,
        master_port=master_port,
    )


def free_port() -> int:
    """A TCP port that nobody on this host uses now."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        port: int = probe.getsockname()[1]
        return port
