"""A rank is killed at each labelled point of a save; the next start lands on a whole one, to the bit.

Each start is another layout. Not covered here: a rank that is killed in training itself.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.dist.checkpoint_ranks import Digests, Outcome, Plan, lose_node, run_plan
from tests.dist.run_ranks import RankPool, RanksFailed
from unirl_scale.core.config import MeshConfig
from unirl_scale.core.digest_compare import compare_digests
from unirl_scale.train.checkpoint.store import Store
from unirl_scale.train.checkpoint.writer import POINTS

TIMEOUT_S = 120.0
STEPS = 4
ONE = {"actor": MeshConfig(), "critic": MeshConfig(), "reference": MeshConfig()}
TWO = {"actor": MeshConfig(pp=2), "critic": MeshConfig(tp=2), "reference": MeshConfig(dp=2)}
SAVES = {"every": 1, "keep": 2, "background": False}


@pytest.fixture(scope="module")
def straight(run_ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Digests:
    """Of one rank that nothing disturbed."""
    plan = Plan(path=str(tmp_path_factory.mktemp("straight")), stop=STEPS, options={"keep": 0}, **ONE)
    return run_ranks(run_plan, 1, plan, timeout_s=TIMEOUT_S)[0].digests


def start(
    run_ranks: RankPool, path: Path, layout: dict[str, MeshConfig], stop: int, **options: object
) -> list[Outcome]:
    plan = Plan(path=str(path), stop=stop, **{"options": SAVES, "end": "abandon", **layout, **options})  # type: ignore[arg-type]
    return run_ranks(run_plan, plan.world_size, plan, timeout_s=TIMEOUT_S)


def assert_continues(straight: Digests, outcomes: list[Outcome], after: int, path: Path) -> None:
    """It began after that step, saw the straight run's digests, and left only sound saves behind."""
    for outcome in outcomes:
        assert min(outcome.digests) == after + 1
        result = compare_digests({s: straight[s] for s in outcome.digests}, outcome.digests)
        assert result.equal, result.first_difference
    store = Store(path / "checkpoints")
    assert [store.read(name).head.step for name in store.names()] == [STEPS, STEPS - 1]


@pytest.mark.parametrize("label", POINTS)
def test_a_lone_rank_killed_in_a_save(run_ranks, tmp_path, straight, label) -> None:
    with pytest.raises(RanksFailed, match="exit status -9"):
        start(run_ranks, tmp_path, ONE, STEPS, fault=(0, 2, label))
    after = 2 if label in ("after manifest", "before retention") else 1
    assert_continues(straight, start(run_ranks, tmp_path, TWO, STEPS), after, tmp_path)


@pytest.mark.parametrize(("rank", "label"), [(1, "mid write"), (1, "before record"), (0, "before manifest")])
def test_one_of_two_ranks_killed_in_a_save(run_ranks, tmp_path, straight, rank, label) -> None:
    with pytest.raises(RanksFailed, match="exit status -9"):
        start(run_ranks, tmp_path, TWO, STEPS, fault=(rank, 2, label))
    assert_continues(straight, start(run_ranks, tmp_path, ONE, STEPS), 1, tmp_path)


def test_killed_twice_at_the_same_save(run_ranks, tmp_path, straight) -> None:
    for _ in range(2):
        with pytest.raises(RanksFailed, match="exit status -9"):
            start(run_ranks, tmp_path, ONE, STEPS, fault=(0, 2, "before manifest"))
    assert_continues(straight, start(run_ranks, tmp_path, ONE, STEPS), 1, tmp_path)


def test_a_killed_rank_loses_no_step_that_was_in_memory(run_ranks, tmp_path, straight) -> None:
    both = {"every": 1, "keep": 2, "background": True, "snapshot_every": 1}
    with pytest.raises(RanksFailed, match="exit status -9"):
        start(run_ranks, tmp_path, ONE, STEPS, options=both, fault=(0, 2, "mid write"))
    outcomes = start(run_ranks, tmp_path, TWO, STEPS)
    assert outcomes[0].source == "snapshot of step 2, incarnation 1, in memory"
    assert_continues(straight, outcomes, 2, tmp_path)


def test_ranks_that_must_go_one_step_apart_save_the_step_that_all_have(run_ranks, tmp_path, straight) -> None:
    snapshots = {"snapshot_every": 1, "keep": 2}
    start(run_ranks, tmp_path, TWO, 2, options=snapshots, end="leave")
    lose_node(Plan(path=str(tmp_path), stop=0, **TWO), 0)  # the next start is elsewhere
    outcomes = start(run_ranks, tmp_path, ONE, STEPS)
    assert outcomes[0].source.endswith("step-0000000002.0001")
    assert_continues(straight, outcomes, 2, tmp_path)
