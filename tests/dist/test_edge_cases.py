"""The edge cases of training that need ranks: empty rows, nothing valid, bad rewards, NaN gradients, long
rows.

Not covered here: what the command prints and returns for them (tests/e2e/test_train_cli.py).
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from tests.dist.engine_ranks import MHA, STEPS, Case
from tests.dist.run_ranks import RankPool
from tests.dist.stage_ranks import (
    Played,
    Script,
    broken_then_sound,
    one_long_row,
    one_side_empty,
    play,
    replicated_bits,
    with_and_without_an_empty_row,
)
from unirl_scale.core.config import MeshConfig

TIMEOUT_S = 300.0
SMALL = Case(model=replace(MHA, num_layers=2), leaves=2, slots=4)
NAN = math.nan


def mesh(**axes: object) -> MeshConfig:
    return MeshConfig(**{"micro_batch_size": 4, **axes})  # type: ignore[arg-type]


# ---- rows -------------------------------------------------------------------------------------------
@pytest.mark.parametrize("head", ["lm", "value"])
@pytest.mark.parametrize("layout", [mesh(), mesh(dp=4), mesh(tp=2, pp=2)], ids=["one", "dp4", "tp2-pp2"])
def test_an_empty_response_is_as_if_the_row_were_not_there(run_ranks: RankPool, layout, head) -> None:
    case = replace(SMALL, mesh=layout, head=head)
    for present, absent, other in run_ranks(
        with_and_without_an_empty_row, case.world_size, case, timeout_s=TIMEOUT_S
    ):
        assert present == absent
        assert set(present[0]) == case.tensors
        assert present != other, "a row that trains must matter"


def test_one_long_row_among_short_ones(run_ranks: RankPool) -> None:
    few_heads = replace(MHA, num_layers=2, num_heads=2, num_kv_heads=2, head_dim=8)
    case = replace(SMALL, model=few_heads, slots=2, samples=16, max_tokens=1000)
    (expected,) = run_ranks(one_long_row, 1, case, timeout_s=TIMEOUT_S)
    for layout in (mesh(dp=2), mesh(dp=2, pp=2)):
        laid_out = replace(case, mesh=layout)
        for got in run_ranks(one_long_row, laid_out.world_size, laid_out, timeout_s=TIMEOUT_S):
            assert got == expected, layout


@pytest.mark.parametrize("layout", [mesh(dp=2), mesh(dp=4), mesh(dp=2, pp=2)], ids=["dp2", "dp4", "pp2"])
def test_a_rank_whose_samples_are_all_empty_still_takes_part(run_ranks: RankPool, layout) -> None:
    case = replace(SMALL, samples=12)
    (expected,) = run_ranks(one_side_empty, 1, case, timeout_s=TIMEOUT_S)
    laid_out = replace(case, mesh=layout)
    for got in run_ranks(one_side_empty, laid_out.world_size, laid_out, timeout_s=TIMEOUT_S):
        assert got == expected


# ---- gradients --------------------------------------------------------------------------------------
@pytest.mark.parametrize("layout", [mesh(dp=3), mesh(tp=2, pp=2)], ids=["dp3", "tp2-pp2"])
def test_a_nan_gradient_on_one_rank_skips_the_update_on_all(run_ranks: RankPool, layout) -> None:
    case = replace(SMALL, mesh=layout)
    results = run_ranks(broken_then_sound, case.world_size, case, timeout_s=TIMEOUT_S)
    first_stage = {f"layers.{i}.{n}" for i in range(2 // layout.pp) for n in ("qkv", "gate_up")}
    wrong = first_stage | ({"lm_head"} if layout.pp == 1 else set())
    for found in results:
        assert math.isfinite(found["loss"]) and found["loss"] == results[0]["loss"]
        assert found["applied"] is False
        assert set(found["nonfinite"]) == wrong
        assert found["state kept"] and found["next step as if the broken one had not been"]


@pytest.mark.parametrize("head", ["lm", "value"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_replicated_parameters_stay_equal_on_every_rank(run_ranks: RankPool, head, precision) -> None:
    layout = mesh(tp=3, dp=2, sequence_parallel=True)
    case = replace(SMALL, leaves=3, head=head, precision=precision, mesh=layout)
    by_rank = run_ranks(replicated_bits, 6, case, timeout_s=TIMEOUT_S)
    kinds = {"chunk 0 weights", "chunk 0 master", "chunk 0 exp_avg", "chunk 0 exp_avg_sq"}
    for step in range(STEPS):
        for name in kinds:
            assert len({found[step][name] for found in by_rank}) == 1, (step, name)
        # Ranks 0 and 3 are data-parallel copies; ranks 0 and 1 hold other leaves.
        leafed = [found[step]["chunk 0 leafed"] for found in by_rank]
        assert leafed[:3] == leafed[3:] and len(set(leafed)) == 3
    assert len({found["chunk 0 weights"] for found in by_rank[0]}) == STEPS, "they do change"


# ---- rewards ----------------------------------------------------------------------------------------
LAYOUTS = {
    "dp2": {"actor": mesh(dp=2), "critic": mesh(tp=2)},
    "tp2-dp2": {"actor": mesh(tp=2, dp=2), "critic": mesh(dp=3, first_rank=1)},
}


def played(run_ranks: RankPool, script: Script) -> list[Played]:
    size = max(m.first_rank + m.tp * m.pp * m.dp for m in (script.actor, script.critic))
    return run_ranks(play, size, script, timeout_s=TIMEOUT_S)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_rows_with_invalid_rewards_are_dropped_counted_and_named(run_ranks: RankPool, layout) -> None:
    script = Script(rewards=(1.0, NAN, 0.0, 1.0, None, -1.0, math.inf, 0.5))
    (expected,) = played(run_ranks, script)
    assert expected.logs[0].metrics["invalid_rewards"] == 3.0
    assert expected.logs[0].warnings == ["dropped samples with invalid rewards: [1, 4, 6]"]
    assert expected.state.optimizer_steps == 4 and expected.state.skipped_steps == 0
    assert all(math.isfinite(v) for log in expected.logs for v in log.metrics.values())
    for other in played(run_ranks, replace(script, **layout)):
        assert [log.digests for log in other.logs] == [log.digests for log in expected.logs]
        assert other.logs[1].warnings == ["dropped samples with invalid rewards: [9, 12, 14]"]
        assert other.state == expected.state


def test_the_critic_and_actor_learn_on_meshes_of_their_own(run_ranks: RankPool) -> None:
    """Also the control of the tests around it: other rewards give other digests."""
    script = Script(rewards=(1.0, 0.0, 0.5))
    (expected,) = played(run_ranks, script)
    for other in played(run_ranks, replace(script, **LAYOUTS["tp2-dp2"])):
        assert [log.digests for log in other.logs] == [log.digests for log in expected.logs]
        assert other.logs[0].metrics["rollout/logprob_max_abs_diff"] == 0.0
    names = {name.split("/")[0] for log in expected.logs for step in log.digests.values() for name in step}
    assert names == {"actor", "critic", "batch"}
    (changed,) = played(run_ranks, replace(script, rewards=(1.0, 0.0, 0.25)))
    assert changed.logs[0].digests != expected.logs[0].digests


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_a_batch_with_nothing_valid_takes_no_step(run_ranks: RankPool, layout) -> None:
    script = replace(Script(rewards=(NAN, None)), **layout)
    for rank in played(run_ranks, script):
        assert rank.error == ""
        assert rank.state.skipped_steps == 4 and rank.state.optimizer_steps == 0
        assert rank.state.step == 2, "training goes on"
        assert rank.weights_after == rank.weights_before
        assert any("no sample trains; skipped" in text for text in rank.logs[0].warnings)
        assert all(math.isfinite(v) for log in rank.logs for v in log.metrics.values())


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_on_invalid_error_stops_every_rank_before_the_update(run_ranks: RankPool, layout) -> None:
    script = replace(Script(rewards=(1.0, 0.0, NAN, 1.0), on_invalid="error"), **layout)
    for rank in played(run_ranks, script):
        assert rank.error.startswith("RewardError: reward: got sample 2: nan")
        assert rank.state.step == 0 and rank.weights_after == rank.weights_before


def test_a_nan_gradient_is_reported_with_its_parameters(run_ranks: RankPool) -> None:
    script = replace(Script(rewards=(1.0, 0.0), broken=True, steps=1), **LAYOUTS["dp2"])
    for rank in played(run_ranks, script):
        assert rank.weights_after == rank.weights_before
        assert rank.state.skipped_steps == 4, "two minibatches of two roles"
        assert rank.state.actor_updates == rank.state.critic_updates == 0
        assert any("actor gradient not finite in layers.0.gate_up" in text for text in rank.logs[0].warnings)
        assert any("critic gradient not finite" in text for text in rank.logs[0].warnings)
