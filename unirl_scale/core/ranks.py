"""RankInfo: which process of the job this one is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Launcher = Literal["local", "torchrun", "openmpi", "mpich", "slurm", "none"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankInfo:
    """This process among the others, and where they meet.

    Attributes:
        rank: 0 .. world_size - 1.
        world_size: processes of the job.
        local_rank: 0 .. local_world_size - 1, among the processes of this host.
        local_world_size: processes on this host.
        node_rank: number of this host in the job, or None where the launcher does not tell (Open MPI and
            MPICH on several hosts).
        launcher: who started the processes; "none" = one process, started by hand.
        master_addr: host of rank 0, where the store listens.
        master_port: TCP port of the store.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    node_rank: int | None = 0
    launcher: Launcher = "none"
    master_addr: str = "127.0.0.1"
    master_port: int = 0

    @property
    def job(self) -> str:
        """Id of the job, the same for all its processes and for no other live job."""
        return f"{self.master_addr}:{self.master_port}"
