"""Moves weights between the meshes of one model, as bytes: training -> rollout, actor -> reference.

The unit is one leaf of one parameter. Each receiver takes a unit from itself if it can, otherwise from one of
the data-parallel replicas that hold it, spread by its own number. Both sides derive the same plan, so only
payload travels.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from unirl_scale.comm.groups import Group
from unirl_scale.core.mesh import Mesh
from unirl_scale.parallel.chunk import Chunk, ChunkRange
from unirl_scale.parallel.spec import ParamSpec

BUCKET_BYTES = 256 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """Where a model's parameters lie: its mesh and the layers of its pp * vpp chunks."""

    mesh: Mesh
    ranges: tuple[ChunkRange, ...]

    def stage(self, spec: ParamSpec) -> int:
        """Pipeline rank that owns a parameter."""
        last = len(self.ranges) - 1
        for number, layers in enumerate(self.ranges):
            edge = (spec.layer == -1 and number == 0) or (
                spec.layer >= self.ranges[-1].stop and number == last
            )
            if edge or layers.start <= spec.layer < layers.stop:
                return number % self.mesh.pp
        raise AssertionError(f"{spec.name} is in no chunk")

    def tp_of(self, leaf: int, leaves: int) -> int:
        return leaf * self.mesh.tp // leaves


@dataclass(frozen=True, slots=True)
class Unit:
    """A leaf of a parameter (leaf 0 of 1 when replicated), by name."""

    spec: ParamSpec
    leaf: int


class Reshard:
    """A fixed move from one holding to another; run it whenever the weights changed.

    Args:
        world: a group over all ranks of both meshes.
        source, target: this rank's chunks on either side, empty where it holds none.
        model_specs: all parameters, from `parameter_specs`.
    """

    def __init__(
        self,
        world: Group,
        specs: Sequence[ParamSpec],
        leaves: int,
        source: tuple[Holding, Sequence[Chunk]],
        target: tuple[Holding, Sequence[Chunk]],
    ) -> None:
        self.world, self.leaves = world, leaves
        self.me = world.ranks[world.index]
        self.source, self.source_chunks = source
        self.target, self.target_chunks = target
        self.buckets = list(_buckets(specs, leaves))

    def run(self) -> None:
        """Copy. Collective over the world. A target engine then calls `publish` for its tied head's copy."""
        for bucket in self.buckets:
            sends: list[list[Unit]] = [[] for _ in self.world.ranks]
            receives: list[list[Unit]] = [[] for _ in self.world.ranks]
            for unit in bucket:
                for target, source in self._moves(unit):
                    if source == self.me:
                        sends[self.world.ranks.index(target)].append(unit)
                    if target == self.me:
                        receives[self.world.ranks.index(source)].append(unit)
            self._exchange(sends, receives)

    def _moves(self, unit: Unit) -> Iterator[tuple[int, int]]:
        """(receiver, sender) of a unit for every receiver."""
        stage = self.target.stage(unit.spec)
        for tp in self._holders(self.target, unit):
            for dp in range(self.target.mesh.dp):
                receiver = self.target.mesh.rank_at(tp=tp, dp=dp, pp=stage)
                yield receiver, self._sender(unit, receiver)

    def _holders(self, holding: Holding, unit: Unit) -> Sequence[int]:
        """tp coordinates that hold a unit: one for a leaf, all for a replicated parameter."""
        return [holding.tp_of(unit.leaf, self.leaves)] if unit.spec.leafed else range(holding.mesh.tp)

    def _sender(self, unit: Unit, receiver: int) -> int:
        mesh, stage = self.source.mesh, self.source.stage(unit.spec)
        holders = self._holders(self.source, unit)
        at = mesh.coordinates(receiver)
        if at is not None and at.pp == stage and at.tp in holders:
            return receiver
        return mesh.rank_at(tp=holders[receiver % len(holders)], dp=receiver % mesh.dp, pp=stage)

    def _exchange(self, sends: list[list[Unit]], receives: list[list[Unit]]) -> None:
        out = [[_bytes(self._find(self.source_chunks, u)) for u in units] for units in sends]
        into = [[self._find(self.target_chunks, u) for u in units] for units in receives]
        device = self.world.device
        flat = torch.cat([t for ts in out for t in ts]) if any(out) else torch.empty(0, dtype=torch.uint8)
        arrived = self.world.all_to_all(
            flat.to(device),
            [sum(t.numel() for t in ts) for ts in out],
            [sum(t.numel() * t.element_size() for t in ts) for ts in into],
        )
        position = 0
        for t in (t for ts in into for t in ts):
            size = t.numel() * t.element_size()
            _bytes(t).copy_(arrived[position : position + size])
            position += size

    def _find(self, chunks: Sequence[Chunk], unit: Unit) -> Tensor:
        for chunk in chunks:
            if unit.spec.name in chunk.specs:
                weight = chunk.weights[unit.spec.name]
                return weight[unit.leaf - chunk.ctx.local_leaves.start] if unit.spec.leafed else weight
        raise AssertionError(f"{unit.spec.name} is not on this rank")


def _bytes(t: Tensor) -> Tensor:
    return t.detach().reshape(-1).view(torch.uint8)


def _buckets(specs: Sequence[ParamSpec], leaves: int) -> Iterator[list[Unit]]:
    """Units in canonical order, cut so that a bucket of whole leaves stays near BUCKET_BYTES."""
    bucket: list[Unit] = []
    held = 0
    for spec in specs:
        for leaf in range(leaves if spec.leafed else 1):
            bucket.append(Unit(spec, leaf))
            held += spec.numel * 4
            if held >= BUCKET_BYTES:
                yield bucket
                bucket, held = [], 0
    if bucket:
        yield bucket
