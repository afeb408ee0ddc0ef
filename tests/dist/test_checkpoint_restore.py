"""A run that is saved on one layout and continued on another ends with the digests of a run never disturbed.

Actor (tied embeddings, grouped heads, biases, qk-norm), critic and a frozen reference, each on a mesh of its
own. Digests are those of every step: loss, gradients, grad-norm, weights, both moments, and the reference's
scores.

Not covered here: processes that are killed (tests/fault), the rollout (tests/e2e), device memory
(tests/device).
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.dist.checkpoint_ranks import Digests, Outcome, Plan, lose_node, run_plan
from tests.dist.run_ranks import RankPool
from unirl_scale.core.config import MeshConfig
from unirl_scale.core.digest_compare import compare_digests
from unirl_scale.train.checkpoint.store import Store

TIMEOUT_S = 240.0
STEPS = 6

ONE = {"actor": MeshConfig(), "critic": MeshConfig(), "reference": MeshConfig()}
FOUR = {
    "actor": MeshConfig(tp=2, pp=2),
    "critic": MeshConfig(tp=1, dp=4, bucket_elements=1),
    "reference": MeshConfig(pp=2, dp=2, bucket_elements=1),
}
THREE = {"actor": MeshConfig(dp=3), "critic": MeshConfig(tp=3), "reference": MeshConfig(tp=3)}
TWO = {
    "actor": MeshConfig(pp=2),
    "critic": MeshConfig(tp=2),
    "reference": MeshConfig(dp=2, bucket_elements=1),
}
SIX = {
    "actor": MeshConfig(tp=3, dp=2),
    "critic": MeshConfig(tp=2, dp=3),
    "reference": MeshConfig(tp=6),
}
SNAPSHOTS = {"snapshot_every": 1, "keep": 0}
SAVES = {"every": 1, "keep": 2, "background": False}


@pytest.fixture(scope="module")
def straight(run_ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Digests:
    """Of one rank that nothing disturbed."""
    path = tmp_path_factory.mktemp("straight")
    plan = Plan(path=str(path), stop=STEPS, options={"keep": 0}, **ONE)
    return run_ranks(run_plan, 1, plan, timeout_s=TIMEOUT_S)[0].digests


def start(
    run_ranks: RankPool, path: Path, layout: dict[str, MeshConfig], stop: int, **options: object
) -> list[Outcome]:
    plan = Plan(path=str(path), stop=stop, **layout, **options)  # type: ignore[arg-type]
    return run_ranks(run_plan, plan.world_size, plan, timeout_s=TIMEOUT_S)


def assert_equal(straight: Digests, *runs: list[Outcome]) -> None:
    """Every rank of every start saw the digests of the straight run."""
    for outcomes in runs:
        for outcome in outcomes:
            assert outcome.digests
            expected = {step: straight[step] for step in outcome.digests}
            result = compare_digests(expected, outcome.digests)
            assert result.equal, result.first_difference


@pytest.mark.parametrize("kind", ["disk", "memory"])
def test_four_ranks_then_three_then_two_then_six(run_ranks, tmp_path, straight, kind) -> None:
    options = {"options": SAVES if kind == "disk" else SNAPSHOTS, "end": "abandon"}
    runs = [
        start(run_ranks, tmp_path, layout, stop, **options)
        for layout, stop in ((FOUR, 2), (THREE, 3), (TWO, 4), (SIX, STEPS))
    ]
    for step, outcomes in zip((2, 3, 4), runs[1:], strict=True):
        where = "checkpoint" if kind == "disk" else f"snapshot of step {step}"
        assert {o.source[: len(where)] for o in outcomes} == {where}
        assert min(outcomes[0].digests) == step + 1, "it began after the step that was saved"
    assert_equal(straight, *runs)


def test_one_wrong_bit_in_what_was_restored_shows(run_ranks, tmp_path, straight) -> None:
    options = {"options": SAVES, "end": "abandon"}
    start(run_ranks, tmp_path, TWO, 2, **options)
    wrong = start(run_ranks, tmp_path, THREE, 3, wrong=True, **options)
    result = compare_digests({3: straight[3]}, wrong[0].digests)
    assert not result.equal
    assert "actor/exp_avg_sq" in str(result.differing)


def test_a_save_of_one_rank_is_read_by_six_and_back(run_ranks, tmp_path, straight) -> None:
    options = {"options": SAVES, "end": "finish"}
    first = start(run_ranks, tmp_path, ONE, 1, **options)
    second = start(run_ranks, tmp_path, SIX, 2, **options)
    third = start(run_ranks, tmp_path, ONE, 3, **options)
    assert_equal(straight, first, second, third)
    assert third[0].state.step == 3
    assert third[0].state.actor_updates == 3


# ---- replicas -----------------------------------------------------------------------------------------
def test_a_lost_node_is_read_from_its_replica_on_another_node(run_ranks, tmp_path, straight) -> None:
    options = {"options": SNAPSHOTS, "end": "abandon", "ranks_per_node": 2}
    first = start(run_ranks, tmp_path, FOUR, 3, **options)
    assert all(o.metrics["snapshot/replica_bytes"] > 0 for o in first)
    lose_node(Plan(path=str(tmp_path), stop=0, **FOUR), 1)
    second = start(run_ranks, tmp_path, TWO, STEPS, **{**options, "ranks_per_node": 0})
    assert_equal(straight, first, second)
    assert {o.source for o in second} == {"snapshot of step 3, incarnation 1, in memory"}
    assert {o.far_bytes for o in second} == {0}, "the surviving node holds both halves"


def test_a_new_node_is_sent_what_it_needs(run_ranks, tmp_path, straight) -> None:
    options = {"options": SNAPSHOTS, "end": "abandon"}
    first = start(run_ranks, tmp_path, TWO, 2, **options)
    second = start(run_ranks, tmp_path, FOUR, 4, ranks_per_node=2, **options)
    assert_equal(straight, first, second)
    assert [o.far_bytes > 0 for o in second] == [False, False, True, True]
    assert [o.near_bytes > 0 for o in second] == [True, True, False, False]


def test_without_a_replica_a_lost_node_means_the_disk(run_ranks, tmp_path, straight) -> None:
    options = {"options": {"snapshot_every": 1, "every": 2, "background": False}, "end": "abandon"}
    start(run_ranks, tmp_path, TWO, 3, **options)
    lose_node(Plan(path=str(tmp_path), stop=0, **TWO), 0)
    second = start(run_ranks, tmp_path, THREE, 4, **options)
    assert_equal(straight, second)
    assert min(second[0].digests) == 3
    assert second[0].source.endswith("step-0000000002.0001")


# ---- damage -------------------------------------------------------------------------------------------
def flip(path: Path, at: int = -64) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def buffers(path: Path, node: int, pattern: str) -> list[Path]:
    """Buffers of a node that hold the newest step, by pattern."""
    return [p for p in sorted(path.glob(f"memory-{node}/*/{pattern}")) if p.suffix != ".json"]


def test_a_damaged_own_snapshot_is_named_and_the_replica_is_used(run_ranks, tmp_path, straight) -> None:
    options = {"options": SNAPSHOTS, "end": "abandon", "ranks_per_node": 1}
    start(run_ranks, tmp_path, TWO, 3, **options)
    for buffer in buffers(tmp_path, 0, "own-*.[0-9]"):
        flip(buffer)
    second = start(run_ranks, tmp_path, TWO, STEPS, **options)
    assert_equal(straight, second)
    assert min(second[0].digests) == 4, "nothing was lost"
    for outcome in second:
        assert any("own-00000.0001" in n and "damaged in bytes" in n for n in outcome.notes)


def test_when_memory_is_damaged_everywhere_the_disk_is_next(run_ranks, tmp_path, straight) -> None:
    both = {"snapshot_every": 1, "every": 2, "background": False}
    options = {"options": both, "end": "abandon", "ranks_per_node": 1}
    start(run_ranks, tmp_path, TWO, 3, **options)
    for node in (0, 1):
        for buffer in buffers(tmp_path, node, "*-00000.*.[0-9]"):
            flip(buffer)
    second = start(run_ranks, tmp_path, THREE, 4, **options)
    assert_equal(straight, second)
    assert min(second[0].digests) == 3
    assert second[0].source.endswith("step-0000000002.0001")
    assert any("snapshot of step 3" in note for note in second[0].notes)


@pytest.mark.parametrize("damage", ["flip", "truncate"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(
    run_ranks, tmp_path, straight, damage
) -> None:
    options = {"options": SAVES, "end": "abandon"}
    start(run_ranks, tmp_path, TWO, 2, **options)
    shard = tmp_path / "checkpoints" / "step-0000000002.0001" / "rank-00001.train.safetensors"
    if damage == "flip":
        flip(shard)
    else:
        shard.write_bytes(shard.read_bytes()[:-1])
    second = start(run_ranks, tmp_path, THREE, 3, **options)
    assert_equal(straight, second)
    assert min(second[0].digests) == 2
    for outcome in second:  # every rank says so, though one rank found it
        assert any("step-0000000002.0001" in note for note in outcome.notes)


def test_when_nothing_is_whole_the_run_does_not_start_over(run_ranks, tmp_path) -> None:
    options = {"options": {**SAVES, "keep": 1}, "end": "abandon"}
    start(run_ranks, tmp_path, ONE, 1, **options)
    flip(next(tmp_path.glob("checkpoints/step-*/rank-*.safetensors")))
    with pytest.raises(AssertionError, match=r"no save in .* is whole; hint: --overwrite"):
        start(run_ranks, tmp_path, TWO, 2, **options)


def test_other_data_is_refused_on_every_rank(run_ranks, tmp_path) -> None:
    options = {"options": SAVES, "end": "abandon"}
    start(run_ranks, tmp_path, ONE, 1, **options)
    with pytest.raises(AssertionError, match=r"2 of 2 ranks failed[\s\S]*fingerprint other"):
        start(run_ranks, tmp_path, TWO, 2, fingerprint="other", **options)


def test_a_run_branches_off_another_runs_checkpoint_and_then_follows_its_own(
    run_ranks, tmp_path, straight
) -> None:
    options = {"options": SAVES, "end": "abandon"}
    start(run_ranks, tmp_path / "a", ONE, 1, **options) if (tmp_path / "a").mkdir() is None else None
    (tmp_path / "b").mkdir()
    named = {**SAVES, "resume": str(tmp_path / "a" / "checkpoints" / "step-0000000001.0001")}
    options = {"options": named, "end": "abandon"}
    first = start(run_ranks, tmp_path / "b", TWO, 2, **options)
    second = start(run_ranks, tmp_path / "b", ONE, 3, **options)
    assert "/a/" in first[0].source
    assert "/b/" in second[0].source
    assert_equal(straight, first, second)


def test_saves_that_may_hold_corrupted_state_are_passed_over(run_ranks, tmp_path, straight) -> None:
    options = {"options": SAVES, "end": "abandon"}
    start(run_ranks, tmp_path, TWO, 2, **options)
    Store(tmp_path / "checkpoints").distrust(1, 1)
    second = start(run_ranks, tmp_path, THREE, 3, **options)
    assert_equal(straight, second)
    assert min(second[0].digests) == 2
    for outcome in second:
        assert any("step-0000000002.0001: it may hold silent data corruption" in n for n in outcome.notes)
