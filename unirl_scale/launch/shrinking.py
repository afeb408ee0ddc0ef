"""The layout for the nodes that are left: the same model parallelism, fewer data-parallel replicas.

core/relayout.py, for ranks that are lost while a job runs, may cut the model anew and moves every role to
rank 0. A batch job that starts again keeps both, and with them what a rank needs of memory.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from unirl_scale.core.check import check, world_size_of
from unirl_scale.core.config import MeshConfig, RunConfig

_ROLES = ("actor", "critic", "reference", "rollout")


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """What to start on some nodes.

    Attributes:
        nodes: that it needs.
        ranks: to start, at most `ranks_per_node` on each.
        overrides: `key=value` settings over the configuration's own.
    """

    nodes: int
    ranks: int
    overrides: tuple[str, ...] = ()


def layouts(cfg: RunConfig, nodes: int, ranks_per_node: int, min_nodes: int) -> list[Layout]:
    """The largest layout for each number of nodes from `nodes` down to `min_nodes`, the full one first.

    Every one gives the same bits, so a run may move from any to any.

    Args:
        cfg: as loaded; roles that it leaves out follow the actor.
        nodes, ranks_per_node: where the configuration itself fits.
    """
    found = [Layout(nodes=nodes, ranks=world_size_of(cfg))]
    for fewer in range(nodes - 1, min_nodes - 1, -1):
        layout = _largest(cfg, fewer, ranks_per_node)
        if layout is not None and layout.ranks < found[-1].ranks:
            found.append(layout)
    return found


def _largest(cfg: RunConfig, nodes: int, ranks_per_node: int) -> Layout | None:
    for ranks in range(nodes * ranks_per_node, 0, -1):
        meshes = {role: getattr(cfg.mesh, role) for role in _ROLES}
        fitted = {role: _fitted(mesh, ranks) for role, mesh in meshes.items() if mesh is not None}
        if any(mesh.dp < 1 for mesh in fitted.values()):
            return None  # fewer ranks leave even less room
        smaller = replace(cfg, mesh=replace(cfg.mesh, **fitted))
        if world_size_of(smaller) == ranks and not check(smaller, ranks):
            overrides = tuple(
                f"mesh.{role}.dp={mesh.dp}" for role, mesh in fitted.items() if mesh.dp != meshes[role].dp
            )
            return Layout(nodes=-(-ranks // ranks_per_node), ranks=ranks, overrides=overrides)
    return None


def _fitted(mesh: MeshConfig, ranks: int) -> MeshConfig:
    """As many replicas as fit below rank `ranks`, at most those that there were."""
    return replace(mesh, dp=min(mesh.dp, (ranks - mesh.first_rank) // (mesh.tp * mesh.pp)))
