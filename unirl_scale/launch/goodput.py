"""`unirl-scale goodput`: what failures cost at each level of recovery, for several numbers of ranks."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from unirl_scale.core.errors import ConfigError
from unirl_scale.core.goodput import FIRST_ORDER_ERROR, Capacity, Estimate, Level, Machine, Phases, estimate
from unirl_scale.core.problems import Problem, show
from unirl_scale.launch.console import Console, duration

# Names of a level here and of its row in what benchmarks/recovery.py writes.
SHRINK, SPARE, COLD = "shrink", "spare", "cold"
_KEYS = {field.name: field.name.removesuffix("_s").replace("_", " ") for field in fields(Phases)}


@dataclass(frozen=True, slots=True, kw_only=True)
class GoodputCommand:
    """What the command line asked for.

    Attributes:
        snapshot_stall_s, snapshot_interval_s: of snapshots in memory; None = the optimum.
        checkpoint_stall_s, checkpoint_interval_s: of checkpoints on disk.
        phases_s: level -> seconds of each phase, in order.
        measured: JSON of benchmarks/recovery.py, whose rows take the place of `phases_s`; "" = none.
    """

    ranks: tuple[int, ...]
    machine: Machine
    snapshot_stall_s: float
    snapshot_interval_s: float | None
    checkpoint_stall_s: float
    checkpoint_interval_s: float | None
    phases_s: Mapping[str, tuple[float, ...]]
    measured: str = ""


def goodput_command(command: GoodputCommand, console: Console) -> int:
    """Print the phases that are assumed and the table; the exit status.

    Raises:
        ConfigError: a number is out of its range, or the file is not what the benchmark writes.
    """
    measured = read_measured(command.measured) if command.measured else {}
    levels = _levels(command, measured)
    rows = [estimate(ranks, command.machine, level) for ranks in command.ranks for level in levels]
    console.table([("level", *_KEYS.values(), "total s", "from"), *(_phases(v, measured) for v in levels)])
    console.line()
    head = ("ranks", "MTBI", "level", "Young", "Daly", "taken", "capacity", "spares", "goodput", "1st order")
    console.table([head, *(_row(row) for row in rows)])
    if any(row.first_order is None for row in rows):
        console.line(
            f"-: failures are not rare enough for first order to be within {100 * FIRST_ORDER_ERROR:g} %"
        )
    if measured:
        console.line(f"measured on few ranks: {command.measured}; phases grow with ranks and bytes of state")
    return 0


def _levels(command: GoodputCommand, measured: Mapping[str, Phases]) -> tuple[Level, ...]:
    """Best first."""

    def level(name: str, capacity: Capacity, *, disk: bool = False) -> Level:
        return Level(
            name=name,
            phases=measured.get(name) or Phases(**dict(zip(_KEYS, command.phases_s[name], strict=True))),
            stall_s=command.checkpoint_stall_s if disk else command.snapshot_stall_s,
            capacity=capacity,
            interval_s=command.checkpoint_interval_s if disk else command.snapshot_interval_s,
        )

    return (
        level(SHRINK, Capacity.SHRINKS),
        level(SPARE, Capacity.SPARES),
        level(COLD, Capacity.FULL, disk=True),
    )


def read_measured(path: str) -> dict[str, Phases]:
    """Level -> phases of its row in a file of `benchmarks/recovery.py --json`.

    A cold restart has none: the benchmark does not wait for a scheduler.

    Raises:
        ConfigError: the file cannot be read, is something else, or has neither level.
    """
    hint = "write it with python -m benchmarks.recovery --json FILE"
    try:
        tree = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--measured: got {path}; {error.strerror}; hint: {hint}") from error
    except ValueError as error:
        raise ConfigError(f"--measured: got {path}; must be JSON: {error}; hint: {hint}") from error
    rows = tree.get("ours") if isinstance(tree, dict) else None
    if not isinstance(rows, list):
        raise ConfigError(f"{path}: got {show(tree)}; must be rows under the key ours; hint: {hint}")
    found = {}
    for i, row in enumerate(rows):
        name = row.get("name") if isinstance(row, dict) else None
        if name in (SHRINK, SPARE):
            found[name] = _measured_phases(row.get("phases_s"), f"{path}: ours[{i}].phases_s")
    if not found:
        names = [row.get("name") if isinstance(row, dict) else row for row in rows]
        raise ConfigError(f"{path}: got rows {show(names)}; must be one of {SHRINK}, {SPARE}; hint: {hint}")
    return found


def _measured_phases(phases: Any, path: str) -> Phases:
    """Raises ConfigError where a phase is missing or is no number of seconds."""
    given = phases if isinstance(phases, dict) else {}
    seconds = {}
    for name, key in _KEYS.items():
        value = given.get(key)  # true and false are ints too
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
            got = show(value) if key in given else "nothing"
            hint = f"phases are {', '.join(_KEYS.values())}"
            raise ConfigError(str(Problem(path=f"{path}.{key}", got=got, rule="must be seconds", hint=hint)))
        seconds[name] = float(value)
    return Phases(**seconds)


def _phases(level: Level, measured: Mapping[str, Phases]) -> tuple[str, ...]:
    each = [f"{getattr(level.phases, name):.3g}" for name in _KEYS]
    return (
        level.name,
        *each,
        f"{level.phases.total_s:.4g}",
        "measured" if level.name in measured else "given",
    )


def _row(row: Estimate) -> tuple[str, ...]:
    return (
        str(row.ranks),
        duration(row.mtbi_s),
        row.level.name,
        *(f"{seconds:.4g} s" for seconds in (row.young_s, row.daly_s, row.interval_s)),
        f"{100 * row.capacity:.2f} %",
        str(row.spares),
        f"{100 * row.goodput:.2f} %",
        "-" if row.first_order is None else f"{100 * row.first_order:.2f} %",
    )
