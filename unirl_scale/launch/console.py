"""What the user sees: the only file that prints."""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping, Sequence
from typing import TextIO

from unirl_scale.train.metrics import ACCURACY, ACTOR_LOSS, GRAD_NORM, KL, REWARD, ROLLOUT_DIFF, Reporter

_SHOWN = (
    (REWARD, "reward"),
    (ACCURACY, "accuracy"),
    (KL, "kl"),
    (ACTOR_LOSS, "loss"),
    (GRAD_NORM, "grad"),
    (ROLLOUT_DIFF, "rollout-diff"),
)
_BAR_CELLS = 20
_CLEAR_LINE = "\r\x1b[K"


class Console:
    """Lines to standard output, errors and warnings to standard error."""

    def __init__(self, out: TextIO, err: TextIO) -> None:
        self._out = out
        self._err = err

    def line(self, text: str = "") -> None:
        print(text, file=self._out, flush=True)

    def text(self, text: str) -> None:
        """Text that brings its own line ends."""
        print(text, end="", file=self._out, flush=True)

    def error(self, message: str) -> None:
        """One `error:` block; on a terminal it takes the place of a live bar that was left standing."""
        clear = _CLEAR_LINE if self._err.isatty() else ""
        print(f"{clear}error: {message}", file=self._err, flush=True)

    def warn(self, text: str) -> None:
        """A line worth acting on, from the launcher itself."""
        print(f"warning: {text}", file=self._err, flush=True)

    def detail(self, text: str) -> None:
        """What goes below an error: a traceback, the end of a log."""
        print(text.rstrip("\n"), file=self._err, flush=True)

    def table(self, rows: Sequence[Sequence[str]]) -> None:
        """Aligned columns, the header first."""
        for line in table_lines(rows):
            self.line(line)

    def reporter(self, *, live: bool = True) -> Reporter:
        """A live bar on a terminal if allowed, a line a step elsewhere."""
        return LiveReporter(self._out) if live and self._out.isatty() else LineReporter(self._out)


def table_lines(rows: Sequence[Sequence[str]]) -> list[str]:
    """The rows as text; a rule below the header."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]
    return [lines[0], "  ".join("-" * width for width in widths), *lines[1:]]


class _Clock:
    """Seconds a step and time left, from the steps seen so far."""

    def __init__(self, total_steps: int, first_step: int) -> None:
        self.total_steps = total_steps
        self._first_step = first_step
        self._started_s = time.monotonic()

    def pace(self, step: int) -> str:
        """`1.3 s/step  eta 2m10s`."""
        done = max(1, step - self._first_step)
        step_s = (time.monotonic() - self._started_s) / done
        return f"{step_s:.2f} s/step  eta {duration(step_s * (self.total_steps - step))}"


def duration(seconds: float) -> str:
    """`45s`, `2m10s` or `3h05m`."""
    whole = int(seconds + 0.5)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"


def metric_words(metrics: Mapping[str, float]) -> str:
    """The main metrics of a step on one line; those that the step has."""
    return "  ".join(f"{label} {metrics[name]:.4g}" for name, label in _SHOWN if name in metrics)


class LineReporter:
    """A plain line a step, for files and pipes."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._clock = _Clock(0, 0)

    def begin(self, total_steps: int, first_step: int = 0) -> None:
        self._clock = _Clock(total_steps, first_step)

    def step(self, step: int, stage: str, metrics: Mapping[str, float]) -> None:
        total = self._clock.total_steps
        counter = f"step {step:>{len(str(total))}}/{total}"
        self._line(
            "  ".join(
                part for part in (counter, stage, metric_words(metrics), self._clock.pace(step)) if part
            )
        )

    def note(self, text: str) -> None:
        self._line(text)

    def warn(self, text: str) -> None:
        self._line(f"warning: {text}")

    def table(self, rows: Sequence[Sequence[str]]) -> None:
        for line in table_lines(rows):
            self._line(line)

    def end(self) -> None:
        pass

    def _line(self, text: str) -> None:
        print(text, file=self._out, flush=True)


class LiveReporter:
    """A bar on the last line of a terminal, redrawn every step; other lines scroll above it."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._clock = _Clock(0, 0)
        self._bar = ""

    def begin(self, total_steps: int, first_step: int = 0) -> None:
        self._clock = _Clock(total_steps, first_step)

    def step(self, step: int, stage: str, metrics: Mapping[str, float]) -> None:
        total = max(1, self._clock.total_steps)
        full = _BAR_CELLS * step // total
        bar = "#" * full + "." * (_BAR_CELLS - full)
        text = f"[{bar}] {step}/{total} {stage}  {self._clock.pace(step)}  {metric_words(metrics)}"
        # A bar longer than the terminal would wrap, and a wrapped line cannot be redrawn.
        self._bar = text[: max(10, shutil.get_terminal_size().columns - 1)]
        self._draw("")

    def note(self, text: str) -> None:
        self._draw(f"{text}\n")

    def warn(self, text: str) -> None:
        self._draw(f"warning: {text}\n")

    def table(self, rows: Sequence[Sequence[str]]) -> None:
        self._draw("".join(f"{line}\n" for line in table_lines(rows)))

    def end(self) -> None:
        """Leave the last bar standing as a line of its own."""
        if self._bar:
            last, self._bar = self._bar, ""
            self._draw(f"{last}\n")

    def _draw(self, above: str) -> None:
        print(f"{_CLEAR_LINE}{above}{self._bar}", end="", file=self._out, flush=True)
