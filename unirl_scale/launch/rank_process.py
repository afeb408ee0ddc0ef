"""One rank's process: it dies with its launcher, and what ends it is told once."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NoReturn

from unirl_scale.core.errors import (
    CommError,
    ConfigError,
    ElasticError,
    MembershipChanged,
    PlanError,
    Stopped,
    UniRLError,
)
from unirl_scale.launch.console import Console
from unirl_scale.launch.environment import REPORT_FILE
from unirl_scale.launch.preflight import Refused
from unirl_scale.launch.ranks import LOCAL_MARK

_PR_SET_PDEATHSIG = 1
_TORCHRUN_FILE = "TORCHELASTIC_ERROR_FILE"
BAD_INPUT, FAILED, INTERRUPTED = 2, 1, 130


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorReport:
    """Why a rank ended.

    Attributes:
        message: the error in one block.
        trace: the traceback, or "" for a user's mistake, which needs none.
        status: exit status of the rank.
        follows: the error only says that another rank is gone.
        final: the job cannot go on without this rank's error being mended.
        time_s: monotonic clock of the host when it happened: the smallest is the first.
    """

    message: str
    trace: str
    status: int
    follows: bool
    time_s: float
    final: bool = False

    @classmethod
    def of(cls, error: BaseException) -> ErrorReport:
        expected = isinstance(error, UniRLError)
        return cls(
            message=str(error) if expected else f"{type(error).__name__}: {error}",
            trace="" if expected else "".join(traceback.format_exception(error)),
            status=_status(error),
            follows=isinstance(error, CommError | MembershipChanged | Refused),
            time_s=time.monotonic(),
            final=isinstance(error, ElasticError | Stopped),
        )

    @classmethod
    def read(cls, path: Path) -> ErrorReport | None:
        """The report of a rank, or None when it left none (it was killed, or called exit itself)."""
        return cls(**json.loads(path.read_text())) if path.exists() else None

    def write(self, path: Path) -> None:
        partial = path.with_suffix(".part")
        partial.write_text(json.dumps(asdict(self)))
        partial.replace(path)

    def write_for_torchrun(self, path: Path) -> None:
        """The form that torchrun's agent reads and shows as the root cause."""
        extra = {"py_callstack": self.trace or self.message, "timestamp": str(int(time.time()))}
        path.write_text(json.dumps({"message": {"message": self.message, "extraInfo": extra}}))


def _status(error: BaseException) -> int:
    if isinstance(error, Stopped):
        return 128 + error.signum
    return BAD_INPUT if isinstance(error, ConfigError | PlanError) else FAILED


def run_as_rank(
    body: Callable[[], None], rank: int, environ: Mapping[str, str], console: Console
) -> NoReturn:
    """Run a rank's work, and end this process with its status.

    A rank of our own launcher leaves an ErrorReport for it to show; any other rank shows its own error. The
    process ends here and now: an interpreter that shuts down would wait for the communication threads, which
    wait for the other ranks, or unwind its own threads through torch's frames, which aborts.
    """
    die_with_launcher(environ)
    status = 0
    try:
        body()
    except KeyboardInterrupt:
        status = INTERRUPTED
    except Exception as error:
        report = ErrorReport.of(error)
        status = report.status
        if REPORT_FILE in environ:
            report.write(Path(environ[REPORT_FILE]))
        else:
            show_error(console, f"rank {rank}: {report.message}", report.trace)
            if _TORCHRUN_FILE in environ:
                report.write_for_torchrun(Path(environ[_TORCHRUN_FILE]))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def show_error(console: Console, message: str, trace: str = "") -> None:
    """The `error:` block, and the traceback below it where there is one."""
    console.error(message)
    if trace:
        console.detail(trace)


def die_with_launcher(environ: Mapping[str, str]) -> None:
    """Ask the kernel to kill this process when the launcher that started it ends, however it ends."""
    if LOCAL_MARK not in environ or not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(environ[LOCAL_MARK]):  # it ended before the kernel was asked
        os._exit(FAILED)
