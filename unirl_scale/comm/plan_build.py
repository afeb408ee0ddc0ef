"""Make a plan: RunConfig + Topology -> Plan. Pure and deterministic; arrays, not objects, a rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from unirl_scale.comm.plan import Assumptions, GroupPlan, Plan, RolePlan
from unirl_scale.comm.plan_calls import plan_calls, size_classes
from unirl_scale.comm.plan_machine import Machine, OnDegraded, survey
from unirl_scale.comm.plan_model import (
    Memory,
    MicroBatches,
    ModelSize,
    chunk_layers,
    inference_memory,
    model_size,
    samples_per_step,
    training_memory,
)
from unirl_scale.comm.plan_place import block_shape, mesh_ranks, place_all
from unirl_scale.comm.plan_times import best_split, decode_time, score_time, train_time
from unirl_scale.comm.plan_traffic import Axis, decode_calls, training_calls
from unirl_scale.comm.topology.model import IntArray, Topology
from unirl_scale.core.config import MeshConfig, RunConfig
from unirl_scale.core.load import resolve

Phase = Literal["train", "score", "decode"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Role:
    """A role before it is planned."""

    name: str
    phase: Phase
    mesh: MeshConfig
    size: ModelSize


def make_plan(
    cfg: RunConfig,
    topology: Topology,
    assumptions: Assumptions | None = None,
    *,
    on_degraded: OnDegraded = "exclude",
    devices_per_node: int | None = None,
    role_names: Sequence[str] | None = None,
) -> Plan:
    """Plan every role of the run.

    Args:
        cfg: the run; meshes that it leaves out follow from the actor's.
        topology: the machine, from `read_topology` and `merge`.
        assumptions: transport, accelerator, measured layer times; None = guessed from the vendor.
        on_degraded: leave degraded devices out, refuse them, or use them.
        devices_per_node: for files that do not say.
        role_names: of actor, critic, reference and rollout; None = all. An algorithm may lack a critic.

    Returns:
        The same plan for the same input, on every machine.

    Raises:
        PlanError: the meshes do not fit the machine, or the machine is not described well enough.
    """
    full = resolve(cfg)
    told = assumptions or Assumptions(transport=_transport(cfg))
    machine = survey(topology, on_degraded=on_degraded, devices_per_node=devices_per_node)
    roles = [r for r in roles_of(full) if role_names is None or r.name in role_names]
    placement = place_all(
        machine,
        [(r.name, r.mesh) for r in roles],
        lambda mesh: _Score(full, machine, told, mesh, roles),
    )
    places = machine.places[:, placement.slot]
    communicators = _communicators(roles)
    planned = tuple(plan_role(full, role, machine, places, told, communicators) for role in roles)
    used, node = np.unique(machine.node[placement.slot], return_inverse=True)
    return Plan(
        nodes=tuple(topology.nodes[n] for n in used),
        node=node.astype(np.int32),
        device=_local_ids(topology, machine, placement.slot),
        leaf=topology.levels[0].member[used] if topology.levels else np.full(len(used), -1, np.int32),
        order=placement.order,
        roles=planned,
        communicators=communicators,
        transport=told.transport,
        data_slots=full.invariance.data_slots,
        model_leaves=full.invariance.model_leaves,
        excluded=machine.excluded,
        notes=(
            *(str(n) for n in topology.notes),
            *_unknowns(full, planned),
            *_better_splits(full, roles, told),
        ),
    )


def _transport(cfg: RunConfig) -> Literal["nccl", "hccl", "gloo"]:
    return {"cuda": "nccl", "npu": "hccl", "cpu": "gloo"}[cfg.hardware.vendor]  # type: ignore[return-value]


def roles_of(cfg: RunConfig) -> list[Role]:
    """The roles of a resolved configuration."""
    leaves = cfg.invariance.model_leaves
    actor = model_size(cfg.model.actor, leaves)
    critic = model_size(cfg.model.critic or cfg.model.actor, leaves, critic=True)
    base = cfg.mesh.actor
    return [
        Role(name="actor", phase="train", mesh=base, size=actor),
        Role(name="critic", phase="train", mesh=cfg.mesh.critic or base, size=critic),
        Role(name="reference", phase="score", mesh=cfg.mesh.reference or base, size=actor),
        Role(name="rollout", phase="decode", mesh=cfg.mesh.rollout or base, size=actor),
    ]


def micro_batches(cfg: RunConfig, mesh: MeshConfig) -> MicroBatches:
    """What the fullest DP rank runs in one optimizer step."""
    slots = mesh.dp if cfg.invariance.mode == "off" else cfg.invariance.data_slots
    return MicroBatches.of(samples_per_step(cfg), slots, mesh.dp, mesh.micro_batch_size)


class _Score:
    """What a layout costs a step in DP and PP traffic: time to five digits, then bytes, top tier first.

    HCCL wants consecutive ranks on each server, so there the number of visits to nodes comes first.
    """

    def __init__(
        self, cfg: RunConfig, machine: Machine, told: Assumptions, mesh: MeshConfig, roles: Sequence[Role]
    ) -> None:
        self.machine, self.told, self.mesh = machine, told, mesh
        role = next(r for r in roles if r.mesh == mesh)
        calls = training_calls(cfg, role.size, mesh, micro_batches(cfg, mesh))
        self.calls = [c for c in calls if c.axis != "tp"]

    def __call__(self, slots: IntArray) -> tuple[float, ...]:
        places = self.machine.places[:, slots]
        groups = {g.axis: g for g in plan_groups(self.mesh, self.machine, places, first_rank=0)}
        plans = plan_calls(self.calls, groups, self.told)
        times = [p.step_us for p in plans]
        total = float("inf") if None in times else float(f"{sum(t or 0.0 for t in times):.5g}")
        depth = len(self.machine.outer) + 1
        visits = int((np.diff(places[0]) != 0).sum()) + 1 if self.told.transport == "hccl" else 0
        sent = [sum(p.sent_bytes[t] * p.call.count for p in plans) for t in range(depth)]
        return (visits, total, *reversed(sent))


def axis_groups(mesh: MeshConfig, axis: Axis) -> npt.NDArray[np.int32]:
    """Ranks of each group of an axis, relative to the role's first: int32 [count, size]."""
    grid = mesh_ranks(mesh)
    order = {"tp": (0, 1, 2), "dp": (0, 2, 1), "pp": (1, 2, 0)}[axis]
    moved = np.ascontiguousarray(grid.transpose(order))
    return moved.reshape(-1, moved.shape[-1])


def plan_groups(
    mesh: MeshConfig, machine: Machine, places: IntArray, *, first_rank: int | None = None
) -> tuple[GroupPlan, ...]:
    """Groups of the three axes, with their shape on the machine. `places`: int32 [rows, ranks]."""
    first = mesh.first_rank if first_rank is None else first_rank
    out = []
    for axis in ("tp", "dp", "pp"):
        groups = axis_groups(mesh, axis) + np.int32(first)
        shape = _neighbours(places, groups) if axis == "pp" else block_shape(places, groups)
        out.append(
            GroupPlan(
                axis=axis,
                count=groups.shape[0],
                size=groups.shape[1],
                shape=shape,
                most_nodes=_most_places(places[0], groups),
                most_leaves=_most_places(places[min(1, len(places) - 1)], groups),
                tiers=machine.tiers(shape),
            )
        )
    return tuple(out)


def _neighbours(places: IntArray, groups: npt.NDArray[np.int32]) -> tuple[int, ...]:
    """Shape of a pair of pipeline neighbours, the farthest there is; the rest of the chain is put on top."""
    size = groups.shape[1]
    if size == 1:
        return (1,) * (len(places) + 1)
    apart = [(np.diff(row[groups], axis=1) != 0).any() for row in places]
    at = sum(bool(a) for a in apart)
    return tuple(size if i == at else 1 for i in range(len(places) + 1))


def _most_places(row: IntArray, groups: npt.NDArray[np.int32]) -> int:
    ids = np.sort(row[groups], axis=1)
    return int((1 + (np.diff(ids, axis=1) != 0).sum(axis=1)).max(initial=1))


def plan_role(
    cfg: RunConfig,
    role: Role,
    machine: Machine,
    places: IntArray,
    told: Assumptions,
    communicators: int,
) -> RolePlan:
    """Groups, calls, memory and times of one role."""
    mesh = role.mesh
    itemsize = 4 if cfg.precision == "fp32" else 2
    groups = tuple(
        replace(g, classes=size_classes(g, told, itemsize if g.axis == "tp" else 4)) if g.axis != "pp" else g
        for g in plan_groups(mesh, machine, places)
    )
    by_axis = {g.axis: g for g in groups}
    micros = micro_batches(cfg, mesh)
    sequences = -(-samples_per_step(cfg) // mesh.dp)
    if cfg.rollout.batch_size:
        sequences = min(sequences, cfg.rollout.batch_size)
    if role.phase == "decode":
        calls = decode_calls(cfg, role.size, mesh, sequences)
    else:
        calls = training_calls(cfg, role.size, mesh, micros, backward=role.phase == "train")
    plans = plan_calls(calls, by_axis, told)
    memory, stage = _fullest(cfg, role, micros, sequences)
    memory = replace(memory, communicators=communicators * told.communicator_cost)
    if role.phase == "train":
        times = train_time(cfg, role.size, mesh, plans, told, micros)
    elif role.phase == "score":
        times = score_time(cfg, role.size, mesh, plans, told, micros)
    else:
        times = decode_time(cfg, role.size, mesh, plans, told, sequences)
    return RolePlan(
        name=role.name,
        phase=role.phase,
        mesh=mesh,
        chunks=chunk_layers(role.size.config, mesh),
        groups=groups,
        calls=plans,
        memory=memory,
        memory_stage=stage,
        compute_us=times.compute_us,
        bubble_us=times.bubble_us,
        comm_us=times.comm_us,
        mfu=times.mfu,
    )


def _fullest(cfg: RunConfig, role: Role, micros: MicroBatches, sequences: int) -> tuple[Memory, int]:
    options = []
    for stage in range(role.mesh.pp):
        if role.phase == "train":
            memory = training_memory(cfg, role.size, role.mesh, stage, micros)
        else:
            kept = sequences if role.phase == "decode" else 0
            memory = inference_memory(cfg, role.size, role.mesh, stage, kept)
        options.append((memory, stage))
    return max(options, key=lambda o: (o[0].total, -o[1]))


def _communicators(roles: Sequence[Role]) -> int:
    """World, and one an axis of each distinct mesh."""
    meshes = {(r.mesh.tp, r.mesh.dp, r.mesh.pp, r.mesh.first_rank) for r in roles}
    sizes = [n for tp, dp, pp, _ in meshes for n in (tp, dp, pp)]
    return 1 + sum(n > 1 for n in sizes)


def _local_ids(topology: Topology, machine: Machine, slots: IntArray) -> IntArray:
    """Device ids as the vendor counts them (nvidia-smi's GPU number, HCCL's device_id)."""
    node, position = machine.node[slots], machine.device[slots]
    box_of = topology.box_of[node]
    ids = position.copy()
    for b, box in enumerate(topology.boxes):
        table = np.array([d.index for d in box.devices], np.int32)
        mine = box_of == b
        ids[mine] = table[position[mine]]
    return ids.astype(np.int32)


def _better_splits(cfg: RunConfig, roles: Sequence[Role], told: Assumptions) -> tuple[str, ...]:
    """Say where another pipeline_split would be faster."""
    found = []
    for role in roles:
        better = best_split(cfg, role.size, role.mesh, told) if role.phase == "train" else None
        if better is not None and better[1] > 1.001:
            counts, ratio = better
            gain = f"slowest chunk {100 * (1 - 1 / ratio):.1f} % faster"
            found.append(f"mesh.{role.name}.pipeline_split {list(counts)}: {gain}")
    return tuple(found)


def _unknowns(cfg: RunConfig, roles: Sequence[RolePlan]) -> tuple[str, ...]:
    """Say which figures are missing where no time could be predicted."""
    lost = {
        t.name
        for role in roles
        for g in role.groups
        for t in g.tiers
        if t.size > 1 and (t.beta_gb_per_s is None or t.alpha_us is None)
    }
    found = []
    if not cfg.model.actor.vocab_size:
        found.append("model.actor.vocab_size 0 (the tokenizer's): embedding and output layer not counted")
    if lost:
        found.append(
            f"links of {', '.join(sorted(lost))}: figures unknown, so times that use them are not predicted; "
            "add links to a topology YAML, or run unirl-scale probe"
        )
    return tuple(found)
