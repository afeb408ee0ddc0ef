"""Watching one rank: beats from it, and a verdict when they stop."""

from __future__ import annotations

import time
from collections.abc import Callable

from unirl_scale.core.progress import Progress
from unirl_scale.train.elastic.links import Link
from unirl_scale.train.elastic.messages import Beat, Watch
from unirl_scale.train.elastic.view import Member

_CONNECT_S = 1.0
_LOOKS = 10  # at the training thread in an interval


async def send_beats(link: Link, progress: Progress, interval_s: float) -> None:
    """Tell a watcher what this process does, whenever that changes and at least every interval, until the
    watcher goes away."""
    said, said_s = "", 0.0
    while True:
        doing, now_s = progress.describe(), time.monotonic()
        if doing != said or now_s - said_s > interval_s:
            said, said_s = doing, now_s
            computing_s = 0.0 if progress.operation else now_s - progress.since_s
            link.send(Beat(doing=doing, computing_s=computing_s))
        try:
            if await link.receive(interval_s / _LOOKS) is None:
                return
        except TimeoutError:
            continue


async def watch(
    target: Member,
    greeting: Watch,
    heard: Callable[[str], None],
    *,
    interval_s: float,
    timeout_s: float,
    stall_timeout_s: float,
) -> str:
    """Watch a process until it fails; the reason why it counts as failed.

    Its end shows at once, as the connection breaks and cannot be made again. A hang shows when no beat came
    for `timeout_s`, a standstill when its training thread computes for `stall_timeout_s` between collectives
    (0 = never). A watcher that was itself stopped meanwhile finds the beats that came in the kernel's buffer
    and accuses nobody: after a silence it always looks once more.

    Args:
        heard: called with what the process says it is doing.
    """
    while True:
        link = await Link.open(target.address, _CONNECT_S)
        if link is None:
            return "its process ended"
        link.send(greeting)
        try:
            verdict = await _listen(link, heard, timeout_s - interval_s, interval_s, stall_timeout_s)
        finally:
            link.close()
        if verdict:
            return verdict


async def _listen(
    link: Link, heard: Callable[[str], None], silence_s: float, once_more_s: float, stall_timeout_s: float
) -> str:
    """Beats of one connection; the verdict is "" when it merely broke."""
    patience_s = silence_s
    while True:
        try:
            beat = await link.receive(patience_s)
        except TimeoutError:
            if patience_s == once_more_s:
                return f"silent for {silence_s + once_more_s:g} s"
            patience_s = once_more_s
            continue
        if not isinstance(beat, Beat):
            return ""
        heard(beat.doing)
        patience_s = silence_s
        if 0 < stall_timeout_s < beat.computing_s:
            return f"reached no collective for {beat.computing_s:.0f} s"
