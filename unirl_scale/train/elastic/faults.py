"""Failures on purpose, by slot, step and phase. Only tests inject them."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from unirl_scale.core.errors import ConfigError
from unirl_scale.core.progress import Progress
from unirl_scale.core.typed import TypedReader

LINGER_S = 0.4


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One failure.

    Attributes:
        slot: of the process that fails.
        step: training step in progress, from 1.
        phase: as `Progress` has it, e.g. "forward", "reduce", "restore".
        collective: 0 = when the phase begins, n = before its n-th collective.
        action: `kill` is SIGKILL, `hang` is SIGSTOP, `wait` computes on without ever reaching a collective,
            `linger` computes for a moment in which a test can do something, `fail` raises.
        once: a path; the fault happens only while nothing is there, and puts a file there.
    """

    slot: int
    step: int
    phase: str
    once: str
    collective: int = 0
    action: Literal["kill", "hang", "wait", "linger", "fail"] = "kill"


def read_faults(text: str) -> tuple[Fault, ...]:
    """Faults from a JSON list of mappings; "" is none.

    Raises:
        ConfigError: something else.
    """
    if not text:
        return ()
    reader = TypedReader(Fault, {})
    faults = [reader.read_dataclass(Fault, item, f"faults[{i}]") for i, item in enumerate(json.loads(text))]
    if reader.problems:
        raise ConfigError("\n".join(map(str, reader.problems)))
    return tuple(faults)


def fault_observer(faults: Sequence[Fault], slot: int) -> Callable[[Progress], None]:
    """What to add to the observers of a process, so that its faults happen."""
    mine = [fault for fault in faults if fault.slot == slot]

    def observe(progress: Progress) -> None:
        now = (progress.step, progress.phase, progress.operations)
        for fault in mine:
            if now == (fault.step, fault.phase, fault.collective) and _first_time(Path(fault.once)):
                _happen(fault)

    return observe


def _first_time(path: Path) -> bool:
    try:
        path.touch(exist_ok=False)
    except FileExistsError:
        return False
    path.write_text(repr(time.monotonic()))  # when, for those who measure
    return True


def _happen(fault: Fault) -> None:
    match fault.action:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "hang":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "wait":
            while True:
                time.sleep(1.0)
        case "linger":
            time.sleep(LINGER_S)
        case "fail":
            raise RuntimeError(f"fault in slot {fault.slot}, step {fault.step}, {fault.phase}")
