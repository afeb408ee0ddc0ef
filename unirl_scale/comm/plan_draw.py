"""The machine and its groups as an SVG: nodes in their leaf switches, a square a device."""

from __future__ import annotations

import colorsys
from collections.abc import Iterator
from xml.sax.saxutils import escape

import numpy as np

from unirl_scale.comm.plan import Plan, RolePlan
from unirl_scale.comm.plan_traffic import Axis

_CELL, _GAP, _NODE_GAP, _LABEL = 14, 2, 10, 16
_MOST_NODES = 512


def draw_plan(plan: Plan, role: str = "actor", axis: Axis = "pp") -> str:
    """An SVG of the first 512 nodes: fill = the device's coordinate on `axis`, outline = its TP group.

    Args:
        role: whose groups.
        axis: "pp" colours pipeline stages, "dp" data-parallel replicas, "tp" tensor-parallel shards.
    """
    chosen = plan.role(role)
    colour, title = _coordinates(plan, chosen, axis)
    shown = min(len(plan.nodes), _MOST_NODES)
    ranks_of: list[list[int]] = [[] for _ in range(shown)]
    for rank, node in enumerate(plan.node.tolist()):
        if node < shown:
            ranks_of[node].append(rank)
    widest = max(len(r) for r in ranks_of)
    columns = max(1, min(shown, 960 // (min(widest, 8) * (_CELL + _GAP) + _NODE_GAP)))
    body, height = _nodes(plan, chosen, ranks_of, colour, columns)
    width = columns * (min(widest, 8) * (_CELL + _GAP) + _NODE_GAP) + _NODE_GAP
    head = f"{plan.world_size} ranks, {role}: {title}"
    if shown < len(plan.nodes):
        head += f"; first {shown} of {len(plan.nodes)} nodes"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{max(width, 480)}" height="{height + 40}" '
        f'font-family="sans-serif" font-size="10">\n<rect width="100%" height="100%" fill="white"/>\n'
        f'<text x="{_NODE_GAP}" y="20" font-size="13">{escape(head)}</text>\n' + "".join(body) + "</svg>\n"
    )


def _coordinates(plan: Plan, role: RolePlan, axis: Axis) -> tuple[list[str], str]:
    """Fill of each rank of the world, and what the colours mean."""
    mesh = role.mesh
    size = mesh.tp * mesh.dp * mesh.pp
    rank = np.arange(size)
    own = {"tp": rank % mesh.tp, "dp": rank // mesh.tp % mesh.dp, "pp": rank // (mesh.tp * mesh.dp)}[axis]
    count = {"tp": mesh.tp, "dp": mesh.dp, "pp": mesh.pp}[axis]
    fills = ["#eeeeee"] * plan.world_size
    for r, c in enumerate(own.tolist()):
        fills[mesh.first_rank + r] = _hue(c / max(count, 1))
    return fills, f"colour = {axis} coordinate (0 to {count - 1}), outline = tp group, tooltip = rank"


def _hue(share: float) -> str:
    red, green, blue = colorsys.hls_to_rgb(share, 0.72, 0.65)
    return f"#{round(red * 255):02x}{round(green * 255):02x}{round(blue * 255):02x}"


def _nodes(
    plan: Plan, role: RolePlan, ranks_of: list[list[int]], colour: list[str], columns: int
) -> tuple[list[str], int]:
    """Boxes node by node; a new leaf switch starts a new row with its own heading."""
    out: list[str] = []
    widest = min(max(len(r) for r in ranks_of), 8)
    step_x = widest * (_CELL + _GAP) + _NODE_GAP
    lines = -(-max(len(r) for r in ranks_of) // 8)
    step_y = lines * (_CELL + _GAP) + _LABEL + 6
    x, y, column, last = _NODE_GAP, 34, 0, None
    for node, ranks in enumerate(ranks_of):
        leaf = int(plan.leaf[node])
        if leaf != last and leaf >= 0:
            y += (step_y if column else 0) + (_LABEL if last is not None else 0)
            x, column = _NODE_GAP, 0
            out.append(f'<text x="{x}" y="{y + 8}" fill="#666">leaf {leaf}</text>\n')
            y += 12
        elif column == columns:
            x, column, y = _NODE_GAP, 0, y + step_y
        last = leaf
        out.extend(_node(plan, role, node, ranks, colour, x, y))
        x, column = x + step_x, column + 1
    return out, y + step_y


def _node(
    plan: Plan, role: RolePlan, node: int, ranks: list[int], colour: list[str], x: int, y: int
) -> Iterator[str]:
    yield f'<text x="{x}" y="{y + 10}">{escape(plan.nodes[node][-14:] or "node")}</text>\n'
    mesh = role.mesh
    for i, rank in enumerate(ranks):
        left, top = x + i % 8 * (_CELL + _GAP), y + _LABEL - 2 + i // 8 * (_CELL + _GAP)
        group = (rank - mesh.first_rank) // mesh.tp
        edge = "#333" if group % 2 else "#999"
        yield (
            f'<rect x="{left}" y="{top}" width="{_CELL}" height="{_CELL}" fill="{colour[rank]}" '
            f'stroke="{edge}">'
            f"<title>rank {rank}, device {plan.device[rank]}, tp group {group}</title></rect>\n"
        )
