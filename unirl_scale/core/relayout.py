"""The layout to go on with when the number of ranks has changed.

Model leaves, data slots and every batch size stay, so the bits stay; only who computes what is chosen anew.
The choice is a pure function of the configuration and the number of ranks: every rank makes it, none is told.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction

from unirl_scale.core.check import check, even_split, world_size_of
from unirl_scale.core.config import MeshConfig, MeshesConfig, ModelConfig, RunConfig
from unirl_scale.core.errors import MeshError
from unirl_scale.core.load import resolve


def relayout(cfg: RunConfig, ranks: int) -> RunConfig:
    """The configuration on at most `ranks` ranks.

    The layout asked for stays where it fits. Otherwise each role's mesh starts at rank 0 and is the one with
    the least work on its busiest rank; among equals the one that keeps tp, then pp, then the one with more
    ranks. Ranks that no mesh uses are spares: `world_size_of` the result tells how many are used.

    Args:
        cfg: as asked for; a later change of the number of ranks starts from this one again.
        ranks: ranks there are, at least 1.

    Returns:
        `cfg`, resolved, with other meshes.

    Raises:
        MeshError: no layout is legal on so few ranks, which only `elastic.model_parallel_floor` can cause.
    """
    full = resolve(cfg)
    if world_size_of(full) <= ranks:
        return full
    mesh, model = full.mesh, full.model
    assert model.critic and mesh.critic and mesh.reference
    actor = _best(full, mesh.actor, model.actor, ranks)
    meshes = MeshesConfig(
        actor=actor,
        critic=_best(full, mesh.critic, model.critic, ranks),
        reference=_best(full, mesh.reference, model.actor, ranks),
        rollout=_rollout(full, actor, ranks),
    )
    result = replace(full, mesh=meshes)
    problems = check(result, world_size_of(result))
    if problems:
        raise MeshError("\n".join(str(problem) for problem in problems))
    return result


def fewest_ranks(cfg: RunConfig) -> int:
    """Ranks below which no layout is legal."""
    return next(n for n in range(1, world_size_of(cfg) + 1) if _legal(cfg, n))


def _legal(cfg: RunConfig, ranks: int) -> bool:
    try:
        relayout(cfg, ranks)
    except MeshError:
        return False
    return True


def _best(cfg: RunConfig, asked: MeshConfig, model: ModelConfig, ranks: int) -> MeshConfig:
    """The mesh of one training role."""

    def cost(mesh: MeshConfig) -> tuple[Fraction, bool, bool, int, int]:
        ranks_used = mesh.tp * mesh.pp * mesh.dp
        return _work(cfg, mesh, model), mesh.tp != asked.tp, mesh.pp != asked.pp, -ranks_used, mesh.pp

    floor = min(cfg.elastic.model_parallel_floor, asked.tp * asked.pp)
    legal = [mesh for mesh in _meshes(cfg, asked, model, ranks) if mesh.tp * mesh.pp >= floor]
    if not legal:
        raise MeshError(
            f"elastic.model_parallel_floor: got {floor} with {ranks} ranks left; a copy of the model must be "
            f"cut over that many; hint: elastic.min_ranks={floor} waits for ranks to come back"
        )
    return min(legal, key=cost)


def _meshes(cfg: RunConfig, asked: MeshConfig, model: ModelConfig, ranks: int) -> Iterator[MeshConfig]:
    """For each tp and pp the one with the most dp, which is never slower; from rank 0."""
    for tp in (n for n in range(1, ranks + 1) if _divides_model(cfg, model, n)):
        for pp in range(1, min(model.num_layers, ranks // tp) + 1):
            same = pp == asked.pp
            yield replace(
                asked,
                tp=tp,
                pp=pp,
                dp=min(cfg.invariance.data_slots, ranks // (tp * pp)),
                vpp=asked.vpp if same else 1,
                pipeline_split=asked.pipeline_split if same else (),
                first_rank=0,
            )


def _work(cfg: RunConfig, mesh: MeshConfig, model: ModelConfig) -> Fraction:
    """Work of the busiest rank in one minibatch, in model leaves x layers x samples.

    A pipeline takes as long as its micro-batches and its bubble of (pp - 1) / vpp of them (Narayanan et al.
    2021, section 2.2).
    """
    slots, leaves = cfg.invariance.data_slots, cfg.invariance.model_leaves
    minibatch = max(stage.minibatch_size or stage.batch_size for stage in cfg.stages)
    samples = math.ceil(slots / mesh.dp) * math.ceil(minibatch / slots)
    micros = math.ceil(samples / mesh.micro_batch_size)
    bubble = Fraction(mesh.pp - 1, mesh.vpp)
    split = mesh.pipeline_split or even_split(model.num_layers, mesh.pp * mesh.vpp)
    layers = max(sum(split[rank :: mesh.pp]) for rank in range(mesh.pp))  # chunk i is on rank i % pp
    return Fraction(leaves, mesh.tp) * layers * Fraction(samples, micros) * (micros + bubble)


def _divides_model(cfg: RunConfig, model: ModelConfig, tp: int) -> bool:
    if cfg.invariance.mode == "off":
        return math.gcd(model.num_kv_heads, model.ffn_size) % tp == 0
    return cfg.invariance.model_leaves % tp == 0


def _rollout(cfg: RunConfig, actor: MeshConfig, ranks: int) -> MeshConfig:
    """Decoding: the tp asked for while it fits, every other rank of the actor as dp."""
    asked = cfg.mesh.rollout
    assert asked is not None
    used = actor.tp * actor.pp * actor.dp
    tp = asked.tp if asked.tp <= ranks else actor.tp
    batch = min(stage.batch_size for stage in cfg.stages)
    return replace(asked, tp=tp, dp=max(1, min(used // tp, batch)), first_rank=0)
