"""From the configuration to a ParallelContext: groups of every role, built once and in one order on all
ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from unirl_scale.comm.fast import FastReducer
from unirl_scale.comm.groups import Group, GroupFactory
from unirl_scale.comm.ordered import OrderedReducer, Reducer
from unirl_scale.comm.tree import split_contiguous
from unirl_scale.core.config import InvarianceConfig, MeshConfig
from unirl_scale.core.mesh import Mesh
from unirl_scale.kernels.table import OpTable
from unirl_scale.parallel.context import ParallelContext

UP, DOWN = "pp_up", "pp_down"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reductions:
    """How the ordered sums over an axis run; the bits do not depend on it.

    Attributes:
        blocks: members a node, a leaf switch, ..., as `OrderedReducer` takes them; () = flat.
        gather_below_bytes: nodes of an all-reduce that take no more are gathered and added everywhere.
    """

    blocks: tuple[int, ...] = ()
    gather_below_bytes: int = 64 << 10


_UNPLANNED = Reductions()


class RoleGroups:
    """Process groups of all roles' meshes."""

    def __init__(self, factory: GroupFactory, meshes: Iterable[Mesh]) -> None:
        meshes = list(meshes)
        self.rank = factory.rank
        sums = [g for m in meshes for g in (*m.tp_groups(), *m.dp_groups())]
        pipes = [g for m in meshes for g in m.pp_groups()]
        self._groups = factory.build_groups(sums)
        self._pipes = {c: factory.build_groups(pipes, channel=c) for c in (UP, DOWN)}
        for channel in (UP, DOWN):
            for group in self._pipes[channel].values():
                group.connect_ring()

    def tp(self, mesh: Mesh) -> Group:
        return self._groups[self._mine(mesh.tp_groups())]

    def dp(self, mesh: Mesh) -> Group:
        return self._groups[self._mine(mesh.dp_groups())]

    def pipe(self, mesh: Mesh, channel: str) -> Group:
        return self._pipes[channel][self._mine(mesh.pp_groups())]

    def _mine(self, groups: list[tuple[int, ...]]) -> tuple[int, ...]:
        return next(g for g in groups if self.rank in g)


def build_context(
    groups: RoleGroups,
    mesh_cfg: MeshConfig,
    invariance: InvarianceConfig,
    ops: OpTable,
    dtype: torch.dtype,
    device: torch.device,
    planned: Mapping[str, Reductions] | None = None,
) -> ParallelContext | None:
    """This rank's context on a mesh, or None when it is not on it.

    In `off` mode the leaves are the ranks themselves: one leaf a tp rank, one slot a dp rank, plain sums.

    Args:
        planned: axis -> how its sums run; an axis that is left out runs flat.
    """
    mesh = Mesh.from_config(mesh_cfg)
    at = mesh.coordinates(groups.rank)
    if at is None:
        return None
    tp, dp = groups.tp(mesh), groups.dp(mesh)
    ordered = invariance.mode != "off"
    leaves = invariance.model_leaves if ordered else mesh.tp
    slots = invariance.data_slots if ordered else mesh.dp

    def reducer(axis: str, group: Group, total: int) -> Reducer:
        if ordered:
            how = (planned or {}).get(axis, _UNPLANNED)
            return OrderedReducer(
                group,
                split_contiguous(total, group.size),
                inner_size=how.blocks,
                gather_below_bytes=how.gather_below_bytes,
                # A kernel joins arriving nodes in one pass; on CPU the reducer's in-place sums are as good.
                tree_sum=ops.tree_sum if device.type != "cpu" else None,
            )
        return FastReducer(group, split_contiguous(total, group.size))

    return ParallelContext(
        ops=ops,
        mesh=mesh,
        at=at,
        tp=tp,
        dp=dp,
        pp_up=groups.pipe(mesh, UP),
        pp_down=groups.pipe(mesh, DOWN),
        tp_reducer=reducer("tp", tp, leaves),
        dp_reducer=reducer("dp", dp, slots),
        leaves=leaves,
        slots=slots,
        sequence_parallel=mesh_cfg.sequence_parallel and mesh.tp > 1,
        dtype=dtype,
        device=device,
        overlap=mesh_cfg.overlap and mesh.dp > 1,
        bucket_elements=mesh_cfg.bucket_elements,
        round_leaf=ordered and invariance.leaf_dtype == "bf16",
    )
