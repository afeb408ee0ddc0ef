"""Transfers run behind the computation: in which order they start and are waited for, and what a failure
leaves behind. That overlap changes no bit is in test_layout_invariance.py.

Orders are of recorded events, never of time. Not covered here: NCCL's streams (docs/performance.md).
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.dist.engine_ranks import MHA, Case, run_case
from tests.dist.overlap_ranks import fail_between_buckets, recorded_step
from tests.dist.run_ranks import RankPool
from unirl_scale.core.config import MeshConfig

LAYERS = 4
CASE = Case(model=MHA, leaves=2, slots=4, mesh=MeshConfig(dp=2, bucket_elements=1))
BUCKETS = LAYERS + 2  # the embedding, the layers, the head


def reductions(events: list[str]) -> list[str]:
    """Layers of the last backward, and bucket starts and ends."""
    last = len(events) - 1 - events[::-1].index("backward head")
    kinds = ("backward", "start reduce", "end reduce")
    return [event for event in events[last:] if event.startswith(kinds)]


def test_a_bucket_starts_as_soon_as_the_last_backward_has_left_its_layers(run_ranks: RankPool) -> None:
    for parts in run_ranks(recorded_step, 2, CASE):
        events = parts["accumulate"]
        assert not any(event.startswith("start reduce") for event in events[: -len(reductions(events))])
        assert reductions(events) == [
            *("backward head", "start reduce 0"),
            *("backward 3", "start reduce 1"),
            *("backward 2", "end reduce 0", "start reduce 2"),  # two in flight
            *("backward 1", "end reduce 1", "start reduce 3"),
            *("backward 0", "end reduce 2", "start reduce 4"),
            *("backward embedding", "end reduce 3", "start reduce 5"),
        ]
        # The norms' gradients are small and gathered instead.
        assert parts["reduce"][:2] == ["end reduce 4", "end reduce 5"]
        assert not any(event.startswith("start reduce") for event in parts["reduce"])


def test_a_merged_bucket_waits_for_its_lowest_layer(run_ranks: RankPool) -> None:
    merged = replace(CASE, mesh=MeshConfig(dp=2, bucket_elements=15000))
    for parts in run_ranks(recorded_step, 2, merged):
        assert reductions(parts["accumulate"]) == [
            *("backward head", "backward 3", "backward 2", "start reduce 0"),
            *("backward 1", "backward 0", "backward embedding", "start reduce 1"),
        ]


@pytest.mark.parametrize("overlap", [True, False])
def test_ranks_without_samples_or_overlap_start_the_same_buckets_after_the_backward(
    run_ranks: RankPool, overlap: bool
) -> None:
    """Three samples in the first of eight slots: rank 0's last slot is empty, rank 1 has nothing to run."""
    case = replace(CASE, samples=3, slots=8, mesh=replace(CASE.mesh, overlap=overlap))
    for parts in run_ranks(recorded_step, 2, case):
        events = parts["accumulate"]
        started = [event for event in events if event.startswith("start reduce")]
        assert started == [f"start reduce {i}" for i in range(BUCKETS)]
        first = events.index(started[0])
        assert not any(event.startswith("backward") for event in events[first:])


def test_without_overlap_nothing_is_left_on_the_wire(run_ranks: RankPool) -> None:
    case = replace(CASE, mesh=replace(CASE.mesh, overlap=False))
    for parts in run_ranks(recorded_step, 2, case):
        events = parts["accumulate"]
        assert reductions(events)[: LAYERS + 2] == [
            *("backward head", "backward 3", "backward 2", "backward 1", "backward 0", "backward embedding"),
        ]
        assert [event for event in parts["step"] if event.startswith("end gather")] == [
            f"end gather {i}" for i in range(BUCKETS)
        ]
        assert not any("gather" in event for event in parts["score"])


def test_weights_are_waited_for_just_before_the_layer_that_needs_them(run_ranks: RankPool) -> None:
    for parts in run_ranks(recorded_step, 2, CASE):
        assert parts["step"] == [f"start gather {i}" for i in range(BUCKETS)]
        assert parts["score"][: 2 * BUCKETS] == [
            *("end gather 0", "forward embedding"),
            *("end gather 1", "forward 0", "end gather 2", "forward 1"),
            *("end gather 3", "forward 2", "end gather 4", "forward 3"),
            *("end gather 5", "forward head"),
        ]


def test_pipeline_receives_are_posted_before_they_are_wanted(run_ranks: RankPool) -> None:
    case = replace(CASE, mesh=MeshConfig(pp=2, micro_batch_size=4))
    _, last = run_ranks(recorded_step, 2, case)
    events = [e for e in last["accumulate"] if e.endswith("forward 2") or "receive" in e]
    assert events[:6] == [
        *("start receive 0", "start receive 1", "end receive 0", "start receive 2"),
        "forward 2",
        "end receive 1",
    ]


def test_a_failure_between_buckets_ends_the_world_and_the_next_one_trains_the_same_bits(
    run_ranks: RankPool,
) -> None:
    case = replace(CASE, slots=6, mesh=MeshConfig(dp=3, bucket_elements=1))
    survivors = replace(case, mesh=replace(case.mesh, dp=2))
    expected = run_ranks(run_case, 1, replace(case, mesh=MeshConfig()))[0]
    first, second, failed = run_ranks(
        fail_between_buckets, 3, case, survivors, connected=False, timeout_s=120.0
    )
    assert failed == (f"BetweenBucketsError after {BUCKETS + 3} starts", [])  # head, 3 and 2 were on the wire
    for error, digests in (first, second):
        assert error.startswith("CommError after")
        assert digests == expected
