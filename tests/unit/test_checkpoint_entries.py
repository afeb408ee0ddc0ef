"""Who writes what: on every layout each element has one writer, and no rank needs what nobody writes."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest

from tests.checkpoint_state import LEAVES, MODEL, head, rank_state, shard_bytes, whole_state
from unirl_scale.core.config import MeshConfig
from unirl_scale.core.errors import CheckpointError
from unirl_scale.core.mesh import Mesh
from unirl_scale.train.checkpoint.entries import chunk_spans, whole_spans
from unirl_scale.train.checkpoint.manifest import Manifest, merged, require_whole

LAYOUTS = [
    MeshConfig(),
    MeshConfig(dp=3),
    MeshConfig(dp=3, bucket_elements=1),
    MeshConfig(dp=7),
    MeshConfig(tp=6),
    MeshConfig(tp=2, pp=2),
    MeshConfig(tp=3, dp=2, pp=5),
    MeshConfig(pp=2, vpp=2, dp=2, bucket_elements=1000),
    MeshConfig(pp=3, pipeline_split=(1, 3, 1), tp=2, dp=2),
]


@pytest.mark.parametrize("mesh", LAYOUTS, ids=str)
def test_every_element_has_one_writer_and_every_holder_finds_one(mesh: MeshConfig) -> None:
    written: Counter[tuple[str, int, int]] = Counter()
    held: set[tuple[str, int, int]] = set()
    where = Mesh.from_config(mesh)
    for rank in where.ranks:
        at = where.coordinates(rank)
        assert at is not None
        for chunk in chunk_spans(MODEL, "lm", mesh, LEAVES, at):
            for s in chunk.leafed:
                written.update((s.name, s.leaf, i) for i in range(s.start, s.stop))
            for s in chunk.replicated:
                elements = [(s.name, s.leaf, i) for i in range(s.start, s.stop)]
                held.update(elements)
                if chunk.writes_replicated:
                    written.update(elements)
    everything = {
        (n, leaf, i) for (n, leaf), size in whole_spans(MODEL, "lm", LEAVES).items() for i in range(size)
    }
    assert set(written) == everything
    assert set(written.values()) == {1}
    assert held <= everything


@pytest.mark.parametrize("mesh", LAYOUTS, ids=str)
def test_records_of_all_ranks_make_a_whole_save_and_of_fewer_do_not(mesh: MeshConfig) -> None:
    whole, size = whole_state(0), Mesh.from_config(mesh).size
    records = [
        Manifest(head=head(size), parts=(shard_bytes(rank_state(whole, mesh, rank), rank)[0],))
        for rank in range(size)
    ]
    require_whole(merged(records))
    if size > 1:
        missing = random.Random(size).randrange(size)
        with pytest.raises(
            CheckpointError, match=r"actor (master|exp_avg|exp_avg_sq) .* (is missing|elements)"
        ):
            require_whole(merged(r for i, r in enumerate(records) if i != missing))
    with pytest.raises(CheckpointError, match="is there twice"):
        require_whole(
            Manifest(head=records[0].head, parts=(records[0].parts[0], *(r.parts[0] for r in records)))
        )


def test_ranks_that_saved_different_things_are_told_apart() -> None:
    record = Manifest(head=head(2), parts=())
    other = replace(record, head=head(2, step=4))
    with pytest.raises(CheckpointError, match=r"ranks disagree about step 3\.1 and 4\.1"):
        merged([record, other])


def test_moments_are_part_of_a_whole_save() -> None:
    whole = whole_state(0)
    part, _ = shard_bytes(
        [s for s in rank_state(whole, MeshConfig(), 0) if s.entries[0].kind != "exp_avg"], 0
    )
    with pytest.raises(CheckpointError, match="actor exp_avg embed leaf 0 has 0 of"):
        require_whole(Manifest(head=head(1), parts=(part,)))
