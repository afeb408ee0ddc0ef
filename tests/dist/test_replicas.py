"""A bit that changed in one rank's copy of the state is found before it reaches a gradient, and named.

Not covered here: eviction by the control plane (tests/fault); moments of a rank's own shard, which have no
copy.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.dist.checkpoint_ranks import Plan
from tests.dist.run_ranks import RankPool
from unirl_scale.comm.groups import GroupFactory
from unirl_scale.core.config import MeshConfig
from unirl_scale.core.errors import CommError, CorruptionError
from unirl_scale.core.ranks import RankInfo
from unirl_scale.kernels.reference import ReferenceOps
from unirl_scale.train.checkpoint.session import open_session
from unirl_scale.train.replicas import ReplicaCheck
from unirl_scale.train.roles import Roles

TIMEOUT_S = 120.0


def flipped(
    groups: GroupFactory, plan: Plan, rank: int, where: str, on_mismatch: str
) -> tuple[str, str, tuple[int, ...], dict[int, int]]:
    """Compare after one bit was flipped on `rank` (-1: on none): error, its message and ranks, distrust."""
    cfg, info = plan.config(), RankInfo(rank=groups.rank, world_size=groups.world.size, node_rank=groups.rank)
    with torch.no_grad():
        roles = Roles(cfg, groups, ReferenceOps(), torch.device("cpu"))
        session = open_session(cfg, groups.world, info)
        roles.prepare(critic=True, reference=True)
        compare = ReplicaCheck(roles, session, on_mismatch, 0)  # type: ignore[arg-type]
        compare(4)
        engine = roles.actor.engine
        if groups.rank == rank and engine is not None:
            optimizer = engine.optimizers[0]
            chunk = optimizer.chunk
            target = {
                "weights": chunk.flat,
                "replicated": chunk.flat_replicated,
                "exp_avg": optimizer.replicated.exp_avg,
                "master": optimizer.shard.master,
            }[where]
            at = 0 if where != "weights" or optimizer.share.ranges[0].start else -1
            target.view(torch.int32)[at] ^= 1
        try:
            compare(6)
        except (CorruptionError, CommError) as error:
            ranks = error.ranks if isinstance(error, CorruptionError) else ()
            groups.world.barrier()
            return type(error).__name__, str(error), ranks, session.store.distrusted()
        return "", "", (), session.store.distrusted()


def run(
    run_ranks: RankPool, path: Path, actor: MeshConfig, rank: int, where: str, on_mismatch: str = "stop"
) -> list[tuple[str, str, tuple[int, ...], dict[int, int]]]:
    world = actor.tp * actor.pp * actor.dp
    plan = Plan(
        path=str(path),
        stop=0,
        actor=actor,
        critic=replace(actor, tp=1, pp=1, dp=world),
        reference=MeshConfig(),
        options={"keep": 1},
    )
    return run_ranks(flipped, world, plan, rank, where, on_mismatch, timeout_s=TIMEOUT_S)


@pytest.mark.parametrize("actor", [MeshConfig(dp=3), MeshConfig(tp=2, dp=2), MeshConfig(pp=2, dp=2)])
def test_equal_copies_pass(run_ranks, tmp_path, actor) -> None:
    assert {(name, tuple(d)) for name, _, _, d in run(run_ranks, tmp_path, actor, -1, "weights")} == {
        ("", ())
    }


@pytest.mark.parametrize(
    ("actor", "where", "tensor"),
    [
        (MeshConfig(dp=3), "weights", "actor weights embed of pipeline rank 0, tensor rank 0"),
        (MeshConfig(tp=2, dp=2), "replicated", "actor weights"),
        (MeshConfig(tp=2, dp=2), "exp_avg", "actor exp_avg"),
        (MeshConfig(pp=2, dp=2), "master", "actor master weights of chunk 0"),
    ],
)
def test_the_rank_its_node_and_the_tensor_are_named(run_ranks, tmp_path, actor, where, tensor) -> None:
    outcomes = run(run_ranks, tmp_path, actor, 2, where)
    for name, text, ranks, distrusted in outcomes:
        assert name == "CorruptionError"
        assert ranks == (2,)
        assert f"rank 2 (node-2): {tensor}" in text
        assert "found in step 7" in text
        assert distrusted == {1: 4}, "the comparison after step 4 found nothing"


def test_two_copies_are_named_as_a_pair(run_ranks, tmp_path) -> None:
    # The last element of what rank 1 owns is rank 0's copy to get wrong: only the two copies can tell.
    for name, text, ranks, _ in run(run_ranks, tmp_path, MeshConfig(dp=2), 0, "weights"):
        assert (name, ranks) == ("CorruptionError", ())
        assert "ranks 0 (node-0), 1 (node-1): actor weights" in text
        assert "no majority" in text


def test_with_evict_only_the_wrong_rank_leaves(run_ranks, tmp_path) -> None:
    outcomes = run(run_ranks, tmp_path, MeshConfig(dp=3), 2, "weights", "evict")
    assert [name for name, _, _, _ in outcomes] == ["CommError", "CommError", "CorruptionError"]
    assert outcomes[0][1].startswith("rank 2 (node-2) left: silent data corruption")
