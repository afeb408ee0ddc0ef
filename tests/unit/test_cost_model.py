"""Cost formulas against hand-worked figures and against the schedule that really runs."""

from __future__ import annotations

import pytest

from unirl_scale.comm.cost import (
    VENDOR_ALGORITHMS,
    Collective,
    Tier,
    best_one_tier,
    direct_all_to_all,
    hierarchical,
    one_tier,
    ring,
)
from unirl_scale.comm.cost_bounds import BoxRates, all_gather_bound_gb_per_s, bound_us
from unirl_scale.comm.cost_ordered import (
    Memory,
    choose,
    gather_tree,
    ordered_all_reduce,
    ordered_reduce_scatter,
)
from unirl_scale.comm.schedule import ReductionSchedule
from unirl_scale.core.errors import PlanError

NODE = Tier(name="node", size=8, alpha_us=3.0, beta_gb_per_s=400.0)
NET = Tier(name="net", size=16, alpha_us=10.0, beta_gb_per_s=50.0)
DARK = Tier(name="net", size=16)


@pytest.mark.parametrize(
    ("collective", "algorithm", "time"),
    [
        ("all_reduce", "ring", 14 * 3.0 + 2 * 7 / 8 * 1e9 / 400e3),
        ("all_reduce", "tree", 6 * 3.0 + 2 * 1e9 / 400e3),
        ("all_reduce", "halving_doubling", 6 * 3.0 + 2 * 7 / 8 * 1e9 / 400e3),
        ("reduce_scatter", "nhr", 3 * 3.0 + 7 / 8 * 1e9 / 400e3),
        ("all_to_all", "pairwise", 7 * 3.0 + 7 / 8 * 1e9 / 400e3),
        ("p2p", "direct", 3.0 + 1e9 / 400e3),
    ],
)
def test_one_tier_formulas(collective: Collective, algorithm: str, time: float) -> None:
    cost = one_tier(collective, algorithm, 1e9, NODE)
    assert cost is not None
    assert cost.time_us == pytest.approx(time)


def test_halving_doubling_folds_ranks_beyond_a_power_of_two() -> None:
    six = Tier(name="node", size=6, alpha_us=1.0, beta_gb_per_s=1.0)
    cost = one_tier("all_reduce", "halving_doubling", 1e6, six)
    assert cost is not None
    assert cost.steps == (2 * 2 + 2,)
    assert cost.sent_bytes[0] == pytest.approx((2 * 3 / 4 + 2) * 1e6)
    assert one_tier("reduce_scatter", "halving_doubling", 1e6, six) is None


def test_mesh_reaches_all_peers_in_one_step_and_needs_a_mesh() -> None:
    mesh = Tier(name="node", size=8, alpha_us=20.0, beta_gb_per_s=196.0, mesh=True)
    cost = one_tier("all_gather", "mesh", 8e6, mesh)
    assert cost is not None
    assert cost.time_us == pytest.approx(20.0 + 7e6 / 196e3)
    assert one_tier("all_gather", "mesh", 8e6, NODE) is None


def test_half_size_and_floor_change_the_latency_term_only() -> None:
    slow = Tier(name="n", size=8, alpha_us=3.0, beta_gb_per_s=400.0, s0_bytes=4e5)
    assert slow.time_us(7, 0.0) == pytest.approx(7 * (3.0 + 1.0))
    floored = Tier(name="n", size=8, alpha_us=3.0, beta_gb_per_s=400.0, floor_us=100.0)
    assert floored.time_us(7, 4e5) == pytest.approx(101.0)


def test_a_ring_over_nodes_shares_the_networks_of_a_node() -> None:
    cost = ring("all_gather", 1.28e9, (NODE, NET))
    assert cost.sent_bytes[1] == pytest.approx(127 / 128 * 1.28e9 / 8)


def test_unknown_figures_give_bytes_but_no_time() -> None:
    cost = hierarchical("all_reduce", 1e9, (NODE, DARK))
    assert cost.time_us is None
    assert cost.sent_bytes[1] == pytest.approx(2 * 15 / 16 * 1e9 / 8)
    assert bound_us("all_reduce", 1e9, (NODE, DARK)) is None


@pytest.mark.parametrize("blocks", [(), (8,), (4,), (2, 8)])
def test_ordered_bytes_are_those_of_the_executed_schedule(blocks: tuple[int, ...]) -> None:
    tiers = [Tier(name="a", size=2), Tier(name="b", size=2), Tier(name="c", size=2), Tier(name="d", size=4)]
    n, elements = 32, 32 * 96
    ranges = [range(2 * i, 2 * i + 2) for i in range(n)]
    schedule = ReductionSchedule.of(ranges, 11, blocks)
    cost = ordered_reduce_scatter(elements * 4, tiers, blocks)
    assert sum(cost.sent_bytes) == schedule.sent_elements([elements // n] * n) * 4


def test_blocks_must_end_at_a_tier() -> None:
    with pytest.raises(PlanError, match=r"level from 3 to 128 members.*must nest"):
        ordered_reduce_scatter(1e6, (NODE, NET), (3,))


def test_two_level_sends_an_eighth_of_the_flat_bytes_over_the_network() -> None:
    flat = ordered_reduce_scatter(1e9, (NODE, NET))
    two = ordered_reduce_scatter(1e9, (NODE, NET), (8,))
    assert flat.sent_bytes[1] == pytest.approx(1e9 * 120 / 128)
    assert two.sent_bytes[1] == pytest.approx(1e9 / 8 * 15 / 16)
    assert direct_all_to_all(1e9, (NODE, NET)).sent_bytes == flat.sent_bytes


def test_two_level_costs_at_most_a_tenth_more_than_the_vendors_hierarchy() -> None:
    tiers = (
        Tier(name="node", size=8, alpha_us=3.4, beta_gb_per_s=360.0),
        Tier(name="net", size=64, alpha_us=14.0, beta_gb_per_s=50.0),
    )
    vendor = hierarchical("all_reduce", 2.0**30, tiers, frozenset({"ring"}))
    ours = ordered_all_reduce(2.0**30, tiers, (8,), Memory(gb_per_s=2700.0), allowed=frozenset({"ring"}))
    assert vendor.time_us == pytest.approx(12_330, rel=0.01)
    assert ours.time_us is not None
    assert ours.time_us <= 1.10 * (vendor.time_us or 0.0)


def test_choice_is_hierarchical_when_large_and_gathered_when_small() -> None:
    nccl = VENDOR_ALGORITHMS["nccl"]
    large = choose("all_reduce", 1e9, (NODE, NET), ordered=True, allowed=nccl)
    small = choose("all_reduce", 1e3, (NODE,), ordered=True, allowed=nccl)
    assert (large.cost.algorithm, large.blocks) == ("ordered_2_level", (8,))
    assert small.cost.algorithm == "gather_tree"
    assert all((c.time_us or 0) >= (large.cost.time_us or 0) for c in large.others)


def test_choice_without_figures_falls_on_the_least_network_bytes() -> None:
    tiers = (Tier(name="node", size=8), DARK)
    assert choose("reduce_scatter", 1e9, tiers, ordered=True).blocks == (8,)


def test_an_ordered_choice_never_uses_a_vendor_reduction() -> None:
    for size in (1e2, 1e5, 1e9):
        name = choose("all_reduce", size, (NODE, NET), ordered=True).cost.algorithm
        assert name.startswith(("ordered_", "gather_tree"))


def test_a_vendor_without_the_algorithm_is_refused() -> None:
    with pytest.raises(PlanError, match=r"got tree for all_to_all"):
        best_one_tier("all_to_all", 1e6, NODE, frozenset({"tree"}))


@pytest.mark.parametrize(
    ("box", "bounds"),
    [
        (BoxRates.uniform(8, 450, 50), {1: 514.3, 2: 533.3, 4: 516.1, 8: 457.1, 16: 426.7}),
        (BoxRates.uniform(8, 300, 25), {1: 342.9, 2: 346.7, 4: 266.7}),
        (BoxRates.uniform(8, 196, 25), {1: 224.0, 2: 235.7, 4: 228.1, 8: 224.5}),
        (BoxRates(inner=(168, 168, *(196,) * 6), outer=(25,) * 8), {1: 192.0, 2: 205.9}),
        (BoxRates(inner=(0, *(450,) * 7), outer=(50,) * 8), {1: 57.1}),
    ],
)
def test_bounds_are_those_of_a_throughput_optimal_solver(box: BoxRates, bounds: dict[int, float]) -> None:
    for boxes, want in bounds.items():
        assert all_gather_bound_gb_per_s(box, boxes) == pytest.approx(want, abs=0.05)


def test_no_prediction_beats_its_bound() -> None:
    for collective in ("all_reduce", "reduce_scatter", "all_gather"):
        for size in (1e6, 1e9):
            bound = bound_us(collective, size, (NODE, NET))
            assert bound is not None
            for cost in (hierarchical(collective, size, (NODE, NET)), ring(collective, size, (NODE, NET))):
                assert (cost.time_us or 0) >= bound
    gathered = gather_tree(1e6, (NODE, NET))
    assert (gathered.time_us or 0) >= (bound_us("all_reduce", 1e6, (NODE, NET)) or 0)


def test_a_device_or_box_without_a_way_in_has_no_bound() -> None:
    with pytest.raises(PlanError, match="device 2 without a link"):
        all_gather_bound_gb_per_s(BoxRates(inner=(1, 1, 0), outer=(0, 0, 0)))
    with pytest.raises(PlanError, match="2 boxes without a network"):
        all_gather_bound_gb_per_s(BoxRates.uniform(4, 10), 2)
