"""Starts, stops and reads the processes of `control_worker.py`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

DEADLINE_S = 40.0  # far above what anything takes, for a busy machine


@dataclass(slots=True)
class ControlJob:
    """A job of light processes; a context manager that leaves none behind.

    Attributes:
        folder: their run directory.
    """

    folder: Path
    world: int
    min_ranks: int = 1
    processes: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)
    _started: int = 0
    _view: int = 0
    _logs: dict[int, Path] = field(default_factory=dict)

    def __enter__(self) -> ControlJob:
        for slot in range(self.world):
            self.start(slot)
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait()

    def start(self, slot: int) -> None:
        """A process for a slot; the one that was there before has ended."""
        self._started += 1
        log = self._logs[slot] = self.folder / f"log-{self._started}"
        command = [sys.executable, "-m", "tests.fault.control_worker", str(self.folder)]
        arguments = [str(slot), str(self.world), str(self.min_ranks), "node"]
        with log.open("wb") as output:
            self.processes[slot] = subprocess.Popen(
                [*command, *arguments], stdout=output, env=dict(os.environ)
            )

    def signal(self, slot: int, signum: int) -> None:
        self.processes[slot].send_signal(signum)

    def kill(self, *slots: int) -> None:
        for slot in slots:
            self.signal(slot, signal.SIGKILL)

    def events(self, slot: int) -> list[dict[str, Any]]:
        """What the slot's newest process has reported."""
        lines = self._logs[slot].read_text().splitlines(keepends=True)
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def wait(self, slot: int, happened: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """The first event of a slot for which that holds."""
        deadline = time.monotonic() + DEADLINE_S
        while time.monotonic() < deadline:
            for event in self.events(slot):
                if happened(event):
                    return event
            time.sleep(0.02)
        raise AssertionError(f"slot {slot} reported only {self.events(slot)}")

    def train_on(self, slots: list[int], steps: int) -> None:
        """Wait until these slots have trained so many more steps, or have ended."""

        def last(slot: int) -> int:
            return max((event.get("step", 0) for event in self.events(slot)), default=0)

        goals = {slot: last(slot) + steps for slot in slots}
        deadline = time.monotonic() + DEADLINE_S
        while any(last(slot) < goal and self.processes[slot].poll() is None for slot, goal in goals.items()):
            assert time.monotonic() < deadline, {slot: self.events(slot) for slot in slots}
            time.sleep(0.02)

    def longest_pause_s(self) -> float:
        """Of any process, as they saw it themselves."""
        return max(
            (event.get("paused_s", 0.0) for slot in self.processes for event in self.events(slot)),
            default=0.0,
        )

    def wait_for_slots(self, slots: list[int]) -> dict[int, dict[str, Any]]:
        """All of these slots train together in a new view; their events."""

        def newer(event: dict[str, Any]) -> bool:
            return event.get("slots") == slots and event["view"] > self._view

        found = {slot: self.wait(slot, newer) for slot in slots}
        (self._view,) = {event["view"] for event in found.values()}
        assert [found[slot]["rank"] for slot in slots] == list(range(len(slots)))
        return found

    def finish(self) -> list[str]:
        """How every process that is left ended."""
        (self.folder / "finish").touch()
        return [self.wait(slot, lambda event: "ended" in event)["ended"] for slot in self.processes]
