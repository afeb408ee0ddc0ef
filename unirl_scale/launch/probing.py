"""`unirl-scale probe`: measure the links between the running ranks, and write the topology YAML."""

from __future__ import annotations

import socket
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from unirl_scale.comm.plan_machine import survey
from unirl_scale.comm.probe import evaluate, probe_groups, probe_rounds, probed_topology
from unirl_scale.comm.topology import Box, Link, Topology, make_box, merge, read_topology, write_yaml
from unirl_scale.comm.topology.model import Vendor
from unirl_scale.core.config import HardwareConfig
from unirl_scale.core.errors import ConfigError
from unirl_scale.core.ranks import RankInfo
from unirl_scale.launch import environment
from unirl_scale.launch.console import Console
from unirl_scale.launch.local import run_local
from unirl_scale.launch.meeting import open_store
from unirl_scale.launch.mpi import ask_mpi
from unirl_scale.launch.rank_process import run_as_rank
from unirl_scale.launch.ranks import discover
from unirl_scale.launch.training import show_outcome

_VENDORS: Mapping[str, Vendor] = {"cpu": "unknown", "cuda": "cuda", "npu": "npu"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeCommand:
    """What the command line asked for.

    Attributes:
        out: the YAML.
        topology: files whose figures the measured ones replace; () = just the hosts of the ranks.
        vendor: as `hardware.vendor`.
        nproc: local ranks to start where no launcher did.
        sizes: bytes of a message; () = 1 KiB to 64 MiB.
        repeats: exchanges a size.
    """

    out: str
    topology: tuple[str, ...] = ()
    vendor: str = "cpu"
    nproc: int = 2
    sizes: tuple[int, ...] = ()
    repeats: int = 20

    def words(self) -> list[str]:
        """The command line of a rank that is already started."""
        words = ["probe", "--out", self.out, "--vendor", self.vendor, "--repeats", str(self.repeats)]
        words += ["--sizes", ",".join(map(str, self.sizes))] if self.sizes else []
        return words + (["--topology", *self.topology] if self.topology else [])


def probe_command(command: ProbeCommand, console: Console) -> int:
    """Measure on the ranks that a launcher started, or on local ones of our own; the exit status.

    Raises:
        ConfigError: a single rank, or a topology that names other hosts.
        PlanError: a topology file cannot be read.
    """
    environ = environment.current()
    info = discover(environ, ask_mpi)
    if info.launcher == "none":
        numeric = environment.numeric_environment(environ, 1)
        arguments = [sys.executable, "-m", "unirl_scale", *command.words()]
        with TemporaryDirectory(prefix="unirl-scale-probe-") as logs:
            outcome = run_local(arguments, command.nproc, {**environ, **numeric}, Path(logs))
        show_outcome(outcome, console)
        return outcome.status
    return run_as_rank(partial(_probe_rank, command, info, environ, console), info.rank, environ, console)


def _probe_rank(command: ProbeCommand, info: RankInfo, environ: Mapping[str, str], console: Console) -> None:
    if info.world_size < 2:
        raise ConfigError("probe: got one rank; must have two or more to exchange; hint: --nproc 2")
    base = merge([read_topology(path) for path in command.topology]) if command.topology else None
    environment.hide_mpi()
    hardware = HardwareConfig(vendor=command.vendor)
    environment.apply(environment.device_environment(hardware, info, environ))
    import torch

    from unirl_scale.comm.groups import connect
    from unirl_scale.comm.probe import PROBE_SIZES
    from unirl_scale.comm.probe_ranks import probe, probe_collectives
    from unirl_scale.train.setup import transport

    timeout = timedelta(minutes=10)
    store = open_store(info, environment.current(), timeout)
    backend, device = transport(hardware)
    with connect(info.rank, info.world_size, backend, store=store, timeout=timeout, device=device) as factory:
        hosts = factory.world.all_gather_object(environ.get("SLURMD_NODENAME") or socket.gethostname())
        topology = base or hosts_topology(hosts, _VENDORS[command.vendor])
        synchronize = partial(torch.accelerator.synchronize, device) if device.type != "cpu" else lambda: None
        samples = probe(
            factory.world,
            probe_rounds(hosts, _leaves(hosts, topology)),
            sizes=command.sizes or PROBE_SIZES,
            repeats=command.repeats,
            synchronize=synchronize,
        )
        groups = probe_collectives(
            factory,
            probe_groups(hosts),
            sizes=command.sizes or PROBE_SIZES,
            repeats=command.repeats,
            synchronize=synchronize,
        )
    if info.rank:
        return
    probed = evaluate(samples)
    measured = probed_topology(topology, probed, groups)
    survey(measured)  # refuses what `plan` would refuse later
    Path(command.out).write_text(write_yaml(measured))
    links = [*(p.link() for p in probed), *(g.link() for g in groups)]
    console.table([("link", "alpha us", "GB/s", "from"), *(_row(link) for link in links)])
    for note in (text for p in probed for text in p.slow):
        console.line(f"slow: {note}")
    console.line(f"wrote {command.out}")


def _row(link: Link) -> tuple[str, ...]:
    return link.kind, f"{link.alpha_us:.1f}", f"{link.beta_gb_per_s:.3g}", link.source


def hosts_topology(hosts: Sequence[str], vendor: Vendor) -> Topology:
    """The hosts of the ranks as nodes, a device a rank, without any figure yet."""
    counts = Counter(hosts)
    sizes = sorted(set(counts.values()))
    name = "node"
    boxes: tuple[Box, ...] = tuple(
        make_box(size, Link(kind=name), nic=Link(kind="nic"), nics=1, vendor=vendor) for size in sizes
    )
    return Topology(
        kind="probed ranks",
        nodes=tuple(counts),
        boxes=boxes,
        box_of=np.array([sizes.index(n) for n in counts.values()], np.int32),
        devices_per_node=np.array(list(counts.values()), np.int32),
        network=Link(kind="nic"),
    )


def _leaves(hosts: Sequence[str], topology: Topology) -> list[int] | None:
    """Leaf switch of each rank.

    Raises:
        ConfigError: the topology does not have a host.
    """
    index = {node: i for i, node in enumerate(topology.nodes)}
    if topology.nodes == ("",):
        return None
    lost = sorted(set(hosts) - index.keys())
    if lost:
        raise ConfigError(
            f"--topology: got files without the hosts {', '.join(lost[:5])} of the ranks; must name them; "
            "hint: the files of this cluster, or none"
        )
    if not topology.levels:
        return None
    return [int(topology.levels[0].member[index[host]]) for host in hosts]
