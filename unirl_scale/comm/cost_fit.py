"""Fit latency and bandwidth to nccl-tests and hccl_test logs, and keep how well the fit holds."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from unirl_scale.comm.cost import Collective, Tier
from unirl_scale.comm.topology.model import Link
from unirl_scale.comm.topology.source import Source, load

_NCCL_ROW = re.compile(r"\s*(\d+)\s+(\d+)\s+(\w+)\s+(\w+)\s+(-?\w+)\s+([\d.]+)\s+([\d.]+)\s+([\d.]+)\s+(\S+)")
_HCCL_ROW = re.compile(r"\s*(\d+)\s*\|?\s+([\d.]+)\s*\|?\s+([\d.]+)\s*\|?\s+(success|failed|NULL)\b")
_NAMES: dict[str, Collective] = {
    "all_reduce": "all_reduce",
    "allreduce": "all_reduce",
    "reduce_scatter": "reduce_scatter",
    "reducescatter": "reduce_scatter",
    "all_gather": "all_gather",
    "allgather": "all_gather",
    "alltoall": "all_to_all",
    "all_to_all": "all_to_all",
    "broadcast": "broadcast",
    "sendrecv": "p2p",
}
_BUS_FACTOR: dict[Collective, Callable[[int], float]] = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "all_to_all": lambda n: (n - 1) / n,
    "broadcast": lambda n: 1.0,
    "p2p": lambda n: 1.0,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """Measured times of one collective: bytes (S of cost.py) and microseconds, ascending in bytes."""

    collective: Collective | None
    ranks: int | None
    size_bytes: tuple[int, ...]
    time_us: tuple[float, ...]
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """time = max(floor, base) + size / rate, with what it leaves unexplained.

    Attributes:
        base_us: time of an empty call.
        gb_per_s: algorithm bandwidth S / time at large S.
        mean_error, max_error: |predicted - measured| / measured over the points.
    """

    base_us: float
    gb_per_s: float
    points: int
    mean_error: float
    max_error: float
    source: str

    def time_us(self, size: float) -> float:
        """Predicted time of S bytes."""
        return self.base_us + size / (self.gb_per_s * 1e3)

    def link(self, kind: str, collective: Collective, ranks: int) -> Link:
        """The same as a link class: alpha a ring step, beta a member's own rate."""
        steps = max(1, (2 if collective == "all_reduce" else 1) * (ranks - 1))
        text = f"fit of {self.points} points, mean error {100 * self.mean_error:.1f} % ({self.source})"
        return Link(
            kind=kind,
            alpha_us=self.base_us / steps,
            beta_gb_per_s=self.gb_per_s * _BUS_FACTOR[collective](ranks),
            source=text,
        )

    def tier(self, name: str, collective: Collective, ranks: int) -> Tier:
        """A tier of `ranks` members with the fitted figures."""
        link = self.link(name, collective, ranks)
        return Tier(name=name, size=ranks, alpha_us=link.alpha_us, beta_gb_per_s=link.beta_gb_per_s)


def read_curve(path_or_text: str, *, collective: Collective | None = None, ranks: int | None = None) -> Curve:
    """Read a log. The collective and rank count come from the log where it has them, else from the caller.

    Raises:
        PlanError: no result rows, rows that failed their check, or a log that contradicts the arguments.
    """
    source = load(path_or_text)
    found: dict[int, float] = {}
    failed = 0
    ratio: set[float] = set()
    for line in source.lines:
        nccl, hccl = _NCCL_ROW.match(line), _HCCL_ROW.match(line)
        if nccl:
            wrong = nccl[9]
            failed += wrong not in ("0", "0e+00", "N/A")
            size, time = int(nccl[1]), float(nccl[6])
            if float(nccl[7]) > 1:  # enough digits to tell the ratio
                ratio.add(round(float(nccl[8]) / float(nccl[7]), 2))
        elif hccl:
            failed += hccl[4] == "failed"
            size, time = int(hccl[1]), float(hccl[2])
        else:
            continue
        if size and time:
            found[size] = max(found.get(size, 0.0), time)  # hccl_test prints every rank: the slowest counts
    if not found:
        hint = "give the output of all_reduce_perf, or of hccl_test's all_reduce_test, and the like"
        raise source.error(1, "no result rows", "an nccl-tests or hccl_test log", hint)
    if failed:
        raise source.error(
            1, f"{failed} rows that failed their check", "correct results only", "measure again"
        )
    named = _named(source)
    if named and collective and named != collective:
        raise source.error(1, f"a log of {named}", f"{collective}", "give the log of the right collective")
    counted = _ranks(source)
    if counted and ranks and counted != ranks:
        raise source.error(1, f"a log of {counted} ranks", f"{ranks}", "leave ranks out, or correct it")
    sizes = sorted(found)
    return Curve(
        collective=named or collective,
        ranks=counted or ranks,
        size_bytes=tuple(sizes),
        time_us=tuple(found[s] for s in sizes),
        source=source.name,
    )


def _named(source: Source) -> Collective | None:
    match = re.search(r"(?:starting|tests?):?\s*(\w+?)(?:_perf|_test)\b", source.text)
    return _NAMES.get(match[1]) if match else None


def _ranks(source: Source) -> int | None:
    listed = {int(m) for m in re.findall(r"^#\s+Rank\s+(\d+)", source.text, re.MULTILINE)}
    return len(listed) or None


def fit(curve: Curve, *, low: int = 0, high: int | None = None) -> Fit:
    """Least squares of the relative error over the points with low <= bytes <= high.

    Raises:
        PlanError: fewer than three points, or no growth with size to fit a bandwidth to.
    """
    keep = [
        (s, t) for s, t in zip(curve.size_bytes, curve.time_us) if s >= low and (high is None or s <= high)
    ]
    source = Source(curve.source, "")
    if len(keep) < 3:
        raise source.error(1, f"{len(keep)} points", "at least three sizes", "measure from 8 bytes to 1 GiB")
    sizes, times = np.array(keep, float).T
    base, slope = _relative_least_squares(sizes, times)
    if slope <= 0:
        raise source.error(1, "times that do not grow with size", "a bandwidth", "measure larger sizes")
    errors = np.abs(base + slope * sizes - times) / times
    return Fit(
        base_us=float(base),
        gb_per_s=float(1e-3 / slope),
        points=len(keep),
        mean_error=float(errors.mean()),
        max_error=float(errors.max()),
        source=curve.source,
    )


def _relative_least_squares(
    sizes: np.ndarray[tuple[int], np.dtype[np.float64]], times: np.ndarray[tuple[int], np.dtype[np.float64]]
) -> tuple[float, float]:
    """Minimise sum ((a + b s - t) / t)^2 with a >= 0."""
    rows = np.stack([1 / times, sizes / times], axis=1)
    (base, slope), *_ = np.linalg.lstsq(rows, np.ones(len(times)), rcond=None)
    if base < 0:
        base, slope = 0.0, float((sizes / times).sum() / ((sizes / times) ** 2).sum())
    return float(base), float(slope)


def mean_error(predict: Callable[[int], float | None], curves: Sequence[Curve]) -> float:
    """Mean of |predicted - measured| / measured over all points of the curves."""
    errors = [
        abs((predict(s) or 0.0) - t) / t for curve in curves for s, t in zip(curve.size_bytes, curve.time_us)
    ]
    return float(np.mean(errors))
