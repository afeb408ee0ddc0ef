"""The layout lottery draws distinct legal layouts that cover the axes, the same ones for the same seed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from unirl_scale.core.check import check, world_size_of
from unirl_scale.core.config import MeshConfig, MeshesConfig
from unirl_scale.core.errors import ConfigError
from unirl_scale.core.load import parse_config
from unirl_scale.core.lottery import describe_layout, draw_layouts

CFG = parse_config(
    "{model: {actor: {num_heads: 12, num_kv_heads: 12, num_layers: 5},"
    " critic: {num_heads: 12, num_kv_heads: 12, num_layers: 3}}, invariance: {model_leaves: 12}}",
    "m",
)


def test_layouts_are_legal_distinct_and_within_the_ranks() -> None:
    layouts = draw_layouts(CFG, 60, 7, 6)
    assert layouts[0] == MeshesConfig(
        actor=MeshConfig(), critic=MeshConfig(), reference=MeshConfig(), rollout=MeshConfig()
    )
    assert len(layouts) == 60
    for i, layout in enumerate(layouts):
        run = replace(CFG, mesh=layout)
        assert check(run) == []
        assert world_size_of(run) <= 6
        assert layout not in layouts[:i]


def test_a_seed_names_its_layouts() -> None:
    assert draw_layouts(CFG, 8, 3, 4) == draw_layouts(CFG, 8, 3, 4)
    assert draw_layouts(CFG, 8, 3, 4) != draw_layouts(CFG, 8, 4, 4)
    assert draw_layouts(CFG, 8, 3, 4)[:4] == draw_layouts(CFG, 4, 3, 4)


def test_every_axis_is_drawn() -> None:
    actors = [layout.actor for layout in draw_layouts(CFG, 200, 1, 6)]
    assert {1, 2, 3, 4, 6} <= {mesh.tp for mesh in actors}
    assert {1, 2, 3, 4} <= {mesh.pp for mesh in actors}
    assert {1, 2, 3, 4} <= {mesh.dp for mesh in actors}
    assert {1, 2} <= {mesh.vpp for mesh in actors}
    assert {1, 2, 3, 4} == {mesh.micro_batch_size for mesh in actors}
    assert {"none", "block"} == {mesh.recompute for mesh in actors}
    assert {True, False} == {mesh.sequence_parallel for mesh in actors}
    assert any(mesh.pipeline_split for mesh in actors)
    cut = [mesh for mesh in actors if mesh.dp > 1]
    assert {True, False} == {mesh.overlap for mesh in cut}
    assert len({mesh.bucket_elements for mesh in cut}) == 4


def test_roles_get_layouts_of_their_own() -> None:
    layouts = draw_layouts(CFG, 40, 2, 4)
    assert sum(layout.critic != layout.actor for layout in layouts) > 20
    assert any(layout.critic is not None and layout.critic.first_rank > 0 for layout in layouts)
    assert any(layout.reference != layout.actor for layout in layouts)
    assert any(layout.rollout is not None and layout.rollout.tp != layout.actor.tp for layout in layouts)


def test_too_many_layouts_are_refused_with_the_number_there_is() -> None:
    tiny = parse_config("{model: {actor: {num_layers: 1}}, invariance: {data_slots: 1}}", "m")
    with pytest.raises(ConfigError, match=r"--layouts: got 5000; .*hint: --layouts \d+"):
        draw_layouts(tiny, 5000, 0, 1)


def test_a_configuration_that_no_rank_could_run_is_refused() -> None:
    with pytest.raises(ConfigError, match="batch_size: got 10"):
        draw_layouts(parse_config("{stages: [{batch_size: 10}]}", "m"), 2, 0, 4)


def test_a_layout_reads_as_one_line() -> None:
    mesh = MeshConfig(
        tp=2, pp=2, vpp=2, sequence_parallel=True, recompute="block", pipeline_split=(2, 1, 1, 1)
    )
    layout = MeshesConfig(actor=mesh, critic=MeshConfig(first_rank=3), reference=mesh, rollout=mesh)
    assert describe_layout(layout) == (
        "tp2 pp2 dp1 vpp2 sp mb1 recompute split 2+1+1+1 | critic tp1 pp1 dp1 mb1 @3"
    )
