"""Pipeline schedules finish, keep the order that serial sums need, and bound the activations in flight."""

from __future__ import annotations

from collections import Counter

import pytest

from unirl_scale.parallel.schedule import Message, Step, forward_only, incoming, needed, one_f_one_b, sent

SHAPES = [(pp, vpp) for pp in range(1, 7) for vpp in range(1, 5) if pp > 1 or vpp == 1]
MICROS = range(14)


def stuck(schedule: list[list[Step]], chunks: int) -> list[Step]:
    """Run the ranks, each waiting for its messages; the steps that never become possible."""
    arrived: set[Message] = set()
    left = [list(steps) for steps in schedule]
    moved = True
    while moved:
        moved = False
        for steps in left:
            while steps and needed(steps[0], chunks) in arrived | {None}:
                arrived |= {sent(steps.pop(0), chunks)} - {None}
                moved = True
    return [step for steps in left for step in steps]


def order(steps: list[Step], kind: str, chunk: int) -> list[int]:
    return [s.micro for s in steps if (s.kind, s.chunk) == (kind, chunk)]


@pytest.mark.parametrize(("pp", "vpp"), SHAPES)
def test_every_schedule_finishes_with_each_step_once(pp: int, vpp: int) -> None:
    for micros in MICROS:
        for schedule, kinds in (
            (one_f_one_b(pp, vpp, micros), ("forward", "backward")),
            (forward_only(pp, vpp, micros), ("forward",)),
        ):
            wanted = {Step(k, c, m) for k in kinds for c in range(pp * vpp) for m in range(micros)}
            steps = Counter(s for rank in schedule for s in rank)
            assert set(steps) == wanted and set(steps.values()) <= {1}
            assert all(s.chunk % pp == rank for rank, own in enumerate(schedule) for s in own)
            assert stuck(schedule, pp * vpp) == []


@pytest.mark.parametrize(("pp", "vpp"), SHAPES)
def test_each_chunk_visits_its_micro_batches_in_order(pp: int, vpp: int) -> None:
    """Backward order is that of the serial sum inside a data slot: it must not depend on the pipeline."""
    for micros in MICROS:
        for rank, steps in enumerate(one_f_one_b(pp, vpp, micros)):
            for chunk in range(rank, pp * vpp, pp):
                assert order(steps, "forward", chunk) == list(range(micros))
                assert order(steps, "backward", chunk) == list(range(micros))


@pytest.mark.parametrize(("pp", "vpp"), SHAPES)
def test_activations_in_flight_do_not_grow_with_the_micro_batches(pp: int, vpp: int) -> None:
    for micros in (*MICROS, 37, 64):
        for rank, steps in enumerate(one_f_one_b(pp, vpp, micros)):
            alive = peak = 0
            for step in steps:
                alive += 1 if step.kind == "forward" else -1
                peak = max(peak, alive)
            bound = pp - rank if vpp == 1 else 2 * (pp - rank - 1) + (vpp - 1) * pp + 1
            assert peak == min(bound, micros) if vpp == 1 else peak <= min(bound, micros * vpp)


@pytest.mark.parametrize(("pp", "vpp"), SHAPES)
def test_what_is_sent_is_what_is_needed(pp: int, vpp: int) -> None:
    chunks, schedule = pp * vpp, one_f_one_b(pp, vpp, 5)
    steps = [s for rank in schedule for s in rank]
    messages = Counter(sent(s, chunks) for s in steps if sent(s, chunks))
    assert messages == Counter(needed(s, chunks) for s in steps if needed(s, chunks))
    by_pair = [m for a in range(pp) for b in range(pp) for m in incoming(schedule, a, b, chunks)]
    assert Counter(by_pair) == messages


def test_one_f_one_b_of_two_ranks_as_drawn_in_the_paper() -> None:
    def row(steps: list[Step]) -> str:
        return " ".join(f"{s.kind[0]}{s.micro}" for s in steps)

    assert [row(steps) for steps in one_f_one_b(2, 1, 4)] == [
        "f0 f1 b0 f2 b1 f3 b2 b3",
        "f0 b0 f1 b1 f2 b2 f3 b3",
    ]


def test_a_schedule_that_waits_for_itself_is_seen() -> None:
    """Negative control: the last rank wants a backward before it has run the forward that causes it."""
    schedule = one_f_one_b(2, 1, 2)
    schedule[1][0], schedule[1][2] = schedule[1][2], schedule[1][0]
    schedule[0][1], schedule[0][2] = schedule[0][2], schedule[0][1]
    assert stuck(schedule, 2) != []
