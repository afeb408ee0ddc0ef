"""The plan as text: groups, algorithms, times, memory and MFU."""

from __future__ import annotations

from collections.abc import Sequence

from unirl_scale.comm.plan import CallPlan, Plan, RolePlan
from unirl_scale.comm.plan_model import GIB


def plan_table(plan: Plan) -> str:
    """Lines for a terminal, 110 wide at most."""
    lines = [
        f"{plan.world_size} ranks on {len(plan.nodes)} nodes, {plan.transport}; {plan.communicators} "
        f"communicators a rank; step {_ms(plan.step_us)}",
        f"placement: {plan.order}",
    ]
    for role in plan.roles:
        lines += ["", *_role(role)]
    for title, items in (("excluded", plan.excluded), ("note", plan.notes)):
        lines += [f"{title}: {item}" for item in items]
    return "\n".join(lines) + "\n"


def _role(role: RolePlan) -> list[str]:
    mesh = role.mesh
    lines = [
        f"{role.name} ({role.phase}): tp {mesh.tp} dp {mesh.dp} pp {mesh.pp} vpp {mesh.vpp}, layers "
        f"{_layers(role.chunks)}",
        f"  memory {_memory(role)}",
        f"  time {_ms(role.step_us)} = compute {_ms(role.compute_us)} + bubble {_ms(role.bubble_us)} + "
        f"communication {_ms(role.comm_us)}" + (f", MFU {100 * role.mfu:.1f} %" if role.mfu else ""),
    ]
    rows = [("axis", "groups", "size", "members a node, nodes a leaf, ...", "nodes", "leaves", "blocks")]
    rows += [
        (
            g.axis,
            str(g.count),
            str(g.size),
            " x ".join(map(str, g.shape)),
            str(g.most_nodes),
            str(g.most_leaves),
            ",".join(map(str, g.blocks)) or "-",
        )
        for g in role.groups
        if g.size > 1
    ]
    if len(rows) > 1:
        lines += _columns(rows)
    carried = _bytes_by_tier(role)
    if carried:
        shown = ", ".join(f"{name} {value / GIB:.4g}" for name, value in carried.items())
        lines.append(f"  GiB a rank sends a step over: {shown}")
    for sent in role.sent:
        parts = [f"{axis} {getattr(sent, axis)}" for axis in ("tp", "dp", "pp") if getattr(sent, axis)]
        if parts:
            lines.append(f"  bytes rank {sent.rank} (stage {sent.stage}) sends a step: {', '.join(parts)}")
    if role.calls:
        head = ("call", "axis", "collective", "MiB", "a step", "algorithm", "us", "bound us", "total ms")
        lines += _columns([head, *(_call(c) for c in role.calls)])
    return lines


def _bytes_by_tier(role: RolePlan) -> dict[str, float]:
    """Bytes that the busiest rank sends in a step, by tier, tiers without traffic left out."""
    total: dict[str, float] = {}
    for call in role.calls:
        for tier, sent in zip(role.group(call.call.axis).tiers, call.sent_bytes):
            total[tier.name] = total.get(tier.name, 0.0) + sent * call.call.count
    return {name: value for name, value in total.items() if value}


def _call(plan: CallPlan) -> tuple[str, ...]:
    call = plan.call
    algorithm = plan.algorithm if not plan.blocks else f"{plan.algorithm} {plan.blocks}"
    return (
        call.name,
        call.axis,
        call.collective,
        f"{call.size_bytes / 2**20:.4g}",
        f"{call.count:g}",
        algorithm if len(algorithm) <= 34 else algorithm[:33] + "~",
        _number(plan.time_us),
        _number(plan.bound_us),
        "?" if plan.step_us is None else f"{plan.step_us / 1e3:.4g}",
    )


def _columns(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["    " + "  ".join(cell.ljust(w) for cell, w in zip(row, widths)).rstrip() for row in rows]


def _layers(chunks: Sequence[int]) -> str:
    if len(set(chunks)) == 1:
        return f"{len(chunks)} x {chunks[0]}" if len(chunks) > 1 else str(chunks[0])
    text = "+".join(map(str, chunks[:12]))
    return text + ("+..." if len(chunks) > 12 else "")


def _memory(role: RolePlan) -> str:
    m = role.memory
    parts = {
        "weights": m.weights,
        "gradients": m.gradients,
        "optimizer": m.optimizer,
        "activations": m.activations,
        "KV cache": m.kv_cache,
        "buffers": m.communicators,
    }
    shown = ", ".join(f"{name} {value / GIB:.3g}" for name, value in parts.items() if value)
    return f"{m.total / GIB:.4g} GiB a rank (stage {role.memory_stage}: {shown})"


def _ms(value: float | None) -> str:
    return "unknown" if value is None else f"{value / 1e3:.4g} ms"


def _number(value: float | None) -> str:
    return "?" if value is None else f"{value:.4g}"
