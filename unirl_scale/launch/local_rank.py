"""One rank as its launcher sees it: a process, its log, why it ended; and the signals the launcher gets."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from unirl_scale.launch.rank_process import FAILED, ErrorReport

POLL_S = 0.05
TERMINATE_S = 2.0
_LOG_TAIL_LINES = 20
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


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


class LocalRank:
    """One process and the files it leaves.

    Args:
        log: gets what it writes to stderr, and to stdout unless that is inherited; appended to.
        report: where it leaves its ErrorReport.
    """

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
        self.started_s = time.monotonic()
        self._report = report
        self._returncode: int | None = None
        report.unlink(missing_ok=True)
        with log.open("ab") as file:
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
        """Kill what is left of the group and reap the rank; the second call does nothing."""
        if self.process.returncode is None:
            self.send(signal.SIGKILL)
            self.process.wait()

    @property
    def report(self) -> ErrorReport | None:
        """The error that ended it, or None when it left none."""
        return ErrorReport.read(self._report)

    def failure(self) -> tuple[tuple[int, float], Failure]:
        """(order among failures, what to show). A rank that was killed comes first: it cannot have followed
        another. Then errors by time, and last the errors that only say that another rank is gone."""
        report = self.report
        if report is None:
            tail = self._log_tail()
            return (0, 0.0), Failure(rank=self.rank, message=self.ending(), detail=tail, status=FAILED)
        shown = Failure(rank=self.rank, message=report.message, detail=report.trace, status=report.status)
        return (2 if report.follows else 1, report.time_s), shown

    def ending(self) -> str:
        """How a rank that left no report ended."""
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


def first_failure(ranks: Sequence[LocalRank]) -> Failure:
    """The failure that the others followed; some rank has failed."""
    return min((rank.failure() for rank in ranks if rank.failed), key=lambda item: item[0])[1]


def end_all(ranks: Sequence[LocalRank], signals: Signals, within_s: float) -> None:
    """Terminate what still runs, kill what does not heed it, and leave no child behind.

    Args:
        within_s: from SIGTERM to SIGKILL; a second signal to the launcher cuts it short.
    """
    before = len(signals.received)
    for rank in ranks:
        if rank.running:
            rank.send(signal.SIGTERM)
            rank.send(signal.SIGCONT)  # a stopped process takes no SIGTERM
    deadline_s = time.monotonic() + within_s
    while any(rank.running for rank in ranks) and time.monotonic() < deadline_s:
        if len(signals.received) > before:  # asked again: at once
            break
        time.sleep(POLL_S)
    for rank in ranks:
        rank.end()


def grace_after(signals: Signals, grace_s: float) -> float:
    """Seconds that the ranks get to end in: time to save when a scheduler asks, little after a failure or for
    somebody who waits at a keyboard."""
    asked = bool(signals.received) and signals.received[0] != signal.SIGINT
    return max(grace_s, TERMINATE_S) if asked else TERMINATE_S


class Signals:
    """Notes the signals that end a job instead of obeying them, so that the ranks are always ended first."""

    def __init__(self) -> None:
        self.received: list[int] = []
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Signals:
        for signum in _ENDING:
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


def free_port() -> int:
    """A TCP port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
