"""How much of a job's time trains, for any number of ranks: failures, snapshots and three levels of recovery.

Failures are a Poisson process, the same for every device. docs/recovery.md has the formulas and sources.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from enum import Enum

from unirl_scale.core.problems import Problem, raise_all
from unirl_scale.core.ranges import Bound

FIRST_ORDER_ERROR = 0.005  # share of time; what first order leaves out may come to that
POOL_MISS = 0.01  # share of time in which a pool of spares may be too small

# Beyond any machine, and near enough for every sum and ratio below to stay finite.
_RANKS = Bound(low=1, high=10**7)
_HOURS = Bound(low=1, high=1e9)
_REPAIR_HOURS = Bound(low=0, high=1e9)
_STEP_SECONDS = Bound(low=1e-6, high=1e9)
_SECONDS = Bound(low=0, high=1e9)
_INTERVAL_SECONDS = Bound(low=0, high=1e9, low_open=True)
_HOUR_S = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Phases:
    """Seconds of a recovery, in order; those of benchmarks/recovery.py.

    Attributes:
        first_step_s: what the first step takes beyond a usual one; the step itself is trained, not lost.
    """

    detect_s: float
    agree_s: float
    rebuild_s: float
    restore_s: float
    first_step_s: float

    @property
    def total_s(self) -> float:
        return self.detect_s + self.agree_s + self.rebuild_s + self.restore_s + self.first_step_s

    @property
    def planned_s(self) -> float:
        """Of a change of view that nobody has to detect: a node comes back."""
        return self.total_s - self.detect_s


class Capacity(Enum):
    """What a failure does to the devices that train."""

    SHRINKS = "lost devices are missed until they are repaired"
    SPARES = "idle spares are part of the job"
    FULL = "the job waits for a full set"


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """One way to recover.

    Attributes:
        stall_s: that training stops for a snapshot; seconds, >= 0.
        interval_s: training between snapshots; None = Daly's optimum. Both are rounded to whole steps.
    """

    name: str
    phases: Phases
    stall_s: float
    capacity: Capacity
    interval_s: float | None = None

    @property
    def recovery_s(self) -> float:
        """Training stops that long for one failure; a shrunk job does so again when the node is back."""
        again = self.phases.planned_s if self.capacity is Capacity.SHRINKS else 0.0
        return self.phases.total_s + again


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What fails, and what that takes along.

    Attributes:
        device_mtbf_h: hours of one device between failures that interrupt the job.
        lost_devices: that one failure takes out of the job: one, a node's, or a whole copy of the model.
        repair_h: hours until they are back.
        step_s: seconds of a training step; snapshots lie between steps.
    """

    device_mtbf_h: float
    lost_devices: int
    repair_h: float
    step_s: float

    def mtbi_s(self, ranks: int) -> float:
        """Seconds between interruptions of a job of that many devices: MTBF / N."""
        return self.device_mtbf_h * _HOUR_S / ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """What to expect of one level at one size.

    Attributes:
        young_s, daly_s: optimum intervals; seconds.
        interval_s: the one assumed: whole steps, at least one.
        capacity: share of the job's devices that train, on average.
        spares: idle devices that are counted in.
        goodput: share of all device time that trains: Daly's complete model times `capacity`.
        first_order: the same by the first-order ETTR; None = outside its range.
    """

    ranks: int
    mtbi_s: float
    level: Level
    young_s: float
    daly_s: float
    interval_s: float
    capacity: float
    spares: int
    goodput: float
    first_order: float | None


def young_interval_s(stall_s: float, mtbi_s: float) -> float:
    """Training between snapshots that loses least, to first order: sqrt(2 w M).

    Source: Young, CACM 17(9), 1974. About 2w/3 too long, which matters once w is not small beside M.
    """
    return math.sqrt(2 * stall_s * mtbi_s)


def daly_interval_s(stall_s: float, mtbi_s: float) -> float:
    """The same to higher order: sqrt(2 w M) (1 + x/3 + x^2/9) - w with x = sqrt(w / 2M), and M where w >= 2M.

    Source: Daly, Future Generation Computer Systems 22(3), 2006.
    """
    if stall_s >= 2 * mtbi_s:
        return mtbi_s
    x = math.sqrt(stall_s / (2 * mtbi_s))
    return young_interval_s(stall_s, mtbi_s) * (1 + x / 3 + x * x / 9) - stall_s


def goodput(interval_s: float, stall_s: float, recovery_s: float, mtbi_s: float) -> float:
    """Share of time that trains: t / (M e^(u/M) (e^((t+w)/M) - 1)).

    Counts failures in snapshots and in recoveries. Source: the complete cost function of Daly (2006).

    Args:
        interval_s: training between snapshots, t > 0.
        stall_s: of a snapshot, w >= 0.
        recovery_s: from a failure until training goes on, u >= 0.
        mtbi_s: between failures, M > 0; inf = none.
    """
    if math.isinf(mtbi_s):
        return interval_s / (interval_s + stall_s)
    segment = (interval_s + stall_s) / mtbi_s
    # e^-x / (1 - e^-x) where the source has 1 / (e^x - 1), which overflows once x > 709.
    return interval_s / mtbi_s * math.exp(-segment - recovery_s / mtbi_s) / -math.expm1(-segment)


def first_order(interval_s: float, stall_s: float, recovery_s: float, mtbi_s: float) -> float | None:
    """The effective training time ratio (1 - (u + t/2) / M) / (1 + w/t); None = out of its range.

    Failures are taken for rare: none strikes in a snapshot or a recovery. With x = (u + t/2) / M that leaves
    out about x^2/2 + w/2M of the time; None above FIRST_ORDER_ERROR, long before the ratio is negative.
    Source: Kokolis et al., HPCA 2025. Arguments as for `goodput`.
    """
    lost = (recovery_s + interval_s / 2) / mtbi_s
    left_out = lost * lost / 2 + stall_s / (2 * mtbi_s)
    return None if left_out > FIRST_ORDER_ERROR else (1 - lost) / (1 + stall_s / interval_s)


def shrunk_capacity(machine: Machine) -> float:
    """Share of devices that are in the job on average, 1 / (1 + d r T): up for 1 / d r, then in repair for T.

    Devices that go together fail d times as often as one; the share is an alternating renewal process's.
    """
    return 1 / (1 + machine.lost_devices * machine.repair_h / machine.device_mtbf_h)


def spare_devices(ranks: int, machine: Machine) -> int:
    """The smallest pool, in whole losses, that is too small for at most POOL_MISS of the time.

    What is in repair is Poisson with mean N r T, whatever the distribution of T (Palm's theorem).
    """
    mean = ranks * machine.repair_h / machine.device_mtbf_h
    most = -(-ranks // machine.lost_devices)
    covered, losses = math.exp(-mean), 0
    while covered < 1 - POOL_MISS and losses < most:
        losses += 1
        covered += math.exp(losses * math.log(mean) - mean - math.lgamma(losses + 1))
    return losses * machine.lost_devices


def whole_steps(interval_s: float, step_s: float) -> float:
    """The nearest interval that ends between two steps, at least one step."""
    return max(1, round(interval_s / step_s)) * step_s


def estimate(ranks: int, machine: Machine, level: Level) -> Estimate:
    """What to expect of a level of recovery at a number of ranks, one a device.

    Raises:
        ConfigError: a number is out of its range.
    """
    raise_all([*_problems(ranks, machine), *_level_problems(level)])
    mtbi = machine.mtbi_s(ranks)
    young, daly = (formula(level.stall_s, mtbi) for formula in (young_interval_s, daly_interval_s))
    interval = whole_steps(daly if level.interval_s is None else level.interval_s, machine.step_s)
    spares, capacity = 0, 1.0
    if level.capacity is Capacity.SHRINKS:
        capacity = shrunk_capacity(machine)
    elif level.capacity is Capacity.SPARES:
        spares = spare_devices(ranks, machine)
        capacity = ranks / (ranks + spares)
    ratio = first_order(interval, level.stall_s, level.recovery_s, mtbi)
    return Estimate(
        ranks=ranks,
        mtbi_s=mtbi,
        level=level,
        young_s=young,
        daly_s=daly,
        interval_s=interval,
        capacity=capacity,
        spares=spares,
        goodput=capacity * goodput(interval, level.stall_s, level.recovery_s, mtbi),
        first_order=None if ratio is None else capacity * ratio,
    )


def _problems(ranks: int, machine: Machine) -> list[Problem]:
    check = _Check()
    check("ranks", ranks, _RANKS)
    check("mtbf", machine.device_mtbf_h, _HOURS)
    check("lost_devices", machine.lost_devices, Bound(low=1, high=max(1, ranks)))
    check("repair", machine.repair_h, _REPAIR_HOURS)
    check("step", machine.step_s, _STEP_SECONDS)
    return check.found


def _level_problems(level: Level) -> list[Problem]:
    check = _Check()
    for field in fields(Phases):
        check(f"{level.name}.{field.name}", getattr(level.phases, field.name), _SECONDS)
    check(f"{level.name}.stall", level.stall_s, _SECONDS)
    if level.interval_s is not None:
        check(f"{level.name}.interval", level.interval_s, _INTERVAL_SECONDS)
    return check.found


class _Check:
    """Gathers the numbers that are out of range."""

    def __init__(self) -> None:
        self.found: list[Problem] = []

    def __call__(self, path: str, value: float, bound: Bound) -> None:
        if not bound.holds(value):
            hint = bound.hint(value)
            self.found.append(Problem(path=path, got=f"{value:g}", rule=bound.rule, hint=hint))
