"""The layout for fewer ranks is legal, keeps what the bits depend on, and is the same on every rank."""

from __future__ import annotations

from dataclasses import replace

import pytest

from unirl_scale.core.check import check, world_size_of
from unirl_scale.core.config import (
    ElasticConfig,
    InvarianceConfig,
    MeshConfig,
    MeshesConfig,
    ModelConfig,
    ModelsConfig,
    RunConfig,
    StageConfig,
)
from unirl_scale.core.errors import MeshError
from unirl_scale.core.load import resolve
from unirl_scale.core.relayout import fewest_ranks, relayout


def config(
    actor: MeshConfig, *, leaves: int = 4, slots: int = 4, floor: int = 1, **meshes: MeshConfig
) -> RunConfig:
    return RunConfig(
        invariance=InvarianceConfig(model_leaves=leaves, data_slots=slots),
        model=ModelsConfig(actor=ModelConfig(num_layers=4, ffn_size=384)),
        mesh=MeshesConfig(actor=actor, **meshes),
        stages=(StageConfig(batch_size=slots * 4),),
        elastic=ElasticConfig(enabled=True, model_parallel_floor=floor),
    )


def shape(mesh: MeshConfig | None) -> tuple[int, int, int]:
    assert mesh is not None
    return mesh.tp, mesh.pp, mesh.dp


LARGE = config(MeshConfig(tp=4, pp=2, dp=8), slots=8)


@pytest.mark.parametrize(
    ("actor", "ranks", "expected"),
    [
        (MeshConfig(dp=4), 4, (1, 1, 4)),  # as asked
        (MeshConfig(dp=4), 3, (1, 1, 3)),  # equal work: more ranks, less memory on each
        (MeshConfig(dp=4), 2, (1, 1, 2)),
        (MeshConfig(dp=4), 1, (1, 1, 1)),
        (MeshConfig(tp=2, dp=2), 3, (2, 1, 1)),  # tp kept: 3 ranks of dp are no faster on 4 slots
        (MeshConfig(tp=2, dp=2), 2, (2, 1, 1)),
        (MeshConfig(tp=2, pp=2), 3, (2, 1, 1)),
        (MeshConfig(tp=4), 3, (1, 1, 3)),
        (MeshConfig(pp=4), 3, (1, 1, 3)),
        (MeshConfig(pp=2, dp=2, vpp=2), 2, (1, 1, 2)),  # no bubble
    ],
)
def test_the_choice(actor: MeshConfig, ranks: int, expected: tuple[int, int, int]) -> None:
    assert shape(relayout(config(actor), ranks).mesh.actor) == expected


@pytest.mark.parametrize("ranks", range(1, 65))
def test_every_number_of_ranks_gets_a_legal_layout_with_the_same_bits(ranks: int) -> None:
    chosen = relayout(LARGE, ranks)
    used = world_size_of(chosen)
    assert check(chosen, used) == [] and used <= ranks
    assert replace(chosen, mesh=resolve(LARGE).mesh) == resolve(LARGE)  # nothing but the meshes changed


def test_more_ranks_never_mean_more_work_on_the_busiest() -> None:
    def busiest(ranks: int) -> int:
        tp, pp, dp = shape(relayout(LARGE, ranks).mesh.actor)
        return (4 // tp) * -(-4 // pp) * -(-8 // dp)

    work = [busiest(ranks) for ranks in range(1, 65)]
    assert work == sorted(work, reverse=True) and work[0] == 4 * 4 * 8 and work[-1] == 2


def test_roles_on_ranks_of_their_own_share_the_ranks_that_are_left() -> None:
    apart = config(MeshConfig(dp=2), critic=MeshConfig(dp=2, first_rank=2), rollout=MeshConfig(dp=4))
    assert world_size_of(apart) == 4
    chosen = relayout(apart, 3)
    assert [shape(m) for m in (chosen.mesh.actor, chosen.mesh.critic)] == [(1, 1, 3), (1, 1, 3)]
    assert chosen.mesh.critic is not None and chosen.mesh.critic.first_rank == 0


def test_the_floor_of_model_parallelism_holds() -> None:
    cfg = config(MeshConfig(tp=4, dp=2), floor=4)
    assert shape(relayout(cfg, 7).mesh.actor)[:2] == (4, 1)
    assert fewest_ranks(cfg) == 4
    with pytest.raises(
        MeshError, match=r"model_parallel_floor: got 4 with 3 ranks left.*hint: elastic.min_ranks=4"
    ):
        relayout(cfg, 3)
    assert fewest_ranks(config(MeshConfig(tp=4, dp=2))) == 1


def test_a_pipeline_split_survives_only_with_its_pipeline() -> None:
    actor = MeshConfig(pp=2, dp=2, pipeline_split=(1, 3))
    assert relayout(config(actor), 3).mesh.actor.pipeline_split == ()
    assert relayout(config(actor), 4).mesh.actor.pipeline_split == (1, 3)


def test_a_pipeline_that_divides_the_work_is_kept_and_its_bubble_counts() -> None:
    many = config(MeshConfig(pp=4, dp=2), slots=2, leaves=1)  # 4 samples a slot
    assert shape(relayout(many, 4).mesh.actor) == (1, 2, 2)  # 4 + 1 micro-batches beat the 8 + 3 of pp 4
    one_slot = config(MeshConfig(pp=2, dp=2), slots=1, leaves=1)
    assert shape(relayout(one_slot, 3).mesh.actor) == (1, 2, 1)  # a third of 4 layers is 2 layers again
