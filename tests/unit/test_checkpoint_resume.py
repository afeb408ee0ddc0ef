"""Which saves a run may continue from, which changes it names, and how much room it asks for."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.checkpoint_state import LEAVES, MODEL, head
from unirl_scale.comm.groups import Group
from unirl_scale.core.config import (
    CheckpointConfig,
    InvarianceConfig,
    MeshConfig,
    MeshesConfig,
    ModelsConfig,
    RunConfig,
    StageConfig,
)
from unirl_scale.core.errors import ConfigError
from unirl_scale.core.load import resolve
from unirl_scale.core.mesh import Mesh
from unirl_scale.core.ranks import RankInfo
from unirl_scale.core.typed import to_plain
from unirl_scale.rl.kl_controller import KlController
from unirl_scale.train.checkpoint.manifest import Manifest, manifest_bytes, read_manifest
from unirl_scale.train.checkpoint.resume import changed_settings, require_same
from unirl_scale.train.checkpoint.session import open_session
from unirl_scale.train.checkpoint.sizes import rank_bytes, require_room, save_bytes
from unirl_scale.train.checkpoint.sources import Source
from unirl_scale.train.data_order import prompts_at
from unirl_scale.train.metrics import cut_after
from unirl_scale.train.rundir import RunDir, claim
from unirl_scale.train.state import TrainState

CFG = resolve(
    RunConfig(
        model=ModelsConfig(actor=MODEL),
        invariance=InvarianceConfig(model_leaves=LEAVES, data_slots=4),
        mesh=MeshesConfig(actor=MeshConfig(tp=2, dp=2)),
        stages=(StageConfig(name="sft", num_steps=4), StageConfig(name="ppo", num_steps=4)),
    )
)


def source(cfg: RunConfig = CFG, **state: int) -> Source:
    saved = head(4, config=json.loads(json.dumps(to_plain(cfg))), state=TrainState(**{"step": 3, **state}))
    return Source(what="checkpoint c", manifest=Manifest(head=saved, parts=()), sites={})


def with_actor(**changes: object) -> RunConfig:
    return replace(CFG, model=replace(CFG.model, actor=replace(MODEL, **changes)))


# ---- does it belong here ------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "other",
    [
        replace(CFG, mesh=MeshesConfig(actor=MeshConfig(dp=3))),
        replace(CFG, stages=(*CFG.stages, StageConfig(name="more"))),
        with_actor(init_std=0.5),
    ],
)
def test_another_layout_more_stages_and_the_seed_of_old_weights_are_no_matter(other: RunConfig) -> None:
    require_same(resolve(other), source(), "d")


@pytest.mark.parametrize(
    ("other", "state", "message"),
    [
        (
            with_actor(hidden_size=48),
            {},
            "model.actor.hidden_size: got 48; must be the saved run's; hint: 24",
        ),
        (with_actor(rope_theta=5e5), {}, "model.actor.rope_theta: got 500000.0; must be the saved run's"),
        (
            replace(CFG, invariance=InvarianceConfig(model_leaves=3)),
            {},
            "invariance.model_leaves: got 3; must be the saved run's: .*; hint: 6",
        ),
        (
            replace(CFG, stages=CFG.stages[1:]),
            {},
            r'stages: got \["ppo"\]; must begin with the stages .*; hint: \["sft"\]',
        ),
        (
            replace(CFG, stages=(replace(CFG.stages[0], num_steps=2), CFG.stages[1])),
            {"stage_step": 3},
            r"stages\[0\].num_steps: got 2; must be at least the 3 steps that are done; hint: 3",
        ),
    ],
)
def test_what_would_make_the_state_meaningless_is_refused(other, state, message) -> None:
    with pytest.raises(ConfigError, match=f"checkpoint c: {message}"):
        require_same(other, source(**state), "d")


def test_other_data_is_refused_with_both_fingerprints_unless_allowed() -> None:
    with pytest.raises(ConfigError, match=r"fingerprint other.* was trained on d; .*allow_data_change=true"):
        require_same(CFG, source(), "other")
    require_same(replace(CFG, checkpoint=CheckpointConfig(allow_data_change=True)), source(), "other")


def test_settings_that_take_effect_from_here_on_are_named() -> None:
    optim = replace(CFG.stages[1].optim, lr=0.5)
    other = replace(CFG, stages=(CFG.stages[0], replace(CFG.stages[1], optim=optim)), seed=9)
    saved = json.loads(json.dumps(to_plain(CFG)))
    assert changed_settings(saved, other) == [
        "changed setting seed: 0 -> 9",
        "changed setting stages[1].optim.lr: 0.001 -> 0.5",
    ]
    assert changed_settings(saved, replace(CFG, mesh=MeshesConfig(actor=MeshConfig(dp=7)), run_dir="x")) == []


def test_counters_and_the_controller_read_back_to_the_last_bit() -> None:
    state = TrainState(step=9, stage=1, stage_step=4, prompts_seen=36, skipped_steps=1, actor_updates=17,
                       kl=KlController(coef=math.pi / 10, target=0.1, horizon=3))  # fmt: skip
    manifest = Manifest(head=head(2, state=state), parts=())
    assert read_manifest(manifest_bytes(manifest), "m").head.state == state


def test_the_order_of_data_continues_over_the_end_of_an_epoch() -> None:
    straight = prompts_at(3, 0, 25, 10)
    for cut in (9, 10, 11, 20):
        assert prompts_at(3, 0, cut, 10) + prompts_at(3, cut, 25 - cut, 10) == straight
    assert sorted(straight[:10]) == sorted(straight[10:20]) == list(range(10))


# ---- room -----------------------------------------------------------------------------------------------
def test_the_sizes_of_all_ranks_make_the_size_of_a_save() -> None:
    cfg = resolve(
        replace(CFG, mesh=MeshesConfig(actor=MeshConfig(tp=2, dp=2), critic=MeshConfig(pp=2, dp=3)))
    )
    for needs in ({"critic": False, "reference": False}, {"critic": True, "reference": True}):
        ranks = range(6)
        assert sum(sum(rank_bytes(cfg, r, **needs)) for r in ranks) == save_bytes(cfg, **needs)


def check_room(tmp_path: Path, monkeypatch, *, disk: int, memory: int = 1 << 40, **options: object) -> None:
    cfg = replace(CFG, run_dir=str(tmp_path), mesh=resolve(RunConfig()).mesh)
    cfg = replace(cfg, checkpoint=CheckpointConfig(memory_dir=str(tmp_path), **options))  # type: ignore[arg-type]
    session = open_session(cfg, Group.single(), RankInfo())
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=disk))
    monkeypatch.setattr("unirl_scale.train.checkpoint.sizes.available_memory", lambda: memory)
    require_room(cfg, session, Group.single(), critic=False, reference=False)


def test_checkpoints_that_will_not_fit_are_refused_with_the_sum(tmp_path, monkeypatch) -> None:
    one = save_bytes(replace(CFG, mesh=resolve(RunConfig()).mesh), critic=False, reference=False)
    check_room(tmp_path, monkeypatch, disk=3 * one, keep=2)
    with pytest.raises(
        ConfigError, match=r"keep: got 2; 3 checkpoints of .* KiB must fit .*; hint: checkpoint.keep=1"
    ):
        check_room(tmp_path, monkeypatch, disk=3 * one - 1, keep=2)
    with pytest.raises(ConfigError, match=r"keep: got 1; 2 checkpoints of .*hint: another checkpoint.dir"):
        check_room(tmp_path, monkeypatch, disk=2 * one - 1, keep=1)
    check_room(tmp_path, monkeypatch, disk=0, keep=0)


def test_snapshots_that_will_not_fit_are_refused_with_the_sum(tmp_path, monkeypatch) -> None:
    one = save_bytes(replace(CFG, mesh=resolve(RunConfig()).mesh), critic=False, reference=False)
    plain = {"keep": 0, "snapshot_every": 1}
    check_room(tmp_path, monkeypatch, disk=2 * one, **plain)
    with pytest.raises(ConfigError, match=r"snapshot_every: got 1; snapshots need .* on node-0 and .* free"):
        check_room(tmp_path, monkeypatch, disk=2 * one - 1, **plain)
    with pytest.raises(ConfigError, match="and its memory has"):
        check_room(tmp_path, monkeypatch, disk=2 * one, memory=2 * one - 1, **plain)


def test_the_default_layout_covers_one_rank() -> None:
    assert Mesh.from_config(resolve(RunConfig()).mesh.actor).size == 1


# ---- the run directory ------------------------------------------------------------------------------------
def run_with_steps(path: Path, *, checkpoints: bool) -> RunDir:
    run_dir = RunDir(path)
    with claim(run_dir):
        run_dir.metrics.write_text('{"step": 1, "stage": "s"}\n')
        if checkpoints:
            (path / "checkpoints").mkdir()
            (path / "checkpoints" / "run").write_text("id")
    return run_dir


def test_a_run_with_checkpoints_is_left_as_it_is(tmp_path: Path) -> None:
    run_dir = run_with_steps(tmp_path, checkpoints=True)
    with claim(run_dir, tmp_path / "checkpoints"):
        assert run_dir.has_steps


def test_a_run_without_checkpoints_is_an_error_and_not_step_0(tmp_path: Path) -> None:
    run_dir = run_with_steps(tmp_path, checkpoints=False)
    with (
        pytest.raises(ConfigError, match="and no checkpoint to continue it from; hint: another run_dir"),
        claim(run_dir, tmp_path / "checkpoints"),
    ):
        pytest.fail("claimed")
    assert run_dir.has_steps


def test_never_resuming_refuses_checkpoints_that_are_there(tmp_path: Path) -> None:
    run_dir = run_with_steps(tmp_path, checkpoints=True)
    for with_metrics in (True, False):
        if not with_metrics:
            run_dir.metrics.unlink()
        with pytest.raises(ConfigError), claim(run_dir, tmp_path / "checkpoints", resume=False):
            pytest.fail("claimed")


def test_overwriting_deletes_the_checkpoints_too(tmp_path: Path) -> None:
    run_dir = run_with_steps(tmp_path, checkpoints=True)
    with claim(run_dir, tmp_path / "checkpoints", overwrite=True):
        assert not run_dir.has_steps
        assert not (tmp_path / "checkpoints" / "run").exists()


def test_lines_past_the_step_to_continue_from_are_cut(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    run_dir.metrics.write_text("".join(f'{{"step": {i}}}\n' for i in range(1, 6)) + '{"step": 3')
    run_dir.digests.write_text("".join(f'{{"step": {i}}}\n' for i in range(1, 11)))
    cut_after(run_dir, 3, 6)
    assert run_dir.metrics.read_text().splitlines()[-1] == '{"step": 3}'
    assert len(run_dir.digests.read_text().splitlines()) == 6
    cut_after(RunDir(tmp_path / "empty"), 3, 6)


def test_other_data_slots_load_and_are_named_as_a_change() -> None:
    """No stored tensor is cut by data slots; only the sums from here on have another order."""
    other = replace(CFG, invariance=replace(CFG.invariance, data_slots=2))
    require_same(other, source(), "d")
    saved = json.loads(json.dumps(to_plain(CFG)))
    assert changed_settings(saved, other) == ["changed setting invariance.data_slots: 4 -> 2"]
