"""Roles: actor, critic, reference and rollout, each on its own mesh. The algorithm never sees a rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from unirl_scale.comm.groups import Group, GroupFactory
from unirl_scale.core.config import MeshConfig, ModelConfig, RunConfig, StageConfig
from unirl_scale.core.mesh import Mesh
from unirl_scale.kernels.table import OpTable
from unirl_scale.parallel.block import Rope
from unirl_scale.parallel.build import Reductions, RoleGroups, build_context
from unirl_scale.parallel.chunk import Chunk, Head, chunk_ranges
from unirl_scale.parallel.context import ParallelContext
from unirl_scale.parallel.decode import Decoder
from unirl_scale.parallel.engine import NativeEngine
from unirl_scale.parallel.reshard import Holding, Reshard
from unirl_scale.parallel.samples import Sample
from unirl_scale.parallel.spec import parameter_specs
from unirl_scale.train.exchange import replicate, slot_owners
from unirl_scale.train.pretrained import begin

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True, slots=True, kw_only=True)
class Role:
    """A model on its mesh; `engine` is None on ranks outside it.

    Attributes:
        planned: axis -> how its ordered sums run; None = flat.
    """

    name: str
    world: Group
    mesh: Mesh
    slots: int
    head: Head
    engine: NativeEngine | None
    planned: Mapping[str, Reductions] | None = None

    @property
    def num_scores(self) -> int:
        """Scores a token: log-prob and entropy, or a value."""
        return 2 if self.head == "lm" else 1

    def owners(self, samples: int) -> list[int]:
        return slot_owners(self.mesh, self.slots, samples)

    def score(self, samples: Sequence[Sample]) -> list[Tensor]:
        """Log-probs (actor, reference) or values (critic) of every response token, fp32, on every rank."""
        mine = {}
        if self.engine is not None:
            scores = self.engine.score(samples).scores
            mine = {number: parts[0] for number, parts in scores.items()}
        return replicate(self.world, mine, [len(s.response) for s in samples], self.owners(len(samples)))


class Roles:
    """Builds roles on demand and moves weights between them.

    Args:
        cfg: a resolved configuration: every role's model and mesh is given.
        planned: role -> axis -> how its ordered sums run; what is left out runs flat.
    """

    def __init__(
        self,
        cfg: RunConfig,
        factory: GroupFactory,
        ops: OpTable,
        device: torch.device,
        planned: Mapping[str, Mapping[str, Reductions]] | None = None,
    ) -> None:
        assert cfg.model.critic and cfg.mesh.critic and cfg.mesh.reference and cfg.mesh.rollout
        self.cfg, self.ops, self.device = cfg, ops, device
        self.world, self.dtype = factory.world, DTYPES[cfg.precision]
        self._planned = planned or {}
        self._mesh_cfgs = {
            "actor": cfg.mesh.actor,
            "critic": cfg.mesh.critic,
            "reference": cfg.mesh.reference,
            "rollout": cfg.mesh.rollout,
        }
        self.meshes = {name: Mesh.from_config(m) for name, m in self._mesh_cfgs.items()}
        self.groups = RoleGroups(factory, self.meshes.values())
        self.max_tokens = cfg.rollout.max_prompt_tokens + cfg.rollout.max_response_tokens
        temperature = cfg.rollout.temperature
        self.inv_temperature = 1.0 / temperature if temperature > 0 else 1.0
        self._valued: set[str] = set()  # trained roles that have weights
        self.actor = self._role("actor", cfg.model.actor, "lm", trainable=True)
        self.critic: Role | None = None
        self.reference: Role | None = None
        self.decoder, self._to_rollout = self._rollout()

    # ---- building ---------------------------------------------------------------------------------
    def _context(self, name: str) -> ParallelContext | None:
        mesh: MeshConfig = self._mesh_cfgs[name]
        planned = self._planned.get(name)
        return build_context(
            self.groups, mesh, self.cfg.invariance, self.ops, self.dtype, self.device, planned
        )

    def _role(self, name: str, model: ModelConfig, head: Head, *, trainable: bool) -> Role:
        mesh, invariance = self.meshes[name], self.cfg.invariance
        context = self._context(name)
        engine = None
        if context is not None:
            engine = NativeEngine(
                model,
                self._mesh_cfgs[name],
                context,
                head,
                max_tokens=self.max_tokens,
                inv_temperature=self.inv_temperature if head == "lm" else 1.0,
                trainable=trainable,
            )
        slots = mesh.dp if invariance.mode == "off" else invariance.data_slots
        planned = self._planned.get(name)
        return Role(
            name=name, world=self.world, mesh=mesh, slots=slots, head=head, engine=engine, planned=planned
        )

    def prepare(self, critic: bool, reference: bool) -> None:
        """Build what a stage needs and nothing else. A role without weights gets its first ones; the
        reference is the actor as it is now."""
        models = self.cfg.model
        self._begin(self.actor, models.actor_path, self.cfg.seed)
        if critic:
            self.critic = self.critic or self._critic()
            self._begin(self.critic, models.critic_path, self.cfg.seed + 1)
        self.reference = None
        if reference:
            role = self._role("reference", models.actor, "lm", trainable=False)
            chunks = role.engine.chunks if role.engine else []
            self._reshard("reference", chunks).run()
            if role.engine is not None:
                role.engine.publish()
            self.reference = role

    def build(self, critic: bool, reference: bool) -> None:
        """Build exactly these roles beside the actor; their weights, and the actor's, will be loaded."""
        self.critic = (self.critic or self._critic()) if critic else None
        self.reference = None
        if reference:
            self.reference = self._role("reference", self.cfg.model.actor, "lm", trainable=False)
        self._valued = {"actor", "critic"} if critic else {"actor"}

    def _critic(self) -> Role:
        assert self.cfg.model.critic is not None
        return self._role("critic", self.cfg.model.critic, "value", trainable=True)

    def _begin(self, role: Role, path: str, seed: int) -> None:
        """First weights of a role that has none; nothing to do for others."""
        if role.engine is not None and role.name not in self._valued:
            begin(role.engine, path, seed)
        self._valued.add(role.name)

    def _rollout(self) -> tuple[Decoder | None, Reshard]:
        context, model = self._context("rollout"), self.cfg.model.actor
        if context is None:
            return None, self._reshard("rollout", [])
        rope = Rope.table(model, self.max_tokens + context.leaves, self.device)
        layers = chunk_ranges(model.num_layers, 1)[0]
        chunk = Chunk(model, context, "lm", layers, rope, inv_temperature=self.inv_temperature)
        return Decoder(chunk, self.cfg.rollout), self._reshard("rollout", [chunk])

    def _reshard(self, target: str, chunks: Sequence[Chunk]) -> Reshard:
        model, invariance = self.cfg.model.actor, self.cfg.invariance
        leaves = self.meshes["actor"].tp if invariance.mode == "off" else invariance.model_leaves
        return Reshard(
            self.world,
            parameter_specs(model, leaves, "lm"),
            leaves,
            (self._holding("actor"), self.actor.engine.chunks if self.actor.engine else []),
            (self._holding(target), chunks),
        )

    def _holding(self, name: str) -> Holding:
        mesh = self._mesh_cfgs[name]
        layers = self.cfg.model.actor.num_layers
        ranges = chunk_ranges(layers, mesh.pp * mesh.vpp, mesh.pipeline_split)
        return Holding(mesh=self.meshes[name], ranges=tuple(ranges))

    # ---- use --------------------------------------------------------------------------------------
    def refresh_rollout(self) -> None:
        """Copy the actor's weights to the rollout mesh."""
        self._to_rollout.run()

    def places(self) -> list[tuple[tuple[str, int], ...]]:
        """For each rank of the world, the roles it is part of and its pipeline rank in them: ranks of one
        place have the same work."""
        found = []
        for rank in range(self.world.size):
            at = {name: mesh.coordinates(rank) for name, mesh in self.meshes.items()}
            found.append(tuple((name, c.pp) for name, c in at.items() if c is not None))
        return found

    def trained(self, stage: StageConfig, stage_step: int) -> list[Role]:
        """Roles that learn at this step of a stage."""
        actor = [self.actor] if stage_step >= stage.critic_warmup_steps or self.critic is None else []
        return actor + ([self.critic] if self.critic is not None else [])
