"""What `unirl-scale plan` asks for: files in, a verified plan out."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from unirl_scale.comm.plan import ACCELERATORS, Accelerator, Assumptions, Plan, Transport
from unirl_scale.comm.plan_build import make_plan
from unirl_scale.comm.plan_machine import OnDegraded
from unirl_scale.comm.plan_search import Candidate, Limits, search_layouts
from unirl_scale.comm.plan_verify import verify
from unirl_scale.comm.topology import MACHINES, Topology, cluster, merge, read_topology, spread
from unirl_scale.comm.topology.links import nvlink
from unirl_scale.comm.topology.merge import with_figures
from unirl_scale.comm.topology.model import MAX_NODES, Link
from unirl_scale.comm.topology.nvidia_smi import ASSUMED
from unirl_scale.core.check import world_size_of
from unirl_scale.core.config import RunConfig
from unirl_scale.core.errors import PlanError
from unirl_scale.core.problems import name_hint

TRANSPORTS: dict[str, Transport] = {"cuda": "nccl", "npu": "hccl", "cpu": "gloo"}


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """The options of the command.

    Attributes:
        files: topology files, in any order.
        machine: instead of files, a name of MACHINES.
        ranks: to plan for; a one-box topology is repeated until it holds them. None = as the meshes span, or
            in a search as many as there are devices for.
        accelerator: a name of ACCELERATORS; "" = unknown, then nothing that needs it is predicted.
        memory_bytes: a rank may use; None = the accelerator's.
        layer_us: measured time of each layer for one micro-batch.
        roles: to plan; None = all.
    """

    files: tuple[str | os.PathLike[str], ...] = ()
    machine: str = ""
    ranks: int | None = None
    accelerator: str = ""
    memory_bytes: float | None = None
    layer_us: tuple[float, ...] = ()
    on_degraded: OnDegraded = "exclude"
    devices_per_node: int | None = None
    roles: tuple[str, ...] | None = None


def plan(cfg: RunConfig, request: PlanRequest) -> tuple[Plan, Topology, tuple[str, ...]]:
    """Read, merge, plan and verify.

    Returns:
        The plan, the topology it is for, and what `verify` showed.

    Raises:
        PlanError: a file that cannot be read, an unknown machine or accelerator, or meshes that do not fit.
    """
    topology = _described(cfg, request, request.ranks or world_size_of(cfg))
    made = make_plan(
        cfg,
        topology,
        _assumptions(cfg, request),
        on_degraded=request.on_degraded,
        devices_per_node=request.devices_per_node,
        role_names=request.roles,
    )
    return made, topology, verify(made, topology)


def search(cfg: RunConfig, request: PlanRequest, *, best: int = 5) -> list[Candidate]:
    """`mesh: auto`: the best layouts of the actor on the request's ranks.

    Raises:
        PlanError: as `plan`, or no layout fits.
    """
    topology = _described(cfg, request, request.ranks or 1)
    limits = Limits(ranks=request.ranks, memory_bytes=request.memory_bytes)
    return search_layouts(
        cfg,
        topology,
        _assumptions(cfg, request),
        limits,
        best=best,
        on_degraded=request.on_degraded,
        devices_per_node=request.devices_per_node,
    )


def _described(cfg: RunConfig, request: PlanRequest, ranks: int) -> Topology:
    """The machine, with the accelerator's NVLinks where files count them and do not say which they are.

    Raises:
        PlanError: also where its devices are another vendor's than the configuration's.
    """
    topology = _topology(request, ranks)
    found = {d.vendor for box in topology.boxes for d in box.devices} & {"cuda", "npu"}
    vendor = cfg.hardware.vendor
    if vendor != "cpu" and found and vendor not in found:
        other = ", ".join(sorted(found))
        raise PlanError(
            f"hardware.vendor: got {vendor} for a machine of {other} devices; must be the machine's; "
            f"hint: hardware.vendor={other}"
        )
    each = _accelerator(request.accelerator).nvlink_gb_per_s
    if each is None:
        return topology
    kinds = [k for box in topology.boxes for k in box.links if re.fullmatch(r"NV\d+", k)]
    figures = {kind: _nvlinks(kind, each, request.accelerator) for kind in kinds}
    kept = tuple(n for n in topology.notes if not n.what.endswith(ASSUMED))
    return replace(with_figures(topology, figures), notes=kept) if figures else topology


def _nvlinks(kind: str, each: float, accelerator: str) -> Link:
    count = int(kind.removeprefix("NV"))
    source = f"{count} NVLinks x {each:g} GB/s ({accelerator})"
    return replace(nvlink(count), beta_gb_per_s=count * each, source=source)


def _topology(request: PlanRequest, ranks: int) -> Topology:
    if ranks > MAX_NODES:
        raise PlanError(f"plan.ranks: got {ranks}; must be at most {MAX_NODES}; hint: fewer --ranks")
    if request.machine and request.files:
        raise PlanError("plan: got a machine name and topology files; must be one; hint: drop --machine")
    if request.machine:
        if request.machine not in MACHINES:
            hint = name_hint(request.machine, MACHINES)
            raise PlanError(f"plan.machine: got {request.machine!r}; must be a known machine; hint: {hint}")
        box = MACHINES[request.machine]
        return cluster(box, -(-ranks // box.size))
    return spread(merge([read_topology(path) for path in request.files]), ranks)


def _assumptions(cfg: RunConfig, request: PlanRequest) -> Assumptions:
    return Assumptions(
        transport=TRANSPORTS[cfg.hardware.vendor],
        accelerator=_accelerator(request.accelerator),
        layer_us=request.layer_us,
        memory_limit_bytes=request.memory_bytes,
    )


def _accelerator(name: str) -> Accelerator:
    if not name:
        return Accelerator()
    if name not in ACCELERATORS:
        raise PlanError(
            f"plan.accelerator: got {name!r}; must be known; "
            f"hint: {name_hint(name, ACCELERATORS)}, or leave it out"
        )
    return replace(ACCELERATORS[name])


def describe_search(found: Sequence[Candidate]) -> str:
    """The candidates as lines, best first."""
    return "".join(f"{i}. {c.reason}\n" for i, c in enumerate(found, 1))
