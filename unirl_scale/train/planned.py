"""A plan as the trainer uses it: does it belong to this run, and how do the sums over each axis run."""

from __future__ import annotations

from unirl_scale.comm.plan import GroupPlan, Plan, RolePlan, reduction_blocks
from unirl_scale.core.config import MeshConfig, RunConfig
from unirl_scale.core.errors import PlanError
from unirl_scale.core.problems import show
from unirl_scale.parallel.build import Reductions

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
    return {role.name: {axis: _reductions(plan, role, axis) for axis in ("tp", "dp")} for role in plan.roles}


def _reductions(plan: Plan, role: RolePlan, axis: str) -> Reductions:
    scattered = axis == "dp" or _sequence_parallel(role.mesh)
    group = role.group("dp" if axis == "dp" else "tp")
    blocks = reduction_blocks(plan, role.name, group.axis, "reduce_scatter" if scattered else "all_reduce")
    return Reductions(blocks=blocks, gather_below_bytes=_gathered(group))


def _sequence_parallel(mesh: MeshConfig) -> bool:
    return mesh.sequence_parallel and mesh.tp > 1


def _gathered(group: GroupPlan) -> int:
    """Bytes of all members' nodes together up to which the plan gathers and adds locally."""
    if not group.classes or group.classes[0].algorithm != "gather_tree":
        return 0
    largest = group.classes[0].up_to_bytes
    return _WHOLE if largest is None else largest * group.size
