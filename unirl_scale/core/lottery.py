"""The layout lottery: random legal layouts of one configuration, all of which must give the same bits."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import replace

from unirl_scale.core.check import check, even_split, world_size_of
from unirl_scale.core.config import MeshConfig, MeshesConfig, ModelConfig, RunConfig
from unirl_scale.core.errors import ConfigError
from unirl_scale.core.load import resolve

_MICRO_BATCHES = (1, 2, 3, 4)
_DEFAULT_BUCKET = MeshConfig().bucket_elements
_BUCKETS = (1, 777, 4097, _DEFAULT_BUCKET)
# Draws before giving up on one more distinct layout: the space of a small model may have only a few.
_MAX_DRAWS = 4000


def draw_layouts(cfg: RunConfig, count: int, seed: int, max_ranks: int) -> list[MeshesConfig]:
    """Distinct legal layouts, the first of which is one rank for every role.

    Args:
        cfg: the run; only its `mesh` is left unused.
        count: layouts wanted, the first included.
        seed: the same seed and configuration draw the same layouts.
        max_ranks: most ranks a layout may span.

    Raises:
        ConfigError: the configuration has fewer legal layouts than wanted, or none.
    """
    cfg = resolve(cfg)
    single = MeshConfig()
    first = MeshesConfig(actor=single, critic=single, reference=single, rollout=single)
    problems = check(replace(cfg, mesh=first), 1)
    if problems:
        raise ConfigError("\n".join(str(problem) for problem in problems))
    rng, reductions = random.Random(seed), random.Random(f"reductions {seed}")
    layouts = [first]
    for _ in range(_MAX_DRAWS):
        if len(layouts) >= count:
            break
        drawn = _with_reductions(_draw(cfg, rng, max_ranks), reductions)
        if drawn not in layouts and not check(replace(cfg, mesh=drawn)):
            layouts.append(drawn)
    if len(layouts) < count:
        raise ConfigError(
            f"--layouts: got {count}; this model and batch have about {len(layouts)} legal layouts on "
            f"{max_ranks} ranks; hint: --layouts {len(layouts)}, or more --max-ranks, layers or model_leaves"
        )
    return layouts[:count]


def describe_layout(layout: MeshesConfig) -> str:
    """One line: actor, then the critic and rollout meshes where they differ."""
    parts = [_describe_mesh(layout.actor)]
    for name, mesh in (("critic", layout.critic), ("ref", layout.reference), ("rollout", layout.rollout)):
        if mesh is not None and mesh != layout.actor:
            parts.append(f"{name} {_describe_mesh(mesh)}")
    return " | ".join(parts)


def _describe_mesh(mesh: MeshConfig) -> str:
    words = [f"tp{mesh.tp}", f"pp{mesh.pp}", f"dp{mesh.dp}"]
    if mesh.vpp > 1:
        words.append(f"vpp{mesh.vpp}")
    if mesh.sequence_parallel:
        words.append("sp")
    words.append(f"mb{mesh.micro_batch_size}")
    if mesh.recompute != "none":
        words.append("recompute")
    if mesh.pipeline_split:
        words.append("split " + "+".join(str(layers) for layers in mesh.pipeline_split))
    if not mesh.overlap:
        words.append("serial")
    if mesh.bucket_elements != _DEFAULT_BUCKET:
        words.append(f"bucket {mesh.bucket_elements}")
    if mesh.first_rank:
        words.append(f"@{mesh.first_rank}")
    return " ".join(words)


def _draw(cfg: RunConfig, rng: random.Random, max_ranks: int) -> MeshesConfig:
    """One layout; nearly always legal, the caller checks."""
    critic_model = cfg.model.critic or cfg.model.actor
    actor = _draw_mesh(cfg, cfg.model.actor, rng, max_ranks)
    critic = _draw_mesh(cfg, critic_model, rng, max_ranks)
    reference = _draw_mesh(cfg, cfg.model.actor, rng, max_ranks) if rng.random() < 0.3 else actor
    rollout = _draw_rollout(cfg, rng, max_ranks)
    layout = MeshesConfig(actor=actor, critic=critic, reference=reference, rollout=rollout)
    return replace(layout, critic=_moved(critic, layout, cfg, rng, max_ranks))


def _with_reductions(layout: MeshesConfig, rng: random.Random) -> MeshesConfig:
    """How the trained roles reduce their gradients, from a stream of its own."""

    def drawn(mesh: MeshConfig) -> MeshConfig:
        if mesh.dp == 1:
            return mesh
        return replace(mesh, overlap=rng.random() < 0.75, bucket_elements=rng.choice(_BUCKETS))

    actor, reference = drawn(layout.actor), layout.reference
    critic = drawn(layout.critic) if layout.critic is not None else None
    reference = actor if reference == layout.actor else reference
    return replace(layout, actor=actor, critic=critic, reference=reference)


def _moved(
    critic: MeshConfig, layout: MeshesConfig, cfg: RunConfig, rng: random.Random, max_ranks: int
) -> MeshConfig:
    """The critic sometimes on ranks of its own: beside the others, or overlapping them."""
    others = world_size_of(replace(cfg, mesh=replace(layout, critic=layout.actor)))
    room = max_ranks - critic.tp * critic.pp * critic.dp
    return replace(critic, first_rank=rng.randint(0, min(others, room))) if rng.random() < 0.5 else critic


def _draw_mesh(cfg: RunConfig, model: ModelConfig, rng: random.Random, max_ranks: int) -> MeshConfig:
    """A training mesh: the number of ranks first, so that small and large layouts are equally likely."""
    shapes = list(_shapes(cfg, model, max_ranks))
    size = rng.choice(sorted({tp * pp * dp for tp, pp, dp in shapes}))
    tp, pp, dp = rng.choice([shape for shape in shapes if shape[0] * shape[1] * shape[2] == size])
    vpp = rng.randint(1, model.num_layers // pp) if pp > 1 else 1
    return MeshConfig(
        tp=tp,
        pp=pp,
        dp=dp,
        vpp=vpp,
        sequence_parallel=rng.random() < 0.5,
        micro_batch_size=rng.choice(_MICRO_BATCHES),
        recompute=rng.choice(("none", "block")),
        pipeline_split=_draw_split(model.num_layers, pp * vpp, rng),
    )


def _shapes(cfg: RunConfig, model: ModelConfig, max_ranks: int) -> Iterator[tuple[int, int, int]]:
    leaves = cfg.invariance.model_leaves
    for tp in range(1, max_ranks + 1):
        for pp in range(1, min(model.num_layers, max_ranks // tp) + 1):
            for dp in range(1, min(cfg.invariance.data_slots, max_ranks // (tp * pp)) + 1):
                if leaves % tp == 0:
                    yield tp, pp, dp


def _draw_split(layers: int, chunks: int, rng: random.Random) -> tuple[int, ...]:
    """Layers of each chunk: as even as it goes, or cut at random places."""
    if chunks == 1 or rng.random() < 0.4:
        return ()
    cuts = [0, *sorted(rng.sample(range(1, layers), chunks - 1)), layers]
    split = tuple(b - a for a, b in itertools.pairwise(cuts))
    return () if split == even_split(layers, chunks) else split


def _draw_rollout(cfg: RunConfig, rng: random.Random, max_ranks: int) -> MeshConfig:
    tps = [tp for tp in range(1, max_ranks + 1) if cfg.invariance.model_leaves % tp == 0]
    tp = rng.choice(tps)
    batch = min(stage.batch_size for stage in cfg.stages)
    return MeshConfig(tp=tp, dp=rng.randint(1, min(batch, max_ranks // tp)))
