"""The goodput model against published figures, a simulation and its own limits; and the command around it."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import recovery
from unirl_scale.core.errors import ConfigError
from unirl_scale.core.goodput import (
    FIRST_ORDER_ERROR,
    POOL_MISS,
    Capacity,
    Level,
    Machine,
    Phases,
    daly_interval_s,
    estimate,
    first_order,
    goodput,
    shrunk_capacity,
    spare_devices,
    whole_steps,
    young_interval_s,
)
from unirl_scale.launch.cli import main
from unirl_scale.launch.goodput import read_measured

M = 5.07 * 3600  # seconds between interruptions of 10,000 devices, see docs/recovery.md
PHASES = Phases(detect_s=4, agree_s=1, rebuild_s=15, restore_s=5, first_step_s=5)
LEVEL = Level(name="shrink", phases=PHASES, stall_s=0.05, capacity=Capacity.SHRINKS)
MACHINE = Machine(device_mtbf_h=50_680, lost_devices=8, repair_h=24, step_s=1)


@pytest.mark.parametrize(
    ("stall_s", "recovery_s", "percent"), [(120, 1800, 80.6), (1, 180, 98.0), (0.05, 30, 99.6)]
)
def test_goodput_at_dalys_optimum_has_the_known_values(
    stall_s: float, recovery_s: float, percent: float
) -> None:
    best = daly_interval_s(stall_s, M)
    assert round(100 * goodput(best, stall_s, recovery_s, M), 1) == percent
    # Control: an interval four times as long does not.
    assert round(100 * goodput(4 * best, stall_s, recovery_s, M), 1) < percent


@pytest.mark.parametrize(("mtbi_min", "optimum_min"), [(24 * 60, 117), (6 * 60, 57), (15, 9.1)])
def test_the_optimum_is_that_of_dalys_figures_3_to_5(mtbi_min: float, optimum_min: float) -> None:
    assert daly_interval_s(5 * 60, mtbi_min * 60) / 60 == pytest.approx(optimum_min, rel=0.006)


@pytest.mark.parametrize("stall_s", [0.05, 1, 120, 1800, 9000])
def test_dalys_interval_is_the_best_and_youngs_is_not(stall_s: float) -> None:
    def at(interval_s: float) -> float:
        return goodput(interval_s, stall_s, 180, M)

    daly, young = daly_interval_s(stall_s, M), young_interval_s(stall_s, M)
    best = max(at(daly * (0.5 + i / 1000)) for i in range(1001))
    assert at(young) < at(daly) <= best
    assert best - at(daly) < 1e-3 * best


def test_youngs_interval_is_two_thirds_of_a_short_stall_too_long() -> None:
    assert young_interval_s(1, M) - daly_interval_s(1, M) == pytest.approx(2 / 3, rel=1e-2)


def test_a_stall_beyond_two_interruptions_makes_the_interval_one() -> None:
    assert daly_interval_s(2 * M, M) == M
    assert daly_interval_s(1.999 * M, M) == pytest.approx(M * 8 / 9, rel=1e-3)  # the series ends there


def simulate(interval_s: float, stall_s: float, recovery_s: float, mtbi_s: float, segments: int) -> float:
    """Share of time that trains, by throwing dice; failures strike in recoveries too."""
    dice, clock_s = random.Random(7), 0.0
    for _ in range(segments):
        left_s = interval_s + stall_s
        while (failure_s := dice.expovariate(1 / mtbi_s)) < left_s:
            clock_s += failure_s
            left_s = recovery_s + interval_s + stall_s
        clock_s += left_s
    return segments * interval_s / clock_s


@pytest.mark.parametrize(("interval_s", "stall_s", "recovery_s"), [(2000, 120, 1800), (5000, 600, 9000)])
def test_a_simulation_agrees_where_first_order_does_not(
    interval_s: float, stall_s: float, recovery_s: float
) -> None:
    thrown = simulate(interval_s, stall_s, recovery_s, M, 40_000)
    assert goodput(interval_s, stall_s, recovery_s, M) == pytest.approx(thrown, abs=0.004)
    ratio = (1 - (recovery_s + interval_s / 2) / M) / (1 + stall_s / interval_s)
    assert abs(ratio - thrown) > 0.005
    assert first_order(interval_s, stall_s, recovery_s, M) is None


def test_first_order_is_close_in_its_range() -> None:
    errors: dict[bool, list[float]] = {True: [], False: []}
    for interval_s in (10, 100, 1000, 3000):
        for stall_s in (0, 1, 10, 100, 150, 1000):
            for recovery_s in (0, 100, 1000, 1800, 4000):
                ratio = (1 - (recovery_s + interval_s / 2) / M) / (1 + stall_s / interval_s)
                found = first_order(interval_s, stall_s, recovery_s, M)
                assert found in (None, ratio)
                error = abs(ratio - goodput(interval_s, stall_s, recovery_s, M))
                errors[found is not None].append(error)
    assert max(errors[True]) < FIRST_ORDER_ERROR
    assert max(errors[False]) > 0.015  # control
    limit_s = 0.1 * M - 500  # of the recovery: x = 0.1, x^2/2 = 0.005
    assert first_order(1000, 0, limit_s - 1, M) is not None
    assert first_order(1000, 0, limit_s + 1, M) is None
    assert first_order(1000, 0.01 * M, 0, M) is None  # by the stall


def test_without_failures_only_snapshots_cost() -> None:
    assert goodput(100, 5, 1e6, math.inf) == first_order(100, 5, 1e6, math.inf) == 1 / (1 + 5 / 100)
    assert goodput(100, 5, 10, 1e12) == pytest.approx(1 / (1 + 5 / 100), rel=1e-6)
    assert goodput(100, 5, 10, 1e3) < 0.9  # control


def test_a_segment_much_longer_than_the_time_between_failures_never_ends() -> None:
    assert goodput(1e6, 10, 10, 1.0) == 0.0


CHANGES: list[Callable[[Machine, Level], tuple[Machine, Level]]] = [
    lambda m, v: (replace(m, device_mtbf_h=m.device_mtbf_h / 2), v),
    lambda m, v: (m, replace(v, stall_s=10 * v.stall_s)),
    lambda m, v: (m, replace(v, phases=replace(v.phases, detect_s=60.0))),
    lambda m, v: (m, replace(v, phases=replace(v.phases, first_step_s=60.0))),
    lambda m, v: (m, replace(v, interval_s=3600.0)),
]


@pytest.mark.parametrize("capacity", list(Capacity))
@pytest.mark.parametrize("change", CHANGES)
def test_what_is_worse_gives_less(
    capacity: Capacity, change: Callable[[Machine, Level], tuple[Machine, Level]]
) -> None:
    level = replace(LEVEL, capacity=capacity)
    worse_machine, worse_level = change(MACHINE, level)
    assert estimate(10_000, worse_machine, worse_level).goodput < estimate(10_000, MACHINE, level).goodput


def test_more_ranks_are_interrupted_more_and_train_a_smaller_share() -> None:
    rows = [estimate(ranks, MACHINE, LEVEL) for ranks in (8, 1000, 4096, 16_384, 100_000)]
    assert [row.goodput for row in rows] == sorted((row.goodput for row in rows), reverse=True)
    assert rows[3].mtbi_s / 3600 == pytest.approx(54 * 24 / 419, rel=1e-3)


def test_a_shrunk_job_misses_what_is_in_repair_and_pays_its_return() -> None:
    assert shrunk_capacity(MACHINE) == 1 / (1 + 8 * 24 / 50_680)
    assert shrunk_capacity(replace(MACHINE, repair_h=0)) == 1
    assert LEVEL.recovery_s == 30 + 26
    assert replace(LEVEL, capacity=Capacity.SPARES).recovery_s == 30


def test_the_pool_of_spares_is_the_smallest_that_seldom_falls_short() -> None:
    def short(losses: int) -> float:
        mean = 10_000 * 24 / 50_680
        return 1 - sum(math.exp(-mean) * mean**k / math.factorial(k) for k in range(losses + 1))

    losses = spare_devices(10_000, MACHINE) // 8
    assert short(losses) <= POOL_MISS < short(losses - 1)
    assert spare_devices(10_000, replace(MACHINE, repair_h=0)) == 0
    assert spare_devices(20, replace(MACHINE, repair_h=1e9)) == 24  # no more than everything again
    row = estimate(10_000, MACHINE, replace(LEVEL, capacity=Capacity.SPARES))
    assert row.capacity == 10_000 / (10_000 + 8 * losses)


def test_an_interval_is_whole_steps() -> None:
    assert [whole_steps(t, 30.0) for t in (0.0, 44.0, 46.0, 3600.0)] == [30.0, 30.0, 60.0, 3600.0]


def test_numbers_out_of_range_are_named_together() -> None:
    machine = replace(MACHINE, device_mtbf_h=0.0, step_s=math.nan, lost_devices=9)
    level = replace(LEVEL, stall_s=-1.0, interval_s=0.0, phases=replace(PHASES, agree_s=math.inf))
    with pytest.raises(ConfigError) as caught:
        estimate(8, machine, level)
    assert str(caught.value).splitlines() == [
        "6 problems",
        "  mtbf: got 0; must be >= 1 and <= 1000000000; hint: 1 is the smallest",
        "  lost_devices: got 9; must be >= 1 and <= 8; hint: 8 is the largest",
        "  step: got nan; must be >= 1e-06 and <= 1000000000; hint: write a finite number",
        "  shrink.agree_s: got inf; must be >= 0 and <= 1000000000; hint: write a finite number",
        "  shrink.stall: got -1; must be >= 0 and <= 1000000000; hint: 0 is the smallest",
        "  shrink.interval: got 0; must be > 0 and <= 1000000000; hint: a value above 0",
    ]


def row_of(name: str, *seconds: float) -> dict[str, Any]:
    """As the benchmark writes it."""
    row = recovery.Row(
        name=name,
        what="",
        ranks=(4, 3),
        phases_s=dict(zip(recovery.PHASES, seconds)),
        total_s=sum(seconds),
        steps_lost=0,
        goal_s=3.0,
    )
    return {**asdict(row), "good": row.good}


def measured_file(folder: Path, *rows: dict[str, Any]) -> str:
    path = folder / "recovery.json"
    path.write_text(json.dumps({"ours": rows, "stock": {"shrink": {"what": "", "total_s": None}}}))
    return str(path)


def test_the_command_prints_a_row_for_every_size_and_level(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["goodput", "--ranks", "1000", "10000", "--repair", "0", "--step", "1"]) == 0
    out = capsys.readouterr().out
    cells = [line.split() for line in out.splitlines() if line[:1].isdecimal()]
    assert [(c[0], c[2]) for c in cells] == [
        (n, v) for n in ("1000", "10000") for v in ("shrink", "spare", "cold")
    ]
    assert " ".join(cells[-1]) == "10000 5h04m cold 2093 s 2013 s 2013 s 100.00 % 0 80.61 % -"
    assert out.endswith("for first order to be within 0.5 %\n")


def test_measured_phases_take_the_place_of_given_ones(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seconds = (0.25, 0.5, 0.125, 0.0, 1.0)
    path = measured_file(tmp_path, row_of("shrink", *seconds), row_of("pause"))
    assert read_measured(path) == {"shrink": Phases(**dict(zip(asdict(PHASES), seconds)))}
    assert main(["goodput", "--ranks", "1024", "--measured", path]) == 0
    out = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["shrink", "0.25", "0.5", "0.125", "0", "1", "1.875", "measured"] in out
    assert ["spare", "4", "6", "15", "5", "5", "35", "given"] in out


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("{", "recovery.json; must be JSON: "),
        ("[1]", "recovery.json: got [1]; must be rows under the key ours; hint: write it with python -m"),
        ('{"ours": [{"name": "hang"}, 3]}', 'got rows ["hang", 3]; must be one of shrink, spare; hint: '),
        (
            '{"ours": [{"name": "spare", "phases_s": {}}]}',
            "ours[0].phases_s.detect: got nothing; must be sec",
        ),
        ('{"ours": [{"name": "spare", "phases_s": {"detect": true}}]}', "phases_s.detect: got true; must be"),
        ('{"ours": [{"name": "spare", "phases_s": {"detect": NaN}}]}', "phases_s.detect: got NaN; must be"),
    ],
)
def test_a_file_that_the_benchmark_did_not_write_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, complaint: str
) -> None:
    path = tmp_path / "recovery.json"
    path.write_text(text)
    assert main(["goodput", "--measured", str(path)]) == 2
    assert complaint in capsys.readouterr().err


def test_a_file_that_is_not_there_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["goodput", "--measured", "nowhere.json"]) == 2
    assert "--measured: got nowhere.json; No such file or directory; hint: " in capsys.readouterr().err


@pytest.mark.parametrize("text", ["4,1,15,5", "a,b,c,d,e", ""])
def test_phases_that_are_not_five_numbers_are_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["goodput", "--cold", text])
    assert caught.value.code == 2
    assert f"got {text!r}, must be five numbers of seconds" in capsys.readouterr().err
