"""`mesh: auto`: search the layouts of the actor that fit the memory, and say why the best few are best."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Literal

import numpy as np

from unirl_scale.comm.plan import Assumptions, RolePlan
from unirl_scale.comm.plan_build import Role, micro_batches, plan_role, roles_of
from unirl_scale.comm.plan_machine import Machine, OnDegraded, survey
from unirl_scale.comm.plan_model import GIB
from unirl_scale.comm.plan_place import tp_units
from unirl_scale.comm.plan_times import best_split
from unirl_scale.comm.topology.model import Topology
from unirl_scale.core.check import check
from unirl_scale.core.config import MeshConfig, MeshesConfig, RunConfig
from unirl_scale.core.errors import PlanError
from unirl_scale.core.load import resolve

_RECOMPUTE: tuple[Literal["none", "block"], ...] = ("none", "block")


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What the search may use.

    Attributes:
        ranks: devices to use; None = as many as any layout can.
        memory_bytes: a rank; None = what the accelerator has.
        memory_share: of it that a plan may fill, the rest being fragmentation and libraries.
        tp, pp: largest degrees.
        micro_batch_sizes, vpp: values to try.
    """

    ranks: int | None = None
    memory_bytes: float | None = None
    memory_share: float = 0.9
    tp: int = 64
    pp: int = 64
    micro_batch_sizes: tuple[int, ...] = (1, 2, 4)
    vpp: tuple[int, ...] = (1, 2, 4)


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A layout, what it costs, and in words why it stands where it stands."""

    mesh: MeshConfig
    role: RolePlan
    reason: str

    @property
    def tokens_cost_us(self) -> float:
        """Predicted time of an optimizer step."""
        return self.role.step_us or float("inf")


def search_layouts(
    cfg: RunConfig,
    topology: Topology,
    assumptions: Assumptions,
    limits: Limits | None = None,
    *,
    best: int = 5,
    on_degraded: OnDegraded = "exclude",
    devices_per_node: int | None = None,
) -> list[Candidate]:
    """The `best` fastest legal layouts of the actor that fit, fastest first.

    Layouts are ranked by predicted time; where no time can be predicted, by bytes over the network.

    Raises:
        PlanError: none fits; the message says what the least memory was and what the limit is.
    """
    told = limits or Limits()
    machine = survey(topology, on_degraded=on_degraded, devices_per_node=devices_per_node)
    memory = told.memory_bytes or assumptions.limit_bytes
    full = resolve(cfg)
    units = _units(full, machine, told)
    ranks = told.ranks or _most_ranks(full, units, told) or machine.slots
    found: list[Candidate] = []
    least: tuple[float, MeshConfig] | None = None
    for mesh in _legal(full, units, ranks, told, assumptions):
        role = _estimate(full, machine, mesh, assumptions)
        used = role.memory.total
        if least is None or used < least[0]:
            least = used, mesh
        if memory is None or used <= memory * told.memory_share:
            found.append(Candidate(mesh=mesh, role=role, reason=""))
    if not found:
        raise _nothing(ranks, least, memory, told)
    found.sort(key=_order)
    return [replace(c, reason=_reason(c, found[0])) for c in found[:best]]


def _nothing(
    ranks: int, least: tuple[float, MeshConfig] | None, memory: float | None, told: Limits
) -> PlanError:
    if least is None:
        return PlanError(
            f"mesh: got auto on {ranks} ranks; no tp x pp x dp is legal for this model and batch; "
            "hint: raise invariance.data_slots or model_leaves, or use fewer ranks"
        )
    need, mesh = least
    room = (memory or 0.0) * told.memory_share
    return PlanError(
        f"mesh: got auto with {room / GIB:.1f} GiB a rank; the smallest layout, {_words(mesh)}, needs "
        f"{need / GIB:.1f} GiB; must fit; hint: more ranks, recompute: block, or shorter sequences"
    )


def _units(cfg: RunConfig, machine: Machine, told: Limits) -> dict[int, int]:
    """tp -> groups of so many devices that the machine holds; a tp that it cannot place is left out."""
    free = np.arange(machine.slots, dtype=np.int32)
    found = {}
    for tp in _divisors(cfg.invariance.model_leaves, told.tp):
        with contextlib.suppress(PlanError):
            found[tp] = len(tp_units(machine, free, tp))
    return found


def _most_ranks(cfg: RunConfig, units: Mapping[int, int], told: Limits) -> int:
    """Ranks of the largest layout."""
    deepest, slots = min(told.pp, cfg.model.actor.num_layers), cfg.invariance.data_slots
    sizes = (
        MeshConfig(tp=tp, pp=pp, dp=min(slots, count // pp), sequence_parallel=tp > 1)
        for tp, count in units.items()
        for pp in range(1, min(deepest, count) + 1)
    )
    legal = (m for m in sizes if not check(replace(cfg, mesh=MeshesConfig(actor=m))))
    return max((m.tp * m.pp * m.dp for m in legal), default=0)


def _legal(
    cfg: RunConfig, units: Mapping[int, int], ranks: int, told: Limits, assumptions: Assumptions
) -> Iterator[MeshConfig]:
    """Layouts of exactly `ranks` ranks that the rules of core/check.py allow and the machine can hold."""
    layers = cfg.model.actor.num_layers
    for tp, count in units.items():
        for pp in range(1, min(told.pp, layers) + 1):
            dp = ranks // (tp * pp)
            if ranks % (tp * pp) or dp > cfg.invariance.data_slots or dp * pp > count:
                continue
            plain = MeshConfig(tp=tp, pp=pp, dp=dp, sequence_parallel=tp > 1)
            sizes = _distinct_sizes(cfg, plain, told.micro_batch_sizes)
            vpps = [vpp for vpp in told.vpp if vpp == 1 or (pp > 1 and pp * vpp <= layers)]
            for vpp, size, recompute in product(vpps, sizes, _RECOMPUTE):
                mesh = replace(plain, vpp=vpp, micro_batch_size=size, recompute=recompute)
                mesh = _with_split(cfg, mesh, assumptions)
                if not check(replace(cfg, mesh=MeshesConfig(actor=mesh))):
                    yield mesh


def _distinct_sizes(cfg: RunConfig, mesh: MeshConfig, sizes: Sequence[int]) -> list[int]:
    """Micro-batch sizes without those that a data slot never fills: a smaller one gives the same."""
    largest = {size: micro_batches(cfg, replace(mesh, micro_batch_size=size)).largest for size in sizes}
    return [size for size in sizes if size == min(s for s in sizes if largest[s] == largest[size])]


def _with_split(cfg: RunConfig, mesh: MeshConfig, told: Assumptions) -> MeshConfig:
    """The mesh with the optimal pipeline_split, where layer times are known."""
    actor = next(r for r in roles_of(replace(cfg, mesh=MeshesConfig(actor=mesh))) if r.name == "actor")
    better = best_split(cfg, actor.size, mesh, told)
    return mesh if better is None else replace(mesh, pipeline_split=better[0])


def _divisors(value: int, limit: int) -> list[int]:
    return [n for n in range(1, min(value, limit) + 1) if value % n == 0]


def _estimate(cfg: RunConfig, machine: Machine, mesh: MeshConfig, told: Assumptions) -> RolePlan:
    """The role as if placed stage after stage, without searching a placement."""
    actor = next(r for r in roles_of(replace(cfg, mesh=MeshesConfig(actor=mesh))) if r.name == "actor")
    units = tp_units(machine, np.arange(machine.slots, dtype=np.int32), mesh.tp)
    slots = units[: mesh.dp * mesh.pp].reshape(-1)
    communicators = 1 + sum(n > 1 for n in (mesh.tp, mesh.dp, mesh.pp))
    role = Role(name=actor.name, phase=actor.phase, mesh=mesh, size=actor.size)
    return plan_role(cfg, role, machine, machine.places[:, slots], told, communicators)


def _order(candidate: Candidate) -> tuple[float, float, float, tuple[int, ...]]:
    role, mesh = candidate.role, candidate.mesh
    sent = sum(sum(c.sent_bytes[1:]) * c.call.count for c in role.calls)
    layout = (mesh.pp, mesh.tp, mesh.vpp, mesh.micro_batch_size, int(mesh.recompute == "block"))
    return candidate.tokens_cost_us, sent, role.memory.total, layout


def _words(mesh: MeshConfig) -> str:
    words = f"tp {mesh.tp} pp {mesh.pp} dp {mesh.dp} vpp {mesh.vpp} micro-batch {mesh.micro_batch_size}"
    return words + (" with recomputation" if mesh.recompute == "block" else "")


def _reason(candidate: Candidate, first: Candidate) -> str:
    role = candidate.role
    memory = f"{role.memory.total / GIB:.1f} GiB a rank"
    if role.step_us is None or first.role.step_us is None:
        return f"{_words(candidate.mesh)}: {memory}; times unknown, ranked by bytes over the network"
    parts = {
        "compute": (role.compute_us, first.role.compute_us),
        "bubble": (role.bubble_us, first.role.bubble_us),
        "communication": (role.comm_us, first.role.comm_us),
    }
    head = f"{_words(candidate.mesh)}: {role.step_us / 1e3:.4g} ms, {memory}"
    if role.mfu:
        head += f", MFU {100 * role.mfu:.1f} %"
    if candidate.mesh == first.mesh:
        share = {name: (own or 0.0) / role.step_us for name, (own, _) in parts.items()}
        return head + "; " + ", ".join(f"{name} {100 * s:.0f} %" for name, s in share.items())
    worse = {name: (own or 0.0) - (top or 0.0) for name, (own, top) in parts.items()}
    name = max(worse, key=lambda n: worse[n])
    slower = role.step_us / first.role.step_us - 1
    return head + f"; {100 * slower:.1f} % slower than the first, mostly {name} (+{worse[name] / 1e3:.4g} ms)"
