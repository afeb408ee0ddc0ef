"""The machine and its groups as a picture: nodes in their leaf switches, a square a device. SVG or PNG."""

from __future__ import annotations

import colorsys
import io
from collections.abc import Iterator
from dataclasses import dataclass
from xml.sax.saxutils import escape

import numpy as np

from unirl_scale.comm.plan import Plan, RolePlan
from unirl_scale.comm.plan_traffic import Axis
from unirl_scale.core.errors import PlanError

_CELL, _GAP, _NODE_GAP, _LABEL = 14, 2, 10, 16
_MOST_NODES = 512
_DPI = 144


@dataclass(frozen=True, slots=True)
class Text:
    """A line of text, from its left end on the base line."""

    x: int
    y: int
    text: str
    size: int = 10
    colour: str = "#000000"


@dataclass(frozen=True, slots=True)
class Square:
    """A device, from its top left corner; `title` says which."""

    x: int
    y: int
    fill: str
    edge: str
    title: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawing:
    """A picture in pixels, x to the right and y down."""

    width: int
    height: int
    parts: tuple[Text | Square, ...]

    def svg(self) -> str:
        """The picture as SVG; a device's title shows under the pointer."""
        body = "".join(_svg(part) for part in self.parts)
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{self.width}" height="{self.height}" '
            f'font-family="sans-serif">\n<rect width="100%" height="100%" fill="white"/>\n{body}</svg>\n'
        )

    def png(self) -> bytes:
        """The picture as PNG, two pixels for one.

        Raises:
            PlanError: matplotlib is not installed.
        """
        try:
            from matplotlib.backends.backend_agg import FigureCanvasAgg
            from matplotlib.figure import Figure
            from matplotlib.patches import Rectangle
        except ImportError as err:
            raise PlanError(
                "--draw: got a .png, which needs matplotlib; must be installed; "
                "hint: pip install 'unirl-scale[plot]', or draw an .svg"
            ) from err
        figure = Figure(figsize=(self.width / 72, self.height / 72), dpi=_DPI)  # a point is one of our pixels
        FigureCanvasAgg(figure)
        axes = figure.add_axes((0, 0, 1, 1), xlim=(0, self.width), ylim=(self.height, 0))
        axes.axis("off")
        for part in self.parts:
            if isinstance(part, Text):
                axes.text(part.x, part.y, part.text, fontsize=part.size, color=part.colour)
            else:
                corner = (part.x, part.y)
                axes.add_patch(Rectangle(corner, _CELL, _CELL, facecolor=part.fill, edgecolor=part.edge))
        out = io.BytesIO()
        figure.savefig(out, format="png", metadata={"Software": None})  # equal pictures are equal files
        return out.getvalue()


def _svg(part: Text | Square) -> str:
    if isinstance(part, Text):
        where = f'x="{part.x}" y="{part.y}" font-size="{part.size}" fill="{part.colour}"'
        return f"<text {where}>{escape(part.text)}</text>\n"
    where = f'x="{part.x}" y="{part.y}" width="{_CELL}" height="{_CELL}"'
    title = f"<title>{escape(part.title)}</title>"
    return f'<rect {where} fill="{part.fill}" stroke="{part.edge}">{title}</rect>\n'


def draw_plan(plan: Plan, role: str = "actor", axis: Axis = "pp") -> Drawing:
    """A picture of the first 512 nodes: fill = the device's coordinate on `axis`, outline = its TP group.

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
    title_line = Text(_NODE_GAP, 20, head, size=13)
    return Drawing(width=max(width, 480), height=height + 40, parts=(title_line, *body))


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
) -> tuple[list[Text | Square], int]:
    """Boxes node by node; a new leaf switch starts a new row with its own heading."""
    out: list[Text | Square] = []
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
            out.append(Text(x, y + 8, f"leaf {leaf}", colour="#666666"))
            y += 12
        elif column == columns:
            x, column, y = _NODE_GAP, 0, y + step_y
        last = leaf
        out.extend(_node(plan, role, node, ranks, colour, x, y))
        x, column = x + step_x, column + 1
    return out, y + step_y


def _node(
    plan: Plan, role: RolePlan, node: int, ranks: list[int], colour: list[str], x: int, y: int
) -> Iterator[Text | Square]:
    yield Text(x, y + 10, plan.nodes[node][-14:] or "node")
    mesh = role.mesh
    for i, rank in enumerate(ranks):
        left, top = x + i % 8 * (_CELL + _GAP), y + _LABEL - 2 + i // 8 * (_CELL + _GAP)
        group = (rank - mesh.first_rank) // mesh.tp
        edge = "#333333" if group % 2 else "#999999"
        title = f"rank {rank}, device {plan.device[rank]}, tp group {group}"
        yield Square(left, top, colour[rank], edge, title)
