"""Watching one rank: beats from it, and a verdict when they stop."""

from __future__ import annotations

import time

from unirl_scale.core.progress import Progress
from unirl_scale.train.elastic.links import Link
from unirl_scale.train.elastic.messages import Beat, Watch
from unirl_scale.train.elastic.view import Member

# (why the watched rank counts as failed, what it was last heard doing)
Verdict = tuple[str, str]

_CONNECT_S = 1.0


async def send_beats(link: Link, progress: Progress, interval_s: float) -> None:
    """Tell a watcher what this process does, until it goes away."""
    while True:
        computing_s = 0.0 if progress.operation else time.monotonic() - progress.since_s
        link.send(Beat(doing=progress.describe(), computing_s=computing_s))
        try:
            if await link.receive(interval_s) is None:
                return
        except TimeoutError:
            continue


async def watch(
    target: Member, run: str, uid: str, *, interval_s: float, timeout_s: float, stall_timeout_s: float
) -> Verdict:
    """Watch a process until it fails.

    Its end shows at once, as the connection breaks and cannot be made again. A hang shows when no beat came
    for `timeout_s`, a standstill when its training thread computes for `stall_timeout_s` between collectives
    (0 = never). A watcher that was itself stopped meanwhile finds the beats that came in the kernel's buffer
    and accuses nobody: after a silence it always looks once more.
    """
    doing = ""
    while True:
        link = await Link.open(target.address, _CONNECT_S)
        if link is None:
            return "its process ended", doing
        link.send(Watch(run=run, uid=uid))
        try:
            verdict, doing = await _listen(
                link,
                doing,
                silence_s=timeout_s - interval_s,
                once_more_s=interval_s,
                stall_timeout_s=stall_timeout_s,
            )
        finally:
            link.close()
        if verdict:
            return verdict, doing


async def _listen(
    link: Link, doing: str, *, silence_s: float, once_more_s: float, stall_timeout_s: float
) -> Verdict:
    """Beats of one connection; the verdict is "" when it merely broke."""
    patience_s = silence_s
    while True:
        try:
            beat = await link.receive(patience_s)
        except TimeoutError:
            if patience_s == once_more_s:
                return f"silent for {silence_s + once_more_s:g} s", doing
            patience_s = once_more_s
            continue
        if not isinstance(beat, Beat):
            return "", doing
        doing, patience_s = beat.doing, silence_s
        if 0 < stall_timeout_s < beat.computing_s:
            return f"reached no collective for {beat.computing_s:.0f} s", doing
