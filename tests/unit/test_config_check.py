"""Every cross-field rule refuses its violation, names the nearest legal values, and accepts those."""

from __future__ import annotations

import dataclasses
import typing
from typing import Any

import pytest

from unirl_scale.core.check import check, even_split, require_legal, world_size_of
from unirl_scale.core.config import RunConfig
from unirl_scale.core.errors import ConfigError
from unirl_scale.core.load import parse_config, resolve
from unirl_scale.core.ranges import RANGES

# 12 heads and layers enough for every axis.
MODEL = ("model.actor.num_heads=12", "model.actor.num_kv_heads=12", "model.actor.num_layers=6")


def problems_of(*overrides: str, world: int | None = None) -> list[str]:
    return [str(problem) for problem in check(parse_config("{}", "run.yaml", overrides), world)]


def test_the_defaults_are_legal() -> None:
    assert problems_of() == []


@pytest.mark.parametrize(
    ("overrides", "problem", "legal"),
    [
        (
            ["mesh.actor.tp=3"],
            "mesh.actor.tp: got 3; must divide invariance.model_leaves 4; hint: 2 or 4",
            ["mesh.actor.tp=2"],
        ),
        (
            [*MODEL, "mesh.actor.tp=6"],
            "mesh.actor.tp: got 6; must divide invariance.model_leaves 4; "
            "hint: 4, or invariance.model_leaves=12",
            ["invariance.model_leaves=12"],
        ),
        (
            ["model.actor.ffn_size=6"],
            "model.actor.ffn_size: got 6; must be a multiple of invariance.model_leaves 4; "
            "hint: 4 or 8, or invariance.model_leaves=2",
            ["model.actor.ffn_size=8"],
        ),
        (
            ["model.actor.num_heads=6", "model.actor.num_kv_heads=6"],
            "model.actor.num_kv_heads: got 6; must be a multiple of invariance.model_leaves 4; "
            "hint: 4 or 8, or invariance.model_leaves=3 or 6",
            ["invariance.model_leaves=6"],
        ),
        (
            ["model.actor.num_heads=10"],
            "model.actor.num_kv_heads: got 4; must divide num_heads 10; hint: 2 or 5",
            ["model.actor.num_heads=8"],
        ),
        (
            ["model.critic.head_dim=7"],
            "model.critic.head_dim: got 7; must be even (rotary embedding turns pairs); hint: 6 or 8",
            ["model.critic.head_dim=8"],
        ),
        (
            ["elastic.straggler_ratio=0.5"],
            "elastic.straggler_ratio: got 0.5; must be 0, or 1 at the least: ranks that are as fast as the "
            "others are no stragglers; hint: 0 or 1.5",
            ["elastic.straggler_ratio=1"],
        ),
        (
            ["rollout.cuda_graphs=true"],
            "rollout.cuda_graphs: got true; needs hardware.vendor cuda, got cpu; "
            "hint: rollout.cuda_graphs=false",
            ["rollout.cuda_graphs=false"],
        ),
        (
            [
                "rollout.cuda_graphs=true",
                "hardware.vendor=cuda",
                "hardware.transport=host",
                "mesh.rollout.tp=2",
            ],
            "rollout.cuda_graphs: got true; cannot record transfers through the host of mesh.rollout.tp 2; "
            "hint: rollout.cuda_graphs=false, or tp 1",
            ["rollout.cuda_graphs=false"],
        ),
        (
            ["mesh.critic.dp=5"],
            "mesh.critic.dp: got 5; must be at most invariance.data_slots 4 (a dp rank owns whole slots); "
            "hint: 4, or invariance.data_slots=8",
            ["invariance.data_slots=8"],
        ),
        (
            [*MODEL, "mesh.actor.vpp=2"],
            "mesh.actor.vpp: got 2; must be 1 where pp is 1; hint: 1, or pp of 2 or more",
            ["mesh.actor.pp=2"],
        ),
        (
            [*MODEL, "mesh.actor.pp=4", "mesh.actor.vpp=2"],
            "mesh.actor.vpp: got 2; pp x vpp = 8 must be at most num_layers 6 (a chunk has a layer); hint: 1",
            ["mesh.actor.vpp=1"],
        ),
        (
            ["mesh.actor.pp=3"],
            "mesh.actor.pp: got 3; pp x vpp = 3 must be at most num_layers 2 (a chunk has a layer); hint: 2",
            ["mesh.actor.pp=2"],
        ),
        (
            [*MODEL, "mesh.actor.pp=2", "mesh.actor.vpp=2", "mesh.actor.pipeline_split=[3,3]"],
            "mesh.actor.pipeline_split: got [3, 3]; must be pp x vpp = 4 counts that sum to num_layers 6; "
            "hint: [2, 2, 1, 1], or [] for that",
            ["mesh.actor.pipeline_split=[2,2,1,1]"],
        ),
        (
            ["mesh.rollout.vpp=2"],
            "mesh.rollout.vpp: got 2; must be 1: decoding is not pipelined; hint: 1; use the ranks as dp",
            ["mesh.rollout.vpp=1"],
        ),
        (
            ["mesh.rollout.dp=17"],
            "mesh.rollout.dp: got 17; must be at most the smallest stages[].batch_size 16; hint: 16",
            ["mesh.rollout.dp=16"],
        ),
        (
            ["stages.0.batch_size=10", "mesh.actor.dp=4"],
            "stages[0].batch_size: got 10; must be a multiple of invariance.data_slots 4; hint: 8 or 12",
            ["stages.0.batch_size=12"],
        ),
        (
            ["stages.0.batch_size=24", "stages.0.group_size=4", "stages.0.minibatch_size=6"],
            "stages[0].minibatch_size: got 6; must be a multiple of group_size 4 and "
            "invariance.data_slots 4; hint: 4 or 8",
            ["stages.0.minibatch_size=8"],
        ),
        (
            ["stages.0.batch_size=24", "stages.0.minibatch_size=16"],
            "stages[0].minibatch_size: got 16; must divide batch_size 24; hint: 12 or 24",
            ["stages.0.minibatch_size=12"],
        ),
        (
            ["stages.0.optim.min_lr=0.1"],
            "stages[0].optim.min_lr: got 0.1; must be at most lr 0.001; hint: 0.001 or less",
            ["stages.0.optim.min_lr=0.001"],
        ),
        (
            ["stages.0.critic_warmup_steps=2"],
            "stages[0].critic_warmup_steps: got 2; must be at most num_steps 1; hint: 1",
            ["stages.0.critic_warmup_steps=1"],
        ),
        (
            ["stages=[{}, {}]"],
            'stages[1].name: got "train"; must be a text of its own for each stage; hint: ppo-1',
            ["stages.1.name=ppo-1"],
        ),
        (["eval.every=2"], "eval.every: got 2; needs eval.num_prompts", ["eval.num_prompts=8"]),
        (["run_dir=''"], 'run_dir: got ""; must name a directory', ["run_dir=runs/x"]),
        (
            ["rollout.page_size=48"],
            "rollout.page_size: got 48; must be a power of two, so that it divides the kernels' key tiles or "
            "holds whole ones; hint: 32 or 64",
            ["rollout.page_size=32"],
        ),
        (
            ["rollout.kv_cache_tokens=100"],
            "rollout.kv_cache_tokens: got 100; must hold max_prompt_tokens + max_response_tokens = 96 tokens "
            "in pages of 64; hint: 128 or more, or 0",
            ["rollout.kv_cache_tokens=128"],
        ),
        (
            ["rollout.kv_cache_tokens=100", "rollout.max_response_tokens=64"],
            "rollout.kv_cache_tokens: got 100",
            ["rollout.kv_cache_tokens=0"],
        ),
        (["rollout.stop=['']"], "rollout.stop: got", ["rollout.stop=[]"]),
        (["stages=[]"], "stages: got []; must have at least one stage", ["stages=[{}]"]),
        (["task={}"], "task.name: got null; must name the plug-in", ["task={name: x}"]),
    ],
)
def test_each_rule_refuses_and_its_hint_is_legal(
    overrides: list[str], problem: str, legal: list[str]
) -> None:
    found = problems_of(*overrides)
    assert len(found) == 1, found
    assert found[0].startswith(problem)
    assert problems_of(*overrides, *legal) == []


def test_all_violations_are_listed_at_once() -> None:
    wrong = ["mesh.actor.tp=3", "stages.0.batch_size=10", "model.critic.ffn_size=5", "stages.0.optim.lr=0"]
    assert [line.split(":")[0] for line in problems_of(*wrong)] == [
        "stages[0].optim.lr",
        "model.critic.ffn_size",
        "mesh.actor.tp",
        "stages[0].batch_size",
    ]
    with pytest.raises(ConfigError, match=r"run\.yaml: 4 problems"):
        require_legal(parse_config("{}", "m", wrong), source="run.yaml")


def test_a_rule_is_not_judged_on_a_number_that_is_itself_illegal() -> None:
    assert problems_of("invariance.model_leaves=0", "mesh.actor.tp=3") == [
        "invariance.model_leaves: got 0; must be >= 1; hint: 1 is the smallest"
    ]
    assert len(problems_of("mesh.actor.pp=0", "stages.0.batch_size=10")) == 2


def test_a_role_that_follows_the_actor_is_not_reported_beside_it() -> None:
    assert len(problems_of("mesh.actor.tp=3")) == 1
    assert len(problems_of("mesh.actor.tp=3", "mesh.critic.tp=3")) == 2
    # ... but a shallower critic breaks what the actor keeps
    assert problems_of(*MODEL, "mesh.actor.pp=4", "model.critic.num_layers=2") == [
        "mesh.critic.pp: got 4; pp x vpp = 4 must be at most num_layers 2 (a chunk has a layer); hint: 2"
    ]


def test_off_mode_needs_no_leaves() -> None:
    heads = ("model.actor.num_heads=6", "model.actor.num_kv_heads=6", "mesh.actor.tp=3")
    assert problems_of("invariance.mode=off", *heads) == []
    assert len(problems_of(*heads)) == 2
    assert problems_of("invariance.mode=off", "mesh.actor.tp=3") == [
        "mesh.actor.tp: got 3; must divide num_kv_heads 4 and ffn_size 384; hint: 2 or 4"
    ]


def test_meshes_fill_the_world_exactly() -> None:
    assert problems_of("mesh.actor.tp=2", world=2) == []
    assert problems_of("mesh.actor.tp=4", world=2) == [
        "mesh.actor: got tp 4 x pp 1 x dp 1 from rank 0; needs ranks 0..3; the world has 2; "
        "hint: start 4 ranks or a smaller mesh"
    ]
    assert problems_of("mesh.actor.tp=2", world=4)[0].startswith("mesh: got no role on rank 2, 3; every rank")
    beside = ("mesh.actor.tp=2", "mesh.critic.tp=2", "mesh.critic.first_rank=3")
    assert problems_of(*beside)[0].startswith("mesh: got no role on rank 2; every rank")
    assert problems_of(*beside, "mesh.critic.first_rank=2", world=4) == []
    assert world_size_of(parse_config("{}", "m", [*beside])) == 5


def test_dp_need_not_divide_the_slots() -> None:
    assert problems_of("mesh.actor.dp=3") == []


def test_a_legal_configuration_stays_legal_when_resolved() -> None:
    cfg = parse_config("{}", "m", [*MODEL, "mesh.actor.pp=2", "mesh.actor.dp=4", "mesh.actor.tp=2"])
    assert check(cfg, 16) == check(resolve(cfg), 16) == []


@pytest.mark.parametrize(
    ("override", "rule"),
    [
        ("stages.0.optim.lr=0", "must be > 0; hint: a value above 0"),
        ("stages.0.optim.lr=.nan", "must be > 0; hint: write a finite number"),
        ("stages.0.optim.lr=.inf", "must be > 0; hint: write a finite number"),
        ("stages.0.optim.betas=[0.9, 1]", "must be >= 0 and < 1; hint: a value below 1"),
        ("rollout.top_p=0", "must be > 0 and <= 1; hint: a value above 0"),
        ("rollout.top_p=1.5", "must be > 0 and <= 1; hint: 1 is the largest"),
        ("rollout.page_size=0", "must be >= 1; hint: 1 is the smallest"),
        ("rollout.kv_cache_tokens=-1", "must be >= 0; hint: 0 is the smallest"),
        ("rollout.prefill_tokens=0", "must be >= 1; hint: 1 is the smallest"),
        ("rollout.temperature=-1", "must be >= 0; hint: 0 is the smallest"),
        ("mesh.actor.pipeline_split=[0, 2]", "must be >= 1; hint: 1 is the smallest"),
        (
            "seed=9223372036854775808",
            "must be >= 0 and <= 9223372036854775807; hint: 9223372036854775807 is the",
        ),
    ],
)
def test_numbers_out_of_range_name_the_nearest_end(override: str, rule: str) -> None:
    found = problems_of(override)
    assert len(found) == 1, found
    assert rule in found[0]


def _number_fields(cls: type, seen: set[tuple[type, str]]) -> set[tuple[type, str]]:
    """(class, field) of every int and float of the schema, also inside tuples."""
    for name, hint in typing.get_type_hints(cls).items():
        for kind in (hint, *typing.get_args(hint)):
            if kind in (int, float):
                seen.add((cls, name))
            elif isinstance(kind, type) and dataclasses.is_dataclass(kind):
                _number_fields(kind, seen)
    return seen


def test_every_number_of_the_schema_has_a_range() -> None:
    schema = _number_fields(RunConfig, set())
    table = {(cls, name) for cls, bounds in RANGES.items() for name in bounds}
    assert len(schema) > 30
    assert schema == table


@pytest.mark.parametrize(
    ("layers", "chunks", "split"), [(7, 3, (3, 2, 2)), (4, 4, (1, 1, 1, 1)), (5, 1, (5,))]
)
def test_even_split(layers: int, chunks: int, split: Any) -> None:
    assert even_split(layers, chunks) == split
