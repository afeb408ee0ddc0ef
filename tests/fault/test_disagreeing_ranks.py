"""Clocks that are a day off and ranks that see an older state of the disk: steps and incarnations decide, and
all ranks take the same save, to the byte of its manifest."""

from __future__ import annotations

import hashlib
import os
import time
from pathlib import Path

import pytest

from tests.checkpoint_state import head, whole_state, write_shards
from tests.dist.checkpoint_ranks import Digests, Plan, run_plan
from tests.dist.run_ranks import RankPool
from unirl_scale.comm.groups import GroupFactory
from unirl_scale.core.config import MeshConfig
from unirl_scale.core.digest_compare import compare_digests
from unirl_scale.train.checkpoint.manifest import Manifest, manifest_bytes
from unirl_scale.train.checkpoint.names import SaveName
from unirl_scale.train.checkpoint.sources import newest_on_disk, shared_disk_source
from unirl_scale.train.checkpoint.store import Store

DAY_S = 86400.0
STEPS = 5
ONE = {"actor": MeshConfig(), "critic": MeshConfig(), "reference": MeshConfig()}
TWO = {"actor": MeshConfig(pp=2), "critic": MeshConfig(tp=2), "reference": MeshConfig(dp=2)}
THREE = {"actor": MeshConfig(dp=3), "critic": MeshConfig(tp=3), "reference": MeshConfig(tp=3)}
SAVES = {"every": 1, "keep": 3, "background": False}
SNAPSHOTS = {"snapshot_every": 1, "keep": 0}


@pytest.fixture(scope="module")
def straight(run_ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Digests:
    """Of one rank that nothing disturbed."""
    plan = Plan(path=str(tmp_path_factory.mktemp("straight")), stop=STEPS, options={"keep": 0}, **ONE)
    return run_ranks(run_plan, 1, plan, timeout_s=120.0)[0].digests


def shift_clocks(folder: Path, newest: str) -> None:
    """What belongs to the newest step is a day old, the rest from tomorrow."""
    for path in folder.rglob("*"):
        when = time.time() + (-DAY_S if newest in str(path) else DAY_S)
        os.utime(path, (when, when))


@pytest.mark.parametrize("options", [SAVES, SNAPSHOTS], ids=["disk", "memory"])
def test_clocks_a_day_off_and_an_old_latest_change_nothing(run_ranks, tmp_path, straight, options) -> None:
    first = Plan(path=str(tmp_path), stop=3, options=options, end="abandon", **TWO)
    run_ranks(run_plan, 2, first, timeout_s=120.0)
    shift_clocks(tmp_path, "step-0000000003")
    if options is SAVES:
        (tmp_path / "checkpoints" / "latest").write_text("step-0000000001.0001\n")
    second = Plan(path=str(tmp_path), stop=STEPS, options=options, end="abandon", **THREE)
    for outcome in run_ranks(run_plan, 3, second, timeout_s=120.0):
        assert min(outcome.digests) == 4
        result = compare_digests({step: straight[step] for step in outcome.digests}, outcome.digests)
        assert result.equal, result.first_difference


def save(store: Store, step: int) -> None:
    name = SaveName(step, 1)
    files = write_shards(store.folder(name), whole_state(step), MeshConfig(tp=2))
    store.publish(name, Manifest(head=head(2, step, 1), parts=files.parts))
    store.point_latest(name)


def choose(groups: GroupFactory, paths: list[str]) -> tuple[int, int, str]:
    """(newest step that this rank sees by itself, the step that it loads, hash of that manifest)."""
    found, _ = newest_on_disk(Store(Path(paths[groups.rank])))
    source = shared_disk_source(groups.world, found)
    assert found is not None and source is not None
    digest = hashlib.sha256(manifest_bytes(source.manifest)).hexdigest()
    return found.when[0], source.when[0], digest


@pytest.mark.parametrize("behind", [0, 1, 2])
def test_ranks_that_see_different_newest_saves_load_the_same_one(run_ranks, tmp_path, behind) -> None:
    """One rank's view of the directory is older, as over a network file system with a cache."""
    now, old = Store(tmp_path / "now"), Store(tmp_path / "old")
    for store, steps in ((now, (1, 2)), (old, (1,))):
        for step in steps:
            save(store, step)
    paths = [str((old if rank == behind else now).path) for rank in range(3)]
    chosen = run_ranks(choose, 3, paths)
    assert [seen for seen, _, _ in chosen] == [1 if rank == behind else 2 for rank in range(3)]
    assert {step for _, step, _ in chosen} == {1 if behind == 0 else 2}
    assert len({digest for _, _, digest in chosen}) == 1
