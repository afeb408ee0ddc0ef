"""verify accepts sound plans and catches each way to break one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.unit.planning import run_config
from unirl_scale.comm.plan import ACCELERATORS, Assumptions, CallPlan, Plan
from unirl_scale.comm.plan_build import make_plan
from unirl_scale.comm.plan_pipeline import cut_pipeline, slowest_chunk_us
from unirl_scale.comm.plan_verify import verify
from unirl_scale.comm.topology import MACHINES, cluster
from unirl_scale.core.config import MeshConfig
from unirl_scale.core.errors import PlanError

TOPOLOGY = cluster(MACHINES["h100-8"], 16, tiers=(4,))
TOLD = Assumptions(accelerator=ACCELERATORS["h100"])


def sound(**mesh: Any) -> Plan:
    """A plan of 128 ranks or fewer."""
    return make_plan(run_config(MeshConfig(**mesh)), TOPOLOGY, TOLD)


@pytest.mark.parametrize(
    "mesh",
    [
        {"tp": 8, "dp": 16},
        {"tp": 2, "dp": 64},
        {"tp": 4, "dp": 8, "pp": 4},
        {"tp": 1, "dp": 48},
        {"tp": 8, "dp": 5},
        {"tp": 2, "dp": 12, "pp": 2, "vpp": 2, "sequence_parallel": True},
    ],
)
def test_sound_plans_pass(mesh: dict[str, Any]) -> None:
    shown = verify(sound(**mesh), TOPOLOGY)
    assert any("count each leaf exactly once" in sentence for sentence in shown)


def with_call(plan: Plan, name: str, change: Callable[[CallPlan], CallPlan]) -> Plan:
    """The plan with one call of the actor changed."""
    actor = plan.roles[0]
    calls = tuple(change(c) if c.call.name == name else c for c in actor.calls)
    return replace(plan, roles=(replace(actor, calls=calls), *plan.roles[1:]))


def test_two_ranks_on_one_device() -> None:
    plan = sound(tp=8, dp=16)
    device = plan.device.copy()
    device[9] = device[8]
    with pytest.raises(PlanError, match=r"placement: got n01/0 for two ranks, one is 9"):
        verify(replace(plan, device=device))


def test_a_block_over_two_nodes() -> None:
    plan = sound(tp=8, dp=16)
    node = plan.node.copy()
    node[[0, 8]] = node[[8, 0]]
    device = plan.device.copy()
    device[[0, 8]] = device[[8, 0]]
    with pytest.raises(PlanError, match=r"tp\.shape: got a block of 8 over several places"):
        verify(replace(plan, node=node, device=device))


def test_blocks_that_skip_members() -> None:
    plan = with_call(sound(tp=2, dp=64), "gradients", lambda c: replace(c, blocks=(3,)))
    with pytest.raises(PlanError, match=r"blocks \[3\] in a group of 64"):
        verify(plan)


def test_more_members_than_leaves() -> None:
    with pytest.raises(PlanError, match=r"64 members for 32 leaves"):
        verify(replace(sound(tp=2, dp=64), data_slots=32))


def test_a_prediction_faster_than_the_link() -> None:
    plan = sound(tp=8, dp=16)
    quick = with_call(plan, "gradients", lambda c: replace(c, time_us=1.0, bound_us=None))
    with pytest.raises(PlanError, match=r"bytes in 1\.0 us over leaf; must be at most 50 GB/s"):
        verify(quick)
    beaten = with_call(plan, "gradients", lambda c: replace(c, time_us=(c.bound_us or 0) * 0.9))
    with pytest.raises(PlanError, match="below the bound"):
        verify(beaten)


def test_groups_of_another_mesh() -> None:
    plan = sound(tp=8, dp=16)
    actor = plan.roles[0]
    wrong = replace(actor, groups=tuple(replace(g, count=g.count + 1) for g in actor.groups))
    with pytest.raises(PlanError, match="17 groups of 8"):
        verify(replace(plan, roles=(wrong, *plan.roles[1:])))


def test_a_node_or_device_that_is_not_there() -> None:
    plan = sound(tp=8, dp=16)
    with pytest.raises(PlanError, match="got node elsewhere"):
        verify(replace(plan, nodes=("elsewhere", *plan.nodes[1:])), TOPOLOGY)
    device = plan.device.copy()
    device[3] = 11
    with pytest.raises(PlanError, match="got device 11"):
        verify(replace(plan, device=device), TOPOLOGY)


def brute_force(times: list[float], chunks: int, first: float, last: float) -> float:
    """Best possible slowest chunk, by trying every cut."""
    if chunks == 1:
        return slowest_chunk_us((len(times),), times, first_us=first, last_us=last)
    best = float("inf")
    for k in range(1, len(times) - chunks + 2):
        rest = brute_force(times[k:], chunks - 1, 0.0, last)
        best = min(best, max(first + sum(times[:k]), rest))
    return best


def test_pipeline_cut_is_optimal() -> None:
    rng = np.random.default_rng(3)
    for _ in range(60):
        n = int(rng.integers(2, 9))
        times = rng.integers(1, 9, n).astype(float).tolist()
        chunks = int(rng.integers(1, n + 1))
        first, last = float(rng.integers(0, 5)), float(rng.integers(0, 5))
        counts = cut_pipeline(times, chunks, first_us=first, last_us=last)
        assert sum(counts) == n
        assert min(counts) >= 1
        slowest = slowest_chunk_us(counts, times, first_us=first, last_us=last)
        assert slowest == brute_force(times, chunks, first, last)


def test_equal_layers_are_cut_evenly_and_a_heavy_head_gets_fewer() -> None:
    assert cut_pipeline([1.0] * 32, 4) == (8, 8, 8, 8)
    assert cut_pipeline([1.0] * 8, 4, last_us=1.0) == (2, 2, 2, 2)
    assert cut_pipeline([1.0] * 32, 4, last_us=4.0) == (9, 9, 9, 5)


def test_more_chunks_than_layers_is_refused() -> None:
    with pytest.raises(PlanError, match="got 5 chunks for 4 layers"):
        cut_pipeline([1.0] * 4, 5)
