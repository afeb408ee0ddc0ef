"""What the user sees: a line a step in a pipe, a redrawn bar on a terminal."""

from __future__ import annotations

import io

from unirl_scale.launch.console import (
    Console,
    LineReporter,
    LiveReporter,
    duration,
    metric_words,
    table_lines,
)
from unirl_scale.train.metrics import KL, REWARD


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_pipe_gets_one_plain_line_a_step() -> None:
    out = io.StringIO()
    reporter = Console(out, out).reporter()
    reporter.begin(12)
    reporter.step(3, "ppo", {REWARD: 0.25, KL: 0.0})
    reporter.warn("careful")
    reporter.end()
    first, second = out.getvalue().splitlines()
    assert first.startswith("step  3/12  ppo  reward 0.25  kl 0  ")
    assert first.count("s/step  eta ") == 1
    assert second == "warning: careful"
    assert "\r" not in out.getvalue()


def test_a_terminal_gets_one_bar_that_is_redrawn() -> None:
    out = Terminal()
    reporter = Console(out, out).reporter()
    reporter.begin(4)
    reporter.step(1, "ppo", {REWARD: 0.25})
    reporter.note("stage two")
    reporter.step(4, "ppo", {REWARD: 0.5})
    reporter.end()
    drawn = out.getvalue().split("\r\x1b[K")
    assert drawn[1].startswith("[#####...............] 1/4 ppo")
    assert drawn[2].startswith("stage two\n[#####....")
    assert drawn[3].startswith("[####################] 4/4 ppo")
    assert drawn[4].endswith("\n")
    assert len(drawn) == 5


def test_the_reporter_follows_the_stream() -> None:
    assert isinstance(Console(io.StringIO(), io.StringIO()).reporter(), LineReporter)
    assert isinstance(Console(Terminal(), io.StringIO()).reporter(), LiveReporter)


def test_an_error_takes_the_place_of_a_standing_bar() -> None:
    terminal, pipe = Terminal(), io.StringIO()
    Console(terminal, terminal).error("x")
    Console(pipe, pipe).error("x")
    assert terminal.getvalue() == "\r\x1b[Kerror: x\n"
    assert pipe.getvalue() == "error: x\n"


def test_tables_align() -> None:
    assert table_lines([("a", "long head"), ("wide cell", "1")]) == [
        "a          long head",
        "---------  ---------",
        "wide cell  1",
    ]


def test_times_and_metrics_are_short() -> None:
    assert [duration(s) for s in (0.4, 59.4, 130, 11100)] == ["0s", "59s", "2m10s", "3h05m"]
    assert metric_words({"other": 1.0, KL: 0.123456, REWARD: 1.0}) == "reward 1  kl 0.1235"
