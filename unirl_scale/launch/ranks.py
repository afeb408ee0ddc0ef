"""Who am I? RankInfo from the variables that torchrun, Open MPI, MPICH/PMI or a SLURM step leave behind.

Launchers nest: torchrun runs inside an sbatch allocation, `srun` starts one torchrun agent a node, `mpirun`
starts its daemons through `srun`. The innermost launcher is the one that started this process. The ones
around it must either agree with it on rank and world size, or have one process a node, which is then that
launcher's agent and not a rank; anything else is a contradiction that nobody should guess at.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from unirl_scale.core.errors import ConfigError
from unirl_scale.core.ranks import Launcher, RankInfo
from unirl_scale.launch.hostlist import first_host
from unirl_scale.launch.mpi import MpiView

Environ = Mapping[str, str]

# Set by `local.run_local` for the ranks that it starts itself.
LOCAL_MARK = "UNIRL_SCALE_LOCAL"
_PORTS = range(15000, 32000)  # below the ports that Linux hands out to clients by itself
# Step ids of a SLURM job that are not steps of ranks: pending, extern, batch script, interactive shell.
_NOT_A_STEP = {str(2**32 - n) for n in range(2, 8)}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Claim:
    """What one launcher's variables say."""

    launcher: Launcher
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int | None
    one_a_node: bool

    def __str__(self) -> str:
        return f"{self.launcher} says rank {self.rank} of {self.world_size}"


def discover(environ: Environ, ask_mpi: Callable[[], MpiView | None] = lambda: None) -> RankInfo:
    """Find this process's place.

    Args:
        environ: the process's environment.
        ask_mpi: asks MPI itself where mpirun started this process; what the environment says about the
            meeting point still wins.

    Returns:
        The innermost launcher's view; launcher "none" (rank 0 of 1) when there is none.

    Raises:
        ConfigError: variables are missing, malformed or contradict each other (both are shown), or the
            meeting point cannot be told.
    """
    readers = (_torchrun, _openmpi, _mpich, _slurm)  # innermost first
    claims = [claim for reader in readers if (claim := reader(environ)) is not None]
    if not claims:
        return RankInfo()
    inner = claims[0]
    if LOCAL_MARK in environ:  # started by our own launcher, whatever is around it
        return _rank_info(inner, "local", environ)
    for outer in claims[1:]:
        agrees = (outer.rank, outer.world_size) == (inner.rank, inner.world_size)
        agent = outer.one_a_node and outer.world_size <= inner.world_size
        if not agrees and not agent:
            raise ConfigError(
                f"ranks: got {inner} but {outer}; one launcher must have started this process; "
                f"hint: start with {inner.launcher} or with {outer.launcher}, or unset the other's variables"
            )
    # Asked whatever the environment says: it may differ between hosts, and asking is collective.
    view = ask_mpi() if inner.launcher in ("openmpi", "mpich") else None
    if view is not None:
        return _mpi_rank_info(inner, view, environ)
    return _rank_info(inner, inner.launcher, environ)


def _mpi_rank_info(claim: _Claim, view: MpiView, environ: Environ) -> RankInfo:
    if (view.rank, view.world_size) != (claim.rank, claim.world_size):
        raise ConfigError(
            f"ranks: got {claim} but mpi4py says rank {view.rank} of {view.world_size}; mpi4py must use the "
            "MPI whose mpirun started this process; hint: install mpi4py for that MPI, or uninstall it and "
            "export MASTER_ADDR and MASTER_PORT"
        )
    return RankInfo(
        rank=view.rank,
        world_size=view.world_size,
        local_rank=view.local_rank,
        local_world_size=view.local_world_size,
        node_rank=view.node_rank,
        launcher=claim.launcher,
        master_addr=environ.get("MASTER_ADDR") or view.master_addr,
        master_port=_given_port(claim, environ) or view.master_port,
    )


def _rank_info(claim: _Claim, launcher: Launcher, environ: Environ) -> RankInfo:
    if not 0 <= claim.rank < claim.world_size or not 0 <= claim.local_rank < claim.local_world_size:
        raise ConfigError(
            f"ranks: got {claim} (local rank {claim.local_rank} of {claim.local_world_size}); "
            "a rank must be below its world size"
        )
    return RankInfo(
        rank=claim.rank,
        world_size=claim.world_size,
        local_rank=claim.local_rank,
        local_world_size=claim.local_world_size,
        node_rank=claim.node_rank,
        launcher=launcher,
        master_addr=_master_addr(claim, environ),
        master_port=_master_port(claim, environ),
    )


def _number(environ: Environ, launcher: str, name: str) -> int:
    text = environ.get(name)
    if text is None:
        raise ConfigError(
            f"ranks: got {launcher} variables without {name}; it must be set; hint: export {name}"
        )
    if not text.isdecimal():
        raise ConfigError(f"ranks: got {name}={text}; must be a whole number >= 0")
    return int(text)


def _torchrun(environ: Environ) -> _Claim | None:
    if "RANK" not in environ or "WORLD_SIZE" not in environ:
        return None
    read = partial(_number, environ, "torchrun")
    local_world, world = read("LOCAL_WORLD_SIZE"), read("WORLD_SIZE")
    return _Claim(
        launcher="torchrun",
        rank=read("RANK"),
        world_size=world,
        local_rank=read("LOCAL_RANK"),
        local_world_size=local_world,
        node_rank=read("GROUP_RANK") if "GROUP_RANK" in environ else _single_node(world, local_world),
        one_a_node=False,  # torchrun starts ranks, never another launcher's agents
    )


def _openmpi(environ: Environ) -> _Claim | None:
    if "OMPI_COMM_WORLD_RANK" not in environ:
        return None
    # OMPI_COMM_WORLD_NODE_RANK counts processes on this node over all jobs; it is not the node's number.
    names = [f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")]
    return _mpi("openmpi", *(_number(environ, "Open MPI", name) for name in names))


def _mpich(environ: Environ) -> _Claim | None:
    # `srun --mpi=pmi2` sets PMI_RANK too, without Hydra's local ranks; that process is SLURM's.
    if "PMI_RANK" not in environ or "MPI_LOCALRANKID" not in environ:
        return None
    names = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
    return _mpi("mpich", *(_number(environ, "MPICH", name) for name in names))


def _mpi(launcher: Launcher, rank: int, world: int, local_rank: int, local_world: int) -> _Claim:
    return _Claim(
        launcher=launcher,
        rank=rank,
        world_size=world,
        local_rank=local_rank,
        local_world_size=local_world,
        node_rank=_single_node(world, local_world),
        one_a_node=local_world == 1,
    )


def _slurm(environ: Environ) -> _Claim | None:
    # An allocation (sbatch, salloc) sets SLURM_PROCID=0 in the batch script too; only a step has ranks.
    step = environ.get("SLURM_STEP_ID", environ.get("SLURM_STEPID"))
    if step is None or step in _NOT_A_STEP or "SLURM_PROCID" not in environ:
        return None
    read = partial(_number, environ, "SLURM step")
    node = read("SLURM_NODEID")
    tasks = _tasks_per_node(environ)
    if node >= len(tasks):
        raise ConfigError(
            f"ranks: got SLURM_NODEID={node} with SLURM_STEP_TASKS_PER_NODE naming {len(tasks)} nodes; "
            "the node must be among them"
        )
    return _Claim(
        launcher="slurm",
        rank=read("SLURM_PROCID"),
        world_size=read("SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environ else "SLURM_NTASKS"),
        local_rank=read("SLURM_LOCALID"),
        local_world_size=tasks[node],
        node_rank=node,
        one_a_node=set(tasks) == {1},
    )


def _tasks_per_node(environ: Environ) -> list[int]:
    """`2(x3),1` -> [2, 2, 2, 1]."""
    text = environ.get("SLURM_STEP_TASKS_PER_NODE", environ.get("SLURM_TASKS_PER_NODE", ""))
    tasks: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match is None:
            raise ConfigError(f"ranks: got SLURM_STEP_TASKS_PER_NODE={text!r}; must be like 2(x3),1")
        tasks += [int(match.group(1))] * int(match.group(2) or 1)
    return tasks


def _single_node(world: int, local_world: int) -> int | None:
    return 0 if world == local_world else None


def _master_addr(claim: _Claim, environ: Environ) -> str:
    if environ.get("MASTER_ADDR"):
        return environ["MASTER_ADDR"]
    if claim.world_size == claim.local_world_size:
        return "127.0.0.1"
    if claim.launcher != "torchrun":
        # Ranks are laid out from the first node on. Under mpirun a step's list is that of its daemons, which
        # leaves out the node where mpirun runs.
        step = ("SLURM_STEP_NODELIST",) if claim.launcher == "slurm" else ()
        for name in (*step, "SLURM_JOB_NODELIST", "SLURM_NODELIST"):
            if environ.get(name):
                return first_host(environ[name])
    raise ConfigError(
        f"ranks: got {claim} on several hosts and no MASTER_ADDR; the host of rank 0 must be known; "
        "hint: export MASTER_ADDR to every rank (mpirun -x MASTER_ADDR), or install mpi4py and MPI tells it"
    )


def _given_port(claim: _Claim, environ: Environ) -> int | None:
    if not environ.get("MASTER_PORT"):
        return None
    port = _number(environ, claim.launcher, "MASTER_PORT")
    if not 0 < port < 65536:
        raise ConfigError(f"ranks: got MASTER_PORT={port}; must be 1..65535")
    return port


def _master_port(claim: _Claim, environ: Environ) -> int:
    given = _given_port(claim, environ)
    if given is not None:
        return given
    # The same on every rank and another for the next job: jobs that share a host should not meet.
    names: tuple[str, ...] = ("SLURM_JOB_ID", "SLURM_STEP_ID")
    if claim.launcher != "slurm":  # mpirun's daemons have a step, its own node has none
        names = ("SLURM_JOB_ID", "PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "PMI_JOBID")
    job = "/".join(environ[name] for name in names if environ.get(name))
    if claim.launcher == "torchrun" or not job:
        raise ConfigError(
            f"ranks: got {claim} and no MASTER_PORT; the store's port must be known; "
            "hint: export MASTER_PORT=29500 to every rank"
        )
    return _PORTS[zlib.crc32(job.encode()) % len(_PORTS)]
