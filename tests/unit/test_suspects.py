"""The copy that differs and the rank that is slow are the ones named, and no others."""

from __future__ import annotations

import pytest

from unirl_scale.core.suspects import Disagreement, Straggler, Stragglers, odd_copies, step_balance

NODES = ("a", "a", "b", "b", "c")


@pytest.mark.parametrize(
    ("held", "expected"),
    [
        ([{"w": "a"}, {"w": "a"}, {"w": "a"}], []),
        ([{"w": "a"}, {"w": "b"}, {"w": "a"}], [("w", (1,), (0, 2))]),
        ([{"w": "b"}, {"w": "a"}, {"w": "a"}, {"w": "c"}], [("w", (), (0, 1, 2, 3))]),  # two of four
        ([{"w": "b"}, {"w": "a"}, {"w": "a"}, {"w": "a"}, {"w": "c"}], [("w", (0, 4), (1, 2, 3))]),
        ([{"w": "a"}, {"w": "b"}], [("w", (), (0, 1))]),
        ([{"w0": "a"}, {"w1": "b"}], []),  # shards of their own
        ([{"w0": "a", "n": "x"}, {"w1": "b", "n": "x"}, {"w1": "b", "n": "y"}], [("n", (2,), (0, 1))]),
        ([{}, {"w": "a"}, {}], []),
    ],
)
def test_the_copies_that_differ_are_named(
    held: list[dict[str, str]], expected: list[tuple[str, tuple[int, ...], tuple[int, ...]]]
) -> None:
    assert odd_copies(held) == [Disagreement(name=n, odd=o, others=r) for n, o, r in expected]


def test_a_disagreement_reads_with_ranks_and_nodes() -> None:
    clear = Disagreement(name="actor weights", odd=(2,), others=(0, 1))
    assert clear.text(NODES) == "rank 2 (b): actor weights differ from those of ranks 0, 1"
    tie = Disagreement(name="actor weights", odd=(), others=(1, 4))
    assert tie.text(NODES) == (
        "ranks 1 (a), 4 (c): actor weights differ, and no majority tells which are right"
    )


def test_a_rank_is_reported_once_when_it_is_slow_for_long() -> None:
    watch = Stragglers(1.5, ("x",) * 4, steps=3)
    slow = {"rollout": [0.5, 0.5, 0.5, 0.5], "update": [0.5, 0.5, 1.5, 0.6]}
    even = {"rollout": [0.5, 0.5, 0.5, 0.5], "update": [0.5, 0.5, 0.5, 0.6]}
    report = Straggler(rank=2, ratio=2.0 / 1.05, phase="update", steps=3)
    assert [watch.note(slow) for _ in range(4)] == [[], [], [report], []]
    assert watch.note(even) == []
    assert [watch.note(slow) for _ in range(3)][-1] == [report]
    assert report.text(NODES) == (
        "rank 2 (b) computes 1.9 times as long as the median of its peers, 3 steps in a row, "
        "most of it in update"
    )


def test_single_slow_steps_and_a_ratio_of_zero_report_nobody() -> None:
    watch = Stragglers(1.5, ("x",) * 3, steps=2)
    rows = ([1.0, 9.0, 1.0], [9.0, 1.0, 1.0], [1.0, 9.0, 1.0])
    assert [watch.note({"update": t}) for t in rows] == [[], [], []]
    never = Stragglers(0.0, ("x",) * 3, steps=1)
    assert never.note({"update": [1.0, 99.0, 1.0]}) == []


def test_a_rank_with_other_work_is_no_straggler() -> None:
    times = {"update": [1.0, 1.0, 1.0, 9.0]}
    assert Stragglers(1.5, ("first", "first", "first", "last"), steps=1).note(times) == []
    assert [s.rank for s in Stragglers(1.5, ("first",) * 4, steps=1).note(times)] == [3]


def test_the_balance_of_a_step() -> None:
    assert step_balance({}) == {}
    assert step_balance({"rollout": [1.0, 1.0, 4.0], "update": [0.0, 0.0, 1.0]}) == {
        "ranks/median_s": 1.0,
        "ranks/slowest_s": 5.0,
        "ranks/slowest": 2.0,
        "ranks/rollout_slowest_ratio": 4.0,
    }
