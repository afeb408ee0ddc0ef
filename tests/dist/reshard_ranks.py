"""What the resharding tests run on ranks: weights of one mesh moved to another, held against fresh ones
there."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from unirl_scale.comm.groups import GroupFactory
from unirl_scale.core.config import InvarianceConfig, MeshConfig, ModelConfig
from unirl_scale.core.mesh import Mesh
from unirl_scale.kernels.check import same_bits
from unirl_scale.kernels.reference import ReferenceOps
from unirl_scale.parallel.build import RoleGroups, build_context
from unirl_scale.parallel.chunk import ChunkRange, chunk_ranges
from unirl_scale.parallel.engine import NativeEngine
from unirl_scale.parallel.reshard import Holding, Reshard
from unirl_scale.parallel.spec import parameter_specs
from unirl_scale.train.roles import DTYPES

LEAVES = 6


@dataclass(frozen=True, kw_only=True)
class Move:
    """From one mesh to another, of one model in one precision."""

    model: ModelConfig
    source: MeshConfig
    target: MeshConfig
    precision: str = "fp32"

    @property
    def world_size(self) -> int:
        return max(m.first_rank + m.tp * m.pp * m.dp for m in (self.source, self.target))


def engine_on(groups: RoleGroups, move: Move, mesh: MeshConfig) -> NativeEngine | None:
    context = build_context(
        groups,
        mesh,
        InvarianceConfig(model_leaves=LEAVES, data_slots=LEAVES),
        ReferenceOps(),
        DTYPES[move.precision],
        torch.device("cpu"),
    )
    if context is None:
        return None
    return NativeEngine(move.model, mesh, context, "lm", max_tokens=8, trainable=False)


def ranges(model: ModelConfig, mesh: MeshConfig) -> list[ChunkRange]:
    return chunk_ranges(model.num_layers, mesh.pp * mesh.vpp, mesh.pipeline_split)


def moved_weights(groups: GroupFactory, move: Move) -> dict[str, bool]:
    """Weight on this rank after the move -> has it the bits of one initialised here? Empty off the target
    mesh."""
    meshes = [Mesh.from_config(move.source), Mesh.from_config(move.target)]
    role_groups = RoleGroups(groups, meshes)
    source, target = (engine_on(role_groups, move, m) for m in (move.source, move.target))
    fresh = engine_on(role_groups, move, move.target)
    if source is not None:
        source.initialise(7)
    sides = [
        (Holding(mesh=mesh, ranges=tuple(ranges(move.model, cfg))), engine.chunks if engine else [])
        for mesh, cfg, engine in zip(meshes, (move.source, move.target), (source, target))
    ]
    specs = parameter_specs(move.model, LEAVES, "lm")
    Reshard(groups.world, specs, LEAVES, *sides).run()
    if target is None or fresh is None:
        return {}
    target.publish()
    fresh.initialise(7)
    pairs = [(a.weights, b.weights) for a, b in zip(target.chunks, fresh.chunks)]
    return {name: same_bits(a[name], b[name]) for a, b in pairs for name in b}
