"""Weights move between any two meshes as bytes: the target has what a fresh model there would have.

Not covered here: more than 6 ranks, and buckets that fill (256 MB).
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.dist.engine_ranks import GQA, MHA
from tests.dist.reshard_ranks import LEAVES, Move, moved_weights
from tests.dist.run_ranks import RankPool
from unirl_scale.core.config import MeshConfig
from unirl_scale.parallel import reshard

UNTIED = replace(MHA, num_layers=3)
MOVES = {
    "tp-to-dp": Move(model=UNTIED, source=MeshConfig(tp=2), target=MeshConfig(dp=3)),
    "dp-to-tp": Move(model=GQA, source=MeshConfig(dp=4), target=MeshConfig(tp=3)),
    "pipeline-to-tp": Move(model=GQA, source=MeshConfig(pp=4), target=MeshConfig(tp=2, dp=2)),
    "interleaved-to-uneven": Move(
        model=GQA, source=MeshConfig(pp=2, vpp=2, dp=2), target=MeshConfig(pp=3, pipeline_split=(1, 3, 1))
    ),
    "tp-to-pipeline": Move(model=UNTIED, source=MeshConfig(tp=6), target=MeshConfig(tp=2, pp=3)),
    "bf16": Move(model=GQA, source=MeshConfig(tp=3, pp=2), target=MeshConfig(tp=2, dp=3), precision="bf16"),
    "disjoint": Move(model=GQA, source=MeshConfig(tp=2), target=MeshConfig(dp=2, first_rank=2)),
    "overlapping": Move(model=UNTIED, source=MeshConfig(dp=3), target=MeshConfig(tp=3, first_rank=1)),
    "same": Move(model=GQA, source=MeshConfig(tp=2), target=MeshConfig(tp=2)),
}


@pytest.mark.parametrize("move", MOVES.values(), ids=MOVES)
def test_the_target_has_the_bits_of_a_fresh_model(run_ranks: RankPool, move: Move) -> None:
    by_rank = run_ranks(moved_weights, move.world_size, move, timeout_s=300.0)
    target = move.target
    members = range(target.first_rank, target.first_rank + target.tp * target.pp * target.dp)
    for rank, found in enumerate(by_rank):
        assert bool(found) == (rank in members)
        assert [name for name, same in found.items() if not same] == [], rank


def test_small_buckets_move_the_same(run_ranks: RankPool) -> None:
    move = MOVES["interleaved-to-uneven"]
    for found in run_ranks(moved_in_small_buckets, move.world_size, move, timeout_s=300.0):
        assert all(found.values())


def moved_in_small_buckets(groups, move: Move) -> dict[str, bool]:
    kept, reshard.BUCKET_BYTES = reshard.BUCKET_BYTES, 500
    try:
        return moved_weights(groups, move)
    finally:
        reshard.BUCKET_BYTES = kept


def test_a_move_that_forgets_a_leaf_is_seen(run_ranks: RankPool) -> None:
    """Negative control."""
    found = run_ranks(moved_without_the_last_leaf, 3, MOVES["tp-to-dp"], timeout_s=300.0)
    assert [name for name, same in found[0].items() if not same] == ["lm_head"]


def moved_without_the_last_leaf(groups, move: Move) -> dict[str, bool]:
    original = reshard.Reshard._moves

    def moves(self, unit):
        lost = unit.spec.name == "lm_head" and unit.leaf == LEAVES - 2
        return iter(()) if lost else original(self, unit)

    reshard.Reshard._moves = moves
    try:
        return moved_weights(groups, move)
    finally:
        reshard.Reshard._moves = original
