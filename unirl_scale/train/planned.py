"""A plan as the trainer uses it: does it belong to this run, how do the sums over each axis run, and what do
they send."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from unirl_scale.comm.plan import GroupPlan, Plan, RolePlan, SentBytes, reduction_blocks
from unirl_scale.comm.plan_model import samples_per_step
from unirl_scale.comm.plan_traffic import Axis
from unirl_scale.comm.tree import split_contiguous
from unirl_scale.core.config import RunConfig
from unirl_scale.core.errors import PlanError
from unirl_scale.core.load import resolve
from unirl_scale.core.mesh import Mesh
from unirl_scale.core.problems import show
from unirl_scale.parallel.build import Reductions
from unirl_scale.parallel.traffic import Workload, step_traffic
from unirl_scale.train.sent import AXES, axis_bytes

_ROLES = ("actor", "critic", "reference", "rollout")
_LAYOUT = ("tp", "pp", "dp", "vpp", "sequence_parallel", "first_rank")
_WHOLE = 1 << 62  # larger than any message


def require_planned(cfg: RunConfig, plan: Plan, world_size: int) -> None:
    """The plan is for these ranks, leaves and meshes.

    Raises:
        PlanError: naming the first thing that differs.
    """
    facts = (
        ("world_size", plan.world_size, world_size),
        ("data_slots", plan.data_slots, cfg.invariance.data_slots),
        ("model_leaves", plan.model_leaves, cfg.invariance.model_leaves),
    )
    for field, planned, ours in facts:
        if planned != ours:
            raise _other(field, planned, ours)
    for name in _ROLES:
        planned_mesh, mesh = plan.role(name).mesh, getattr(cfg.mesh, name)
        for field in _LAYOUT:
            if getattr(planned_mesh, field) != getattr(mesh, field):
                raise _other(f"{name}.mesh.{field}", getattr(planned_mesh, field), getattr(mesh, field))


def _other(field: str, planned: object, ours: object) -> PlanError:
    return PlanError(
        f"plan.{field}: got {show(planned)}; this run has {show(ours)}; must be the same; "
        "hint: make the plan again from this configuration"
    )


def planned_reductions(plan: Plan) -> dict[str, dict[str, Reductions]]:
    """Role -> axis -> how its ordered sums run."""
    axes: tuple[Axis, ...] = ("tp", "dp")
    return {role.name: {axis: _reductions(plan, role, axis) for axis in axes} for role in plan.roles}


def _reductions(plan: Plan, role: RolePlan, axis: Axis) -> Reductions:
    blocks = reduction_blocks(plan, role.name, axis)
    return Reductions(blocks=blocks, gather_below_bytes=_gathered(role.group(axis)))


def _gathered(group: GroupPlan) -> int:
    """Bytes of all members' nodes together up to which the plan gathers and adds locally."""
    return int(min(group.gather_below_bytes * group.size, _WHOLE))


def with_sent_bytes(plan: Plan, cfg: RunConfig) -> Plan:
    """The plan with the exact bytes that its training roles send; unchanged where they are not known: the
    vocabulary is the tokenizer's (vocab_size 0), or the sums are the vendor's (mode `off`)."""
    full = resolve(cfg)
    if full.invariance.mode == "off" or not full.model.actor.vocab_size:
        return plan
    reductions = planned_reductions(plan)
    roles = (
        replace(role, sent=_sent(full, role, reductions[role.name])) if role.phase == "train" else role
        for role in plan.roles
    )
    return replace(plan, roles=tuple(roles))


def _sent(cfg: RunConfig, role: RolePlan, planned: Mapping[str, Reductions]) -> tuple[SentBytes, ...]:
    """One rank of each kind of stage: stages with as many layers and the same ends send the same."""
    critic, mesh = role.name == "critic", Mesh.from_config(role.mesh)
    work = Workload(
        model=(cfg.model.critic if critic else None) or cfg.model.actor,
        mesh=role.mesh,
        invariance=cfg.invariance,
        head="value" if critic else "lm",
        itemsize=4 if cfg.precision == "fp32" else 2,
        samples=(),
        planned=planned,
    )
    kinds = {}
    for stage in range(mesh.pp):
        kinds.setdefault((role.chunks[stage :: mesh.pp], stage == 0, stage == mesh.pp - 1), stage)
    lengths = (cfg.rollout.max_prompt_tokens, cfg.rollout.max_response_tokens)
    found = []
    for stage in kinds.values():
        rank = mesh.rank_at(tp=0, dp=0, pp=stage)
        sent = equal_samples_bytes(work, rank, lengths, samples_per_step(cfg))
        found.append(SentBytes(rank=rank, stage=stage, **sent))
    return tuple(found)


def equal_samples_bytes(work: Workload, rank: int, lengths: tuple[int, int], samples: int) -> dict[str, int]:
    """Axis -> what `step_traffic` counts for so many samples of one length, in time that does not grow with
    them: micro-batches of one size send the same.

    Args:
        work: without samples.
        rank: on the mesh.
        lengths: prompt and response tokens of each sample.
    """
    mesh, slots = Mesh.from_config(work.mesh), work.invariance.data_slots
    at = mesh.coordinates(rank)
    assert at is not None and not work.samples
    slot_sizes = [len(part) for part in split_contiguous(samples, slots)]
    held = Counter(slot_sizes[slot] for slot in split_contiguous(slots, mesh.dp)[at.dp])
    micros: Counter[int] = Counter()
    for size, count in held.items():
        full, rest = divmod(size, work.mesh.micro_batch_size)
        micros[work.mesh.micro_batch_size] += count * full
        micros[rest] += count
    one_slot = replace(work, invariance=replace(work.invariance, data_slots=mesh.dp))  # a rank, a slot
    total = Counter(axis_bytes(step_traffic(work, rank)))
    nothing = axis_bytes(step_traffic(one_slot, rank))
    for size, count in micros.items():
        alone = axis_bytes(step_traffic(replace(one_slot, samples=[lengths] * size * mesh.dp), rank))
        total.update({axis: count * (alone[axis] - nothing[axis]) for axis in AXES})
    return {axis: total[axis] for axis in AXES}
