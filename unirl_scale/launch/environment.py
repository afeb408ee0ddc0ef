"""The process's environment: the only file that reads or writes os.environ.

Everything else takes a mapping, so that a test can say what the environment is.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping

from unirl_scale.core.config import HardwareConfig
from unirl_scale.core.errors import ConfigError
from unirl_scale.core.ranks import RankInfo
from unirl_scale.launch.ranks import LOCAL_MARK

# Where a rank of `run_local` writes the error that ended it.
REPORT_FILE = "UNIRL_SCALE_REPORT"
# Vendor -> the list of devices that a process may use.
VISIBLE_DEVICES = {"cuda": "CUDA_VISIBLE_DEVICES", "npu": "ASCEND_RT_VISIBLE_DEVICES"}
# A child that calls MPI_Init, or a library that looks for MPI, would take itself for this rank.
_MPI = ("OMPI_", "PMIX_", "PMI_", "PRTE_", "MPI_LOCAL", "HYDI_", "HYDRA_", "I_MPI_")
# Failures that a test wants, see `train/elastic/faults.py`.
FAULTS = "UNIRL_SCALE_FAULTS"


def current() -> dict[str, str]:
    """A copy of this process's environment."""
    return dict(os.environ)


def apply(variables: Mapping[str, str]) -> None:
    """Set the variables in this process and in the libraries that it loads from now on."""
    os.environ.update(variables)


def hide_mpi() -> None:
    """Remove what mpirun, PMI servers and MPI_Init left, for the processes that this one starts."""
    for name in {*os.environ, *_c_names()}:
        if name.startswith(_MPI):
            os.environ.pop(name, None)
            os.unsetenv(name)


def _c_names() -> list[str]:
    """Names in the C library's environment, which children inherit. MPI_Init adds to it behind Python, whose
    os.environ is a copy from the start."""
    entries = ctypes.POINTER(ctypes.c_char_p).in_dll(ctypes.CDLL(None), "environ")
    names = []
    for entry in entries:  # ends at NULL
        if entry is None:
            break
        names.append(os.fsdecode(entry.partition(b"=")[0]))
    return names


def device_environment(
    hardware: HardwareConfig, info: RankInfo, environ: Mapping[str, str], planned: int | None = None
) -> dict[str, str]:
    """The one device that this rank sees, as its device 0; must be set before torch is loaded.

    The local rank counts among the devices that the scheduler made visible. A single one is taken to be this
    rank's own (`srun --gpus-per-task=1`); the pre-flight refuses two ranks on one device.

    Args:
        hardware: vendor "cpu" has no devices. With `transport: host` more ranks than devices take turns, and
            where nothing says which devices are visible, all ranks share device 0.
        info: this rank.
        environ: what is set already.
        planned: number of the device among those of the host, where a plan gives one.

    Raises:
        ConfigError: fewer devices are visible than ranks are on this host.
    """
    if hardware.vendor not in VISIBLE_DEVICES:
        return {}
    variable = VISIBLE_DEVICES[hardware.vendor]
    given, shared = environ.get(variable), hardware.transport == "host" and planned is None
    number = info.local_rank if planned is None else planned
    if given is None:
        return {variable: "0" if shared else str(number)}
    visible = [name.strip() for name in given.split(",") if name.strip()]
    if len(visible) == 1:
        return {}
    if shared and visible:
        return {variable: visible[number % len(visible)]}
    if len(visible) < max(info.local_world_size, number + 1):
        raise ConfigError(
            f"{variable}: got {given!r} for {info.local_world_size} ranks on this host; must list a device "
            "for each; hint: fewer ranks a host, or unset it"
        )
    return {variable: visible[number]}


def numeric_environment(environ: Mapping[str, str], threads: int) -> dict[str, str]:
    """Variables that decide the bits of CPU arithmetic; they must be set before torch is loaded.

    MKL_CBWR=AVX2,STRICT makes MKL's GEMM independent of the other dimensions and of the thread count. A value
    that the user exported stays: the self-check at start-up judges what it gives.

    Args:
        environ: what is set already.
        threads: `hardware.threads`, threads of one op.
    """
    return {
        "MKL_CBWR": environ.get("MKL_CBWR", "AVX2,STRICT"),
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        # A few reasoning_gym data sets iterate over sets of strings: every rank must see one order.
        "PYTHONHASHSEED": environ.get("PYTHONHASHSEED", "0"),
    }


def elastic_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Variables of the ranks of an elastic job: torch writes a stack trace for every connection that is cut,
    which a recovery does on purpose."""
    return {"TORCH_CPP_LOG_LEVEL": environ.get("TORCH_CPP_LOG_LEVEL", "FATAL")}


def local_rank_environment(rank: int, world_size: int, port: int, report_file: str) -> dict[str, str]:
    """Variables of one rank that this process starts on this host; torchrun's names, and our mark."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(world_size),
        "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        # Some data sets walk over sets of strings: every rank, and every run, must walk the same way.
        "PYTHONHASHSEED": "0",
        LOCAL_MARK: str(os.getpid()),
        REPORT_FILE: report_file,
    }
