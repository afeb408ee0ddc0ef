"""What a rank's process is told: its own accelerator, the variables that decide bits, and nothing of MPI."""

from __future__ import annotations

import ctypes
import subprocess
import sys

import pytest

from unirl_scale.core.config import HardwareConfig
from unirl_scale.core.errors import ConfigError
from unirl_scale.core.ranks import RankInfo
from unirl_scale.launch import environment

CUDA = HardwareConfig(vendor="cuda")
THIRD = RankInfo(rank=6, world_size=8, local_rank=2, local_world_size=4)


@pytest.mark.parametrize(
    ("vendor", "given", "expected"),
    [
        ("cuda", {}, {"CUDA_VISIBLE_DEVICES": "2"}),
        ("npu", {}, {"ASCEND_RT_VISIBLE_DEVICES": "2"}),
        ("cuda", {"CUDA_VISIBLE_DEVICES": "4,5,6,7"}, {"CUDA_VISIBLE_DEVICES": "6"}),
        ("cuda", {"CUDA_VISIBLE_DEVICES": "GPU-a, GPU-b, GPU-c, GPU-d"}, {"CUDA_VISIBLE_DEVICES": "GPU-c"}),
        ("npu", {"CUDA_VISIBLE_DEVICES": "7"}, {"ASCEND_RT_VISIBLE_DEVICES": "2"}),
        # one device: the scheduler bound this rank already
        ("cuda", {"CUDA_VISIBLE_DEVICES": "3"}, {}),
        ("cpu", {}, {}),
    ],
)
def test_a_rank_sees_one_device(vendor: str, given: dict[str, str], expected: dict[str, str]) -> None:
    assert environment.device_environment(HardwareConfig(vendor=vendor), THIRD, given) == expected


@pytest.mark.parametrize(("given", "expected"), [({}, "0"), ({"CUDA_VISIBLE_DEVICES": "5,7"}, "5")])
def test_ranks_that_talk_through_the_host_share_devices(given: dict[str, str], expected: str) -> None:
    shared = HardwareConfig(vendor="cuda", transport="host")
    assert environment.device_environment(shared, THIRD, given) == {"CUDA_VISIBLE_DEVICES": expected}


@pytest.mark.parametrize("given", ["", "0,1,2"])
def test_too_few_devices_are_refused(given: str) -> None:
    with pytest.raises(ConfigError, match=f"CUDA_VISIBLE_DEVICES: got '{given}' for 4 ranks on this host"):
        environment.device_environment(CUDA, THIRD, {"CUDA_VISIBLE_DEVICES": given})


def test_mpi_is_hidden_from_children(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_FD", "PRTE_LAUNCHED", "MPI_LOCALRANKID"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("SLURM_PROCID", "1")
    # as MPI_Init does: in C, where os.environ does not see it
    ctypes.CDLL(None).setenv(b"PMIX_BEHIND", b"1", 1)
    assert "PMIX_BEHIND" not in environment.current()
    environment.hide_mpi()
    left = environment.current()
    child = [sys.executable, "-S", "-c", "import os, sys; sys.exit('PMIX_BEHIND' in os.environ)"]
    assert subprocess.run(child, check=False).returncode == 0
    assert not any(name.startswith(("OMPI_", "PMIX_", "PMI_", "PRTE_", "MPI_")) for name in left)
    assert {"OMP_NUM_THREADS", "SLURM_PROCID"} <= left.keys()
