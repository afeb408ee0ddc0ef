"""YAML and overrides become the typed configuration, and every mistake is one line of one error."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest

from unirl_scale.core.config import MeshConfig, RunConfig, StageConfig
from unirl_scale.core.errors import ConfigError
from unirl_scale.core.load import dump, load_config, parse_config, read_options, resolve
from unirl_scale.core.problems import name_hint


@dataclass(frozen=True, slots=True, kw_only=True)
class PpoOptions:
    clip: float = 0.2
    kind: Literal["k1", "k2"] = "k1"
    bounds: tuple[float, ...] = (0.5, 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskOptions:
    dataset: str
    size: int | None = None


PLUGINS: dict[str, dict[str, type]] = {"algorithm": {"ppo": PpoOptions}, "task": {"gym": TaskOptions}}


def errors_of(text: str, *overrides: str, plugins: Any = None) -> list[str]:
    """The problem lines of a configuration that must be refused."""
    with pytest.raises(ConfigError) as caught:
        parse_config(text, "run.yaml", overrides, plugins)
    lines = str(caught.value).splitlines()
    return [line.strip() for line in lines[1:]] if len(lines) > 1 else lines


def one_error(text: str, *overrides: str, plugins: Any = None) -> str:
    lines = errors_of(text, *overrides, plugins=plugins)
    assert len(lines) == 1, lines
    return lines[0]


def test_an_empty_mapping_is_every_default() -> None:
    assert parse_config("{}", "run.yaml") == RunConfig()


def test_nested_values_reach_their_fields() -> None:
    cfg = parse_config(
        "mesh: {critic: {tp: 2, pipeline_split: [1, 2]}}\nstages: [{name: a}, {name: b}]", "run.yaml"
    )
    assert cfg.mesh.critic == MeshConfig(tp=2, pipeline_split=(1, 2))
    assert [stage.name for stage in cfg.stages] == ["a", "b"]


@pytest.mark.parametrize(
    ("text", "field", "value"),
    [
        ("invariance: {mode: off}", lambda c: c.invariance.mode, "off"),  # YAML 1.1 reads false
        ("rollout: {temperature: 1e-3}", lambda c: c.rollout.temperature, 0.001),  # YAML 1.1 reads text
        ("rollout: {temperature: 2}", lambda c: c.rollout.temperature, 2.0),
        ("seed: 010", lambda c: c.seed, 10),  # YAML 1.1 reads 8
        ("run_dir: 1:30", lambda c: c.run_dir, "1:30"),  # YAML 1.1 reads 90
        ("run_dir: 2024-01-01", lambda c: c.run_dir, "2024-01-01"),  # YAML 1.1 reads a date
        ("run_dir: yes", lambda c: c.run_dir, "yes"),
    ],
)
def test_scalars_mean_what_they_say(text: str, field: Any, value: Any) -> None:
    read = field(parse_config(text, "run.yaml"))
    assert read == value
    assert type(read) is type(value)


def test_every_problem_is_reported_at_once() -> None:
    lines = errors_of(
        "seed: x\nlearning: 1\nmesh: {actor: {tp: two}}\nhardware: {vendor: gpu}\n"
        "stages: [{optim: {betas: [1]}}]"
    )
    assert [line.split(":")[0] for line in lines] == [
        "seed",
        "learning",
        "mesh.actor.tp",
        "hardware.vendor",
        "stages[0].optim.betas",
    ]


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("mesh: {actor: {tpp: 2}}", "mesh.actor.tpp: got 2; unknown key; hint: did you mean mesh.actor.tp?"),
        ("lr: 0.1", "lr: got 0.1; unknown key; hint: did you mean stages[0].optim.lr?"),
        ("reward: {zzz: 1}", "reward.zzz: got 1; unknown key; hint: known keys: on_invalid"),
        ("seed: 1.5", "seed: got 1.5; must be an integer; hint: 1 or 2"),
        ("seed: true", "seed: got true; must be an integer; hint: write 1"),
        ("run_dir: 5", 'run_dir: got 5; must be text; hint: quote it: "5"'),
        (
            "rollout: {top_p: '0.5'}",
            'rollout.top_p: got "0.5"; must be a number; hint: write 0.5 without quotes',
        ),
        (
            "mesh: {actor: {sequence_parallel: on}}",
            'mesh.actor.sequence_parallel: got "on"; must be true or false; hint: write true',
        ),
        ("rollout: {stop: x}", 'rollout.stop: got "x"; must be a list, each text; hint: write ["x"]'),
        (
            "precision: bf-16",
            'precision: got "bf-16"; must be one of fp32, bf16; hint: did you mean bf16?',
        ),
        (
            "rollout:",
            "rollout: got null; must be a mapping of settings; hint: leave the key out for its defaults",
        ),
        (
            "stages: [{optim: {betas: [0.9]}}]",
            "stages[0].optim.betas: got [0.9]; must be a list of 2, each a number; hint: give 2 items, not 1",
        ),
    ],
)
def test_a_wrong_value_is_one_line_with_a_hint(text: str, hint: str) -> None:
    assert one_error(text).removeprefix("run.yaml: ") == hint


@pytest.mark.parametrize(
    ("text", "where", "reason"),
    [
        ("a: [", "run.yaml:1:5", "expected the node content"),
        ("seed: 1\nseed: 2", "run.yaml:2:1", "key seed twice"),
        ("seed:\n\t- 1", "run.yaml:2:1", "indent with spaces, not tabs"),
        ("seed: &a [*a]", "run.yaml:1:7", "contains itself"),
        ("seed: !!python/object:os.system {}", "run.yaml:1:7", "tag"),
        ("seed: 1\n---\nseed: 2", "run.yaml:2:1", "another document"),
        ("seed: \x01", "run.yaml:1", "printable"),
        ("[" * 3000, "run.yaml", "deep"),
        ("", "run.yaml", "got nothing"),
        ("- 1", "run.yaml", "must be a mapping"),
    ],
)
def test_unreadable_text_is_one_line_with_its_place(text: str, where: str, reason: str) -> None:
    line = one_error(text)
    assert line.startswith(f"{where}: got ")
    assert reason in line


def test_merge_keys_are_not_taken_for_repeats() -> None:
    cfg = parse_config("mesh:\n  actor: &m {tp: 2, dp: 2}\n  critic: {<<: *m, dp: 1}", "run.yaml")
    assert cfg.mesh.critic == MeshConfig(tp=2, dp=1)


def test_a_missing_file_names_the_nearest(tmp_path: Path) -> None:
    (tmp_path / "quickstart.yaml").write_text("{}")
    with pytest.raises(ConfigError, match=r"did you mean .*quickstart\.yaml"):
        load_config(tmp_path / "quikstart.yaml")
    with pytest.raises(ConfigError, match="is a directory"):
        load_config(tmp_path)
    (tmp_path / "latin.yaml").write_bytes(b"seed: 1\nrun_dir: \xe9\n")
    with pytest.raises(ConfigError, match=r"latin.yaml:2: got byte 0xe9; must be UTF-8"):
        load_config(tmp_path / "latin.yaml")


def test_overrides_apply_in_order_over_the_file() -> None:
    cfg = parse_config(
        "stages: [{name: a}, {name: b}]",
        "run.yaml",
        ["stages.1.num_steps=5", "stages[1].num_steps=6", "mesh.actor.tp=2", "rollout.stop=[a, b]", "seed=3"],
    )
    assert cfg.stages[1] == StageConfig(name="b", num_steps=6)
    assert (cfg.mesh.actor.tp, cfg.rollout.stop, cfg.seed) == (2, ("a", "b"), 3)


def test_overrides_start_from_the_defaults_that_the_file_leaves_out() -> None:
    cfg = parse_config(
        "{}",
        "run.yaml",
        ["stages.0.num_steps=5", "mesh.critic.tp=2", "task.size=3", "stages.0.optim.betas.1=0.5"],
    )
    assert cfg.stages == (StageConfig(num_steps=5, optim=cfg.stages[0].optim),)
    assert cfg.stages[0].optim.betas == (0.9, 0.5)
    assert cfg.mesh.critic == MeshConfig(tp=2)
    assert cfg.task == {"name": "reasoning_gym", "size": 3}


def test_an_override_of_one_anchor_leaves_the_others() -> None:
    cfg = parse_config("mesh:\n  actor: &m {tp: 2}\n  critic: *m", "run.yaml", ["mesh.actor.tp=4"])
    assert (cfg.mesh.actor.tp, cfg.mesh.critic) == (4, MeshConfig(tp=2))


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("bogus", "must be KEY=VALUE"),
        ("=3", "must be KEY=VALUE"),
        ("a..b=3", "must be KEY=VALUE"),
        ("stages.1.num_steps=5", "index 0..0 of stages"),
        ("stages.x.num_steps=5", "index 0..0 of stages"),
        ("seed.x=5", "seed is a single value and has no x"),
        ("seed=[1", "must be readable YAML"),
        ("mesh.aktor.tp=2", "did you mean mesh.actor?"),
        ("seed=a", "seed: got"),
    ],
)
def test_a_wrong_override_is_one_line(override: str, reason: str) -> None:
    assert reason in one_error("seed: 1", override)


def test_plug_in_options_are_checked_and_filled_in() -> None:
    text = "task: {name: gym, dataset: sums}\nstages: [{algorithm: {name: ppo, clip: 1}}]"
    cfg = parse_config(text, "run.yaml", (), PLUGINS)
    assert cfg.task == {"name": "gym", "dataset": "sums", "size": None}
    assert cfg.stages[0].algorithm == {"name": "ppo", "clip": 1.0, "kind": "k1", "bounds": [0.5, 1.0]}
    assert read_options(PpoOptions, cfg.stages[0].algorithm, "a") == PpoOptions(clip=1.0)


def test_plug_in_mistakes_are_found_with_the_others() -> None:
    text = (
        "seed: x\ntask: {name: gim}\nstages: [{algorithm: {name: ppo, clap: 1, kind: k3}}, {algorithm: {}}]"
    )
    lines = errors_of(text, plugins=PLUGINS)
    assert lines[1:] == [
        'task.name: got "gim"; must be a known name; hint: did you mean gym?',
        "stages[0].algorithm.clap: got 1; unknown key; hint: did you mean stages[0].algorithm.clip?",
        'stages[0].algorithm.kind: got "k3"; must be one of k1, k2',
        "stages[1].algorithm.name: got nothing; must be a known name; hint: one of ppo",
    ]
    missing = "task: {name: gym}\nstages: [{algorithm: {name: ppo}}]"
    assert (
        one_error(missing, plugins=PLUGINS)
        == "run.yaml: task.dataset: got nothing; must be given; hint: it is text"
    )


def test_a_hint_names_what_is_close_or_a_few_of_many() -> None:
    assert name_hint("suns", ["sums", "gcd"]) == "did you mean sums?"
    assert name_hint("zzz", ["sums", "gcd"]) == "one of sums, gcd"
    many = name_hint("zzz", [f"set{i}" for i in range(100)])
    assert many.endswith("set10, set11 and 88 more")


def test_resolve_follows_the_actor() -> None:
    cfg = resolve(parse_config("mesh: {actor: {tp: 2, pp: 2, dp: 3, first_rank: 1}}", "run.yaml"))
    assert cfg.mesh.critic == cfg.mesh.reference == cfg.mesh.actor
    assert cfg.mesh.rollout == MeshConfig(tp=2, dp=6, first_rank=1)
    assert cfg.model.critic == cfg.model.actor
    assert cfg.stages[0].minibatch_size == cfg.stages[0].batch_size


def test_resolve_never_gives_a_rollout_rank_nothing_to_do() -> None:
    cfg = resolve(parse_config("mesh: {actor: {pp: 4, dp: 4}}\nstages: [{batch_size: 8}]", "run.yaml"))
    assert cfg.mesh.rollout == MeshConfig(dp=8)


def test_resolve_keeps_what_was_asked() -> None:
    cfg = resolve(
        parse_config("mesh: {critic: {tp: 2}, rollout: {dp: 2}}\nstages: [{minibatch_size: 4}]", "run.yaml")
    )
    assert (cfg.mesh.critic, cfg.mesh.rollout) == (MeshConfig(tp=2), MeshConfig(dp=2))
    assert cfg.stages[0].minibatch_size == 4
    assert resolve(cfg) == cfg


def test_dump_reads_back_as_the_same_configuration() -> None:
    text = (
        "invariance: {mode: off}\nrun_dir: 'yes'\nrollout: {stop: ['1e-3', '\\n', 'null', 'ü']}\n"
        "task: {name: gym, dataset: '010'}\nstages: [{optim: {lr: 1e-22, eps: 1e+22}}]"
    )
    cfg = resolve(parse_config(text, "run.yaml", ["mesh.actor.pipeline_split=[1,1]"], PLUGINS))
    assert parse_config(dump(cfg), "dump", (), PLUGINS) == cfg
    assert parse_config(dump(cfg), "dump", ["seed=1"], PLUGINS) != cfg


def test_a_mesh_to_be_planned_cannot_run() -> None:
    with pytest.raises(ConfigError, match=r"mesh: got auto; .* hint: `unirl-scale plan`"):
        parse_config("seed: 1\n", "run.yaml", ["mesh=auto"])
