"""Names for processes that no other process ever has, and what can be known about them on their own host."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from pathlib import Path

from unirl_scale.train.elastic.view import Member


def process_uid(pid: int) -> str:
    """`host:pid:start`, with the kernel's start time of the process ("" when there is none)."""
    return f"{socket.gethostname()}:{pid}:{_start_time(pid)}"


def has_ended(uid: str) -> bool:
    """Whether a process of this host is no more. False for another host's: nothing is known about it here."""
    host, _, rest = uid.partition(":")
    pid = rest.partition(":")[0]
    return host == socket.gethostname() and pid.isdecimal() and process_uid(int(pid)) != uid


def kill(member: Member) -> None:
    """End a process of this host that was evicted, unless its id has passed to another one."""
    if member.host == socket.gethostname() and process_uid(member.pid) == member.uid:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(member.pid, signal.SIGKILL)


def _start_time(pid: int) -> str:
    """Field 22 of /proc/PID/stat (proc(5)); "" for a process that is gone, or dead and not yet reaped."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]
