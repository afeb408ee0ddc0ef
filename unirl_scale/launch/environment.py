"""The process's environment: the only file that reads or writes os.environ.

Everything else takes a mapping, so that a test can say what the environment is.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from unirl_scale.launch.ranks import LOCAL_MARK

# Where a rank of `run_local` writes the error that ended it.
REPORT_FILE = "UNIRL_SCALE_REPORT"
# Failures that a test wants, see `train/elastic/faults.py`.
FAULTS = "UNIRL_SCALE_FAULTS"


def current() -> dict[str, str]:
    """A copy of this process's environment."""
    return dict(os.environ)


def apply(variables: Mapping[str, str]) -> None:
    """Set the variables in this process and in the libraries that it loads from now on."""
    os.environ.update(variables)


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
