"""The all-gather schedule: optimal on healthy and degraded boxes, and caught when it is broken."""

from __future__ import annotations

from dataclasses import replace

import pytest

from unirl_scale.comm.plan_allgather import BoxWires, build, measure
from unirl_scale.core.errors import PlanError

HEALTHY = [
    (BoxWires.switched(8, 450, 50), (1, 2, 4, 8)),
    (BoxWires.switched(8, 300, 25), (1, 2, 4)),
    (BoxWires.mesh(8, 28, 25), (1, 2, 4)),
    (BoxWires.switched(4, 900, 100), (1, 3, 5)),
]
DEGRADED = [
    (BoxWires.mesh(8, 28, 25, down=[(0, 1)]), (1, 2, 4)),
    (BoxWires.mesh(8, 28, 25, down=[(0, 1), (2, 3)]), (1, 2)),
    (BoxWires.switched(8, 450, 50, off=[3]), (1, 2)),
    (BoxWires.mesh(6, 30, 20, down=[(0, 5)]), (1, 3)),
]


@pytest.mark.parametrize(("box", "counts"), HEALTHY)
def test_healthy_machines_reach_the_bound(box: BoxWires, counts: tuple[int, ...]) -> None:
    for boxes in counts:
        assert measure(build(box, boxes), box, boxes).ratio >= 0.98


@pytest.mark.parametrize(("box", "counts"), DEGRADED)
def test_degraded_machines_reach_the_bound(box: BoxWires, counts: tuple[int, ...]) -> None:
    for boxes in counts:
        assert measure(build(box, boxes), box, boxes).ratio >= 0.95


def test_no_schedule_beats_the_bound() -> None:
    for box, counts in (*HEALTHY, *DEGRADED):
        assert measure(build(box, counts[-1]), box, counts[-1]).ratio <= 1 + 1e-9


def test_a_missing_piece_is_caught() -> None:
    box = BoxWires.switched(4, 100, 10)
    with pytest.raises(PlanError, match="must be all of it, once"):
        measure(build(box, 2)[1:], box, 2)


def test_a_piece_sent_twice_is_caught() -> None:
    box = BoxWires.switched(4, 100, 10)
    pieces = build(box, 2)
    with pytest.raises(PlanError, match="must be all of it, once"):
        measure([*pieces, pieces[3]], box, 2)


def test_a_loop_is_caught() -> None:
    box = BoxWires.mesh(4, 10)
    first, *rest = build(box)
    parent = list(first.parent)
    parent[1], parent[2] = 2, 1
    with pytest.raises(PlanError, match="round in a circle"):
        measure([replace(first, parent=tuple(parent)), *rest], box)


def test_a_dead_wire_is_caught() -> None:
    down = BoxWires.mesh(4, 10, down=[(0, 1)])
    with pytest.raises(PlanError, match="does not exist"):
        measure(build(BoxWires.mesh(4, 10)), down)
