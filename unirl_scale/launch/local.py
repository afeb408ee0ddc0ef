"""Ranks of this host: fresh processes, started together and ended together."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from unirl_scale.launch.environment import local_rank_environment
from unirl_scale.launch.rank_process import FAILED, ErrorReport

_POLL_S = 0.05
# A rank that dies takes others with it within moments: wait that long before deciding who was first.
_SETTLE_S = 0.3
_TERMINATE_S = 2.0
_LOG_TAIL_LINES = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """The rank that failed first.

    Attributes:
        rank: which.
        message: its error, or what killed it.
        detail: traceback or the end of its log; "" = none.
        status: exit status for the launcher.
    """

    rank: int
    message: str
    detail: str
    status: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How the ranks ended. With neither failure nor signal all of them returned 0."""

    failure: Failure | None = None
    signum: int | None = None  # the signal that stopped the launcher

    @property
    def status(self) -> int:
        """Exit status: 0, the failure's, or 128 + signal (130 for Ctrl-C)."""
        if self.signum is not None:
            return 128 + self.signum
        return self.failure.status if self.failure else 0


def run_local(
    command: Sequence[str], world_size: int, environ: Mapping[str, str], log_dir: Path, *, quiet: bool = False
) -> Outcome:
    """Run `command` once a rank and wait for all of them.

    Each rank is a process of its own session that dies with this one. When one fails, the others are ended
    within seconds; SIGINT, SIGTERM or SIGHUP to this process ends all of them.

    Args:
        command: the rank's program; it finds its place in torchrun's variables.
        world_size: ranks to start.
        environ: environment of the ranks, to which the rank variables are added.
        log_dir: gets `rank-N.log` with what a rank writes; rank 0's standard output stays this process's.
        quiet: rank 0's standard output goes to its log too.
    """
    log_dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="unirl-scale-") as reports, _Signals() as signals:
        ranks: list[_Rank] = []
        try:
            port = _free_port()
            for rank in range(world_size):
                report = Path(reports) / f"rank-{rank}.json"
                variables = {**environ, **local_rank_environment(rank, world_size, port, str(report))}
                log = log_dir / f"rank-{rank}.log"
                ranks.append(
                    _Rank(rank, command, variables, log, report, inherit_stdout=rank == 0 and not quiet)
                )
            while any(rank.running for rank in ranks):
                if signals.received or any(rank.failed for rank in ranks):
                    break
                time.sleep(_POLL_S)
            if signals.received:
                return Outcome(signum=signals.received[0])
            if any(rank.failed for rank in ranks):
                time.sleep(_SETTLE_S)
                return Outcome(failure=_first_failure(ranks))
            return Outcome()
        finally:
            _end_all(ranks, signals)


class _Rank:
    """One process and the files it leaves."""

    def __init__(
        self,
        rank: int,
        command: Sequence[str],
        environ: Mapping[str, str],
        log: Path,
        report: Path,
        *,
        inherit_stdout: bool,
    ) -> None:
        self.rank = rank
        self.log = log
        self._report = report
        self._returncode: int | None = None
        with log.open("wb") as file:
            self.process = subprocess.Popen(
                command,
                env=dict(environ),
                stdin=subprocess.DEVNULL,
                stdout=None if inherit_stdout else file,
                stderr=file,
                start_new_session=True,
            )

    @property
    def returncode(self) -> int | None:
        """As Popen's, but without reaping: until `end`, the process id cannot pass to a stranger."""
        if self._returncode is None:
            ended = os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is not None:
                killed = ended.si_code != os.CLD_EXITED
                self._returncode = -ended.si_status if killed else ended.si_status
        return self._returncode

    @property
    def running(self) -> bool:
        return self.returncode is None

    @property
    def failed(self) -> bool:
        return self.returncode not in (None, 0)

    def send(self, signum: int) -> None:
        """To the rank and to whatever it started in its session's first group."""
        os.killpg(self.process.pid, signum)

    def end(self) -> None:
        """Kill what is left of the group and reap the rank."""
        self.send(signal.SIGKILL)
        self.process.wait()

    def failure(self) -> tuple[tuple[int, float], Failure]:
        """(order among failures, what to show). A rank that was killed comes first: it cannot have followed
        another. Then errors by time, and last the errors that only say that another rank is gone."""
        report = ErrorReport.read(self._report)
        if report is None:
            tail = self._log_tail()
            return (0, 0.0), Failure(rank=self.rank, message=self._ending(), detail=tail, status=FAILED)
        shown = Failure(rank=self.rank, message=report.message, detail=report.trace, status=report.status)
        return (2 if report.follows else 1, report.time_s), shown

    def _ending(self) -> str:
        code = self.returncode or 0
        if code >= 0:
            return f"ended with exit status {code} and no error; hint: see {self.log}"
        name = signal.Signals(-code).name
        hint = (
            "the kernel kills the largest process when memory runs out"
            if name == "SIGKILL"
            else f"see {self.log}"
        )
        return f"killed by {name}; hint: {hint}"

    def _log_tail(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines()[-_LOG_TAIL_LINES:]
        return "\n".join([f"end of {self.log}:", *lines]) if lines else ""


def _first_failure(ranks: Sequence[_Rank]) -> Failure:
    return min((rank.failure() for rank in ranks if rank.failed), key=lambda item: item[0])[1]


def _end_all(ranks: Sequence[_Rank], signals: _Signals) -> None:
    """Terminate what still runs, kill what does not heed it, and leave no child behind."""
    before = len(signals.received)
    for rank in ranks:
        if rank.running:
            rank.send(signal.SIGTERM)
            rank.send(signal.SIGCONT)  # a stopped process takes no SIGTERM
    deadline_s = time.monotonic() + _TERMINATE_S
    while any(rank.running for rank in ranks) and time.monotonic() < deadline_s:
        if len(signals.received) > before:  # asked again: at once
            break
        time.sleep(_POLL_S)
    for rank in ranks:
        rank.end()


class _Signals:
    """Notes SIGINT, SIGTERM and SIGHUP instead of obeying them, so that the ranks are always ended first."""

    def __init__(self) -> None:
        self.received: list[int] = []
        self._before: dict[int, Any] = {}

    def __enter__(self) -> _Signals:
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(signum) is not signal.SIG_IGN:  # nohup and background jobs stay deaf
                self._before[signum] = signal.signal(signum, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for signum, handler in self._before.items():
            signal.signal(signum, handler)

    def _note(self, signum: int, frame: FrameType | None) -> None:
        self.received.append(signum)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
