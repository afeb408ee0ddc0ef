"""Where the ranks of a job meet: a TCP store, over which the pre-flight runs before process groups exist."""

from __future__ import annotations

import hashlib
import platform
import socket
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from unirl_scale.core.config import RunConfig
from unirl_scale.core.errors import CommError, ConfigError
from unirl_scale.core.load import dump
from unirl_scale.core.ranks import RankInfo
from unirl_scale.launch.environment import VISIBLE_DEVICES
from unirl_scale.launch.preflight import Facts, name_problem, port_problem, preflight, resolve
from unirl_scale.train.checkpoint.names import checkpoint_dir
from unirl_scale.train.rundir import software

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

# Set to one value on every rank, or the bits differ.
_NUMERIC = ("MKL_CBWR", "PYTHONHASHSEED", "OMP_NUM_THREADS")
_HCCL_PORTS = 16  # from HCCL_IF_BASE_PORT on; a device listens on one of them


class Meeting:
    """Brings this rank to the others and has the pre-flight judge them; called once, by the training loop."""

    def __init__(
        self,
        cfg: RunConfig,
        info: RankInfo,
        environ: Mapping[str, str],
        timeout: timedelta = timedelta(minutes=10),
    ) -> None:
        self._cfg, self._info, self._environ, self._timeout = cfg, info, environ, timeout

    def __call__(self, equal: Mapping[str, str]) -> Store | None:
        """Meet and compare; collective over all ranks.

        Args:
            equal: name -> what the loop knows and must be the same everywhere: the kernel table, the data.

        Returns:
            The store on which the world's groups may be built; None for a world of one.

        Raises:
            ConfigError: on rank 0, naming the hosts that may not take part; anywhere, if rank 0's address
                does not resolve.
            CommError: ranks did not come, the store cannot be opened or reached, or rank 0 refused.
        """
        info = self._info
        if info.world_size == 1:
            return None
        import torch.distributed as dist

        from unirl_scale.comm.wire import failures_as_comm_errors

        store = open_store(info, self._environ, self._timeout)
        with failures_as_comm_errors("pre-flight"):
            preflight(
                dist.PrefixStore("preflight", store), info, self._facts(equal), checkpoint_dir(self._cfg)
            )
        return dist.PrefixStore("world", store)

    def _facts(self, equal: Mapping[str, str]) -> Facts:
        cfg, info, environ = self._cfg, self._info, self._environ
        vendor, host = cfg.hardware.vendor, socket.gethostname()
        owned = vendor in VISIBLE_DEVICES and cfg.hardware.transport == "vendor"
        leads = info.local_rank == 0
        base = int(environ.get("HCCL_IF_BASE_PORT", "60000"))
        ports = range(base, base + _HCCL_PORTS) if vendor == "npu" and leads else ()
        taken = port_problem(ports)
        by_name = vendor == "cpu" and leads and not environ.get("GLOO_SOCKET_IFNAME")
        return Facts(
            host=host,
            machine=_machine(host),
            leads=leads,
            device=environ.get(VISIBLE_DEVICES[vendor], "") if owned else "",
            problems=[taken] if taken else (),
            unreachable=name_problem(host, resolve) if by_name else "",
            equal={
                "config": hashlib.sha256(dump(cfg).encode()).hexdigest()[:12],
                **{name: version for name, version in software().items() if name != "platform"},
                "libc": " ".join(platform.libc_ver()),
                **{name: environ.get(name, "unset") for name in _NUMERIC},
                **_hardware(vendor),
                **equal,
            },
        )


def open_store(info: RankInfo, environ: Mapping[str, str], timeout: timedelta) -> Store:
    """The job's TCP store, served by rank 0, or by torchrun's agent.

    Raises:
        ConfigError: rank 0's address does not resolve.
        CommError: the store cannot be opened or reached, or served an earlier start.
    """
    import torch.distributed as dist

    serves = info.rank == 0 and environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    where = f"{info.master_addr}:{info.master_port}"
    try:
        resolve(info.master_addr)
    except OSError:
        raise ConfigError(
            f"ranks: {socket.gethostname()} got MASTER_ADDR {info.master_addr}; it must resolve, to the "
            "host of rank 0; hint: DNS or /etc/hosts, or export another MASTER_ADDR"
        ) from None
    try:
        store = dist.TCPStore(
            info.master_addr,
            info.master_port,
            is_master=serves,
            timeout=timeout,
            wait_for_workers=False,
            multi_tenant=True,
        )
    except RuntimeError as error:
        rule = "its port must be free" if serves else "rank 0 must be there"
        reason = str(error).splitlines()[0]
        raise CommError(
            f"ranks: {socket.gethostname()} got no store at {where} ({reason}); {rule}; "
            "hint: another MASTER_PORT, and an open path to that host"
        ) from error
    if store.add("starts", 1) > info.world_size:
        raise CommError(
            f"ranks: got a store at {where} that served an earlier start; needs a fresh one; "
            "hint: export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for torchrun"
        )
    return store


def _machine(host: str) -> str:
    """The same for all ranks of one machine, and another for any other."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return host


def _hardware(vendor: str) -> dict[str, str]:
    """What the arithmetic depends on besides software."""
    import torch

    if vendor == "cpu":
        return {"cpu": str(torch.backends.cpu.get_cpu_capability())}
    return {"device": str(getattr(torch, vendor).get_device_name(0))}
