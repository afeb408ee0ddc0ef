"""Membership: what the training thread asks of the control plane, and tells it."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType

from unirl_scale.comm.breaker import Breaker
from unirl_scale.core.errors import ElasticError, MembershipChanged, StopRequested
from unirl_scale.core.progress import Progress
from unirl_scale.train.elastic.control import Control
from unirl_scale.train.elastic.directory import Directory
from unirl_scale.train.elastic.hub import Rules
from unirl_scale.train.elastic.links import own_address
from unirl_scale.train.elastic.messages import Done, Leave, Ready
from unirl_scale.train.elastic.processes import process_uid
from unirl_scale.train.elastic.seen import ControlSettings, Seen
from unirl_scale.train.elastic.view import Member, View


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """Where this process comes from.

    Attributes:
        slot: the place that the launcher gave it.
        node: name of its node.
        run: id of the job, the same for all its processes and no other job's.
        meets_at: a host of the job, which tells this one which of its addresses the others can reach.
    """

    slot: int
    node: str
    run: str
    meets_at: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How patient the control plane is; see `ElasticConfig`."""

    interval_s: float
    timeout_s: float
    stall_timeout_s: float


class Membership:
    """This process in the job; a context manager that ends the control thread.

    The training thread goes from view to view: `next_view` waits for one, `check` and every collective raise
    once it is over, and `next_view` is called again.

    Args:
        progress: of the training thread. `check` is added to its observers.
    """

    def __init__(
        self, seat: Seat, pace: Pace, rules: Rules, directory: Directory, progress: Progress
    ) -> None:
        listener = socket.create_server((own_address(seat.meets_at), 0), backlog=1024)
        host, port = listener.getsockname()[:2]
        pid = os.getpid()
        self.me = Member(
            slot=seat.slot,
            uid=process_uid(pid),
            node=seat.node,
            host=socket.gethostname(),
            pid=pid,
            address=f"{host}:{port}",
        )
        self.progress, self._breaker = progress, Breaker()
        settings = ControlSettings(
            run=seat.run,
            founder=seat.slot == 0,
            rules=rules,
            directory=directory,
            interval_s=pace.interval_s,
            timeout_s=pace.timeout_s,
            stall_timeout_s=pace.stall_timeout_s,
            on_stop=self._break,
        )
        self._control = Control(self.me, listener, settings, progress)
        self._interrupted = ""
        self._incarnation = 0  # of the view that this process trains on
        self._control.start()

    def __enter__(self) -> Membership:
        self.progress.observers = (*self.progress.observers, self._observe)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.progress.observers = tuple(o for o in self.progress.observers if o != self._observe)
        self._control.end(timeout_s=3.0)

    # ---- views ----------------------------------------------------------------------------------------
    def next_view(self, step: int, error: str = "") -> tuple[View, Breaker] | None:
        """Wait for a view in which this process has a rank.

        Args:
            step: steps completed so far.
            error: why the last view was left; "" when it was left as asked, or there was none.

        Returns:
            The view, and what ends its collectives: pass it to `connect`. None when training is over.

        Raises:
            ElasticError: the job cannot go on, or not with this process.
            StopRequested: `interrupt` was called.
        """
        self.progress.enter("regroup")
        self._control.say(Ready(incarnation=self._incarnation, step=step, error=error))
        seen = self._wait(
            lambda seen: seen.over or bool(seen.halted or self._interrupted) or self._has_rank(seen)
        )
        if self._interrupted:
            raise StopRequested(self._interrupted)
        if seen.halted:
            raise ElasticError(seen.halted)
        if seen.over:
            return None
        assert seen.view is not None
        port = seen.view.store.rpartition(":")[2]
        self._breaker = Breaker(int(port) if port else None)
        self._incarnation = seen.view.incarnation
        over = self._control.seen.stopped or self._interrupted  # while this thread woke up
        if over:
            self._breaker.break_now(over)
        return seen.view, self._breaker

    def check(self) -> None:
        """Raises:
        MembershipChanged: the view is over.
        """
        if self._control.seen.stopped:
            raise MembershipChanged(self._control.seen.stopped)

    @property
    def seen(self) -> Seen:
        """What the control thread knows; it may change at any moment."""
        return self._control.seen

    @property
    def regroup(self) -> str:
        """Why the members are asked to leave the view together, "" when they are not. Ranks hear of it at
        different times: act on it once all agree."""
        return self._control.seen.regroup

    def interrupt(self, reason: str) -> None:
        """End the collectives of this process, or its wait for a view; called from another thread."""
        with self._control.changed:
            self._interrupted = reason
            self._control.changed.notify_all()
        self._breaker.break_now(reason)

    def leave(self) -> None:
        """Go in peace; the others go on."""
        self._control.say(Leave())

    def done(self, timeout_s: float) -> None:
        """Training is complete; wait until all members say so, for a hub must not go before."""
        self._control.say(Done())
        self._wait(lambda seen: seen.over or bool(seen.halted), timeout_s)

    # ---- inside ---------------------------------------------------------------------------------------
    def _observe(self, progress: Progress) -> None:
        if progress.phase != "regroup":
            self.check()

    def _has_rank(self, seen: Seen) -> bool:
        view = seen.view
        return (
            view is not None
            and view.incarnation > self._incarnation
            and view.rank_of(self.me.uid) is not None
        )

    def _wait(self, until: Callable[[Seen], bool], timeout_s: float | None = None) -> Seen:
        with self._control.changed:
            self._control.changed.wait_for(lambda: until(self._control.seen), timeout_s)
            return self._control.seen

    def _break(self, reason: str) -> None:
        self._breaker.break_now(reason)
