"""The hub: decides who is in the next view. A state machine without sockets, threads or clocks.

The hub alternates between two states:

    gathering   nobody trains: the members of the last view stop and say Ready, newcomers say Hello and Ready.
                The next view forms once everyone who may still come has come.
    running     the members of the view train. A loss, or a member that leaves by itself, ends the view: all
                are told to Stop, and the hub gathers again. So it does when newcomers wait who would get
                ranks, but then the members are asked to leave together, at their next step boundary.

Whoever drives the hub passes in what happens, with the time, and sends what `take` hands out.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace

from unirl_scale.train.elastic.messages import (
    Alive,
    Done,
    Formed,
    Halt,
    Kill,
    Leave,
    Message,
    Over,
    Ready,
    Regroup,
    Stop,
    Suspect,
)
from unirl_scale.train.elastic.view import Loss, Member, View


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """What the hub goes by.

    Attributes:
        world: ranks that the layout asked for spans; the first view has as many.
        min_ranks: fewest ranks of a later view; fewer wait.
        usable: ranks that the best layout on so many live ones uses; 0 = none is legal.
        max_restarts_per_step: recoveries in a row without a completed step.
        claim: see `Directory.claim`.
        open_store: opens a fresh store for the members to meet in, and returns its `ip:port`.
    """

    world: int
    min_ranks: int
    usable: Callable[[int], int]
    max_restarts_per_step: int
    heartbeat_timeout_s: float
    regroup_timeout_s: float
    wait_timeout_s: float
    claim: Callable[[View | None, Collection[str]], int | None]
    open_store: Callable[[], str]


@dataclass(slots=True, kw_only=True)
class _Seat:
    """A process that has a link to this hub."""

    member: Member
    heard_s: float
    doing: str = ""
    ready: Ready | None = None
    done: bool = False


@dataclass(slots=True, kw_only=True)
class _Gathering:
    """An attempt to form the next view: who of the last one may still come, and who was lost."""

    reason: str
    since_s: float
    expected: dict[str, Member] = field(default_factory=dict)
    losses: dict[str, Loss] = field(default_factory=dict)


class Hub:
    """Drives the job from view to view.

    Args:
        view: the newest view that this process took part in; None for the founder of a job.
        lost: members of `view` that are known to be gone: uid -> (how that was noticed, what it was doing).
        now_s: monotonic clock.
        left: members of `view` that went in peace.

    Attributes:
        view: the newest view formed.
        halted: why the job cannot go on; "" while it can.
        over: training is complete.
    """

    def __init__(
        self,
        rules: Rules,
        view: View | None,
        lost: Mapping[str, tuple[str, str]],
        now_s: float,
        left: Collection[str] = (),
    ) -> None:
        self.rules, self.view, self.halted, self.over = rules, view, "", False
        self._seats: dict[str, _Seat] = {}
        self._outbox: list[tuple[str, Message]] = []
        self._condemned: dict[str, Member] = {}  # lost, and nobody was asked to kill them yet
        self._asked_to_regroup = False
        self._gathering: _Gathering | None = _Gathering(reason="", since_s=now_s)
        if view is not None:
            gathering = self._gather("the hub was lost", now_s)
            for uid in left:
                gathering.expected.pop(uid, None)
            for uid, (reason, doing) in lost.items():
                self._record(uid, reason, doing)

    # ---- what happens ---------------------------------------------------------------------------------
    def take(self) -> list[tuple[str, Message]]:
        """Messages to send since the last call: (uid of the receiver, message)."""
        taken, self._outbox = self._outbox, []
        return taken

    def hello(self, member: Member, incarnation: int, now_s: float) -> None:
        """A process has a link to this hub now; `incarnation` is the newest view that it took part in."""
        uid, gathering = member.uid, self._gathering
        if self.halted or self.over:
            self._send(uid, Halt(reason=self.halted) if self.halted else Over())
        elif incarnation and not self._belongs(uid, incarnation):
            reason = f"{member} was left behind after view {incarnation}; the others went on without it"
            self._send(uid, Halt(reason=reason))
        else:
            self._seats[uid] = _Seat(member=member, heard_s=now_s)
            self._kill()
            if gathering is not None and uid in gathering.expected:
                self._send(uid, Stop(incarnation=incarnation, reason=gathering.reason))

    def receive(self, uid: str, message: Message, now_s: float) -> None:
        """A message over the link of a process that said hello."""
        seat = self._seats.get(uid)
        if seat is None:
            return
        seat.heard_s = now_s
        match message:
            case Ready():
                self._ready(seat, message, now_s)
            case Suspect():
                self._evict(message.uid, message.reason, message.doing, now_s)
            case Leave():
                self._depart(seat, now_s)
            case Done():
                seat.done = True
                self._finish()
            case Alive():
                seat.doing = message.doing
            case Formed():
                self._adopt(message.view, now_s)
            case _:
                pass
        self._form()

    def gone(self, uid: str, now_s: float) -> None:
        """The link of a process broke, which counts as its end: links break only with a process or a host."""
        if uid in self._seats:
            self._evict(uid, "its process ended", "", now_s)
            self._form()

    def unreachable(self, uid: str, now_s: float) -> None:
        """A member of the last view does not answer to the successor of a lost hub."""
        if uid not in self._seats:
            self._evict(uid, "unreachable", "", now_s)
            self._form()

    def departed(self, uid: str) -> None:
        """A member of the last view told the successor of a lost hub that it has left."""
        if self._gathering is not None:
            self._gathering.expected.pop(uid, None)
            self._form()

    def tick(self, now_s: float) -> None:
        """Time passes; call at least every heartbeat interval."""
        gathering = self._gathering
        if gathering is None or self._ended:
            return
        waited_s = now_s - gathering.since_s
        for uid in list(gathering.expected):
            seat = self._seats.get(uid)
            silent_s = now_s - max(seat.heard_s if seat else 0.0, gathering.since_s)
            if silent_s > self.rules.heartbeat_timeout_s:
                self._evict(uid, f"silent for {silent_s:.1f} s", seat.doing if seat else "", now_s)
            elif seat is not None and seat.ready is None and waited_s > self.rules.regroup_timeout_s:
                reason = f"did not stop within {self.rules.regroup_timeout_s:g} s"
                self._evict(uid, reason, seat.doing, now_s)
        self._form()
        if self._gathering is not None and waited_s > self.rules.wait_timeout_s:
            self._halt(self._missing(self._gathering))

    # ---- members --------------------------------------------------------------------------------------
    @property
    def _ended(self) -> bool:
        return bool(self.halted) or self.over

    def _belongs(self, uid: str, incarnation: int) -> bool:
        """Whether a process that took part in a view may still take part."""
        if uid in self._seats or self.view is None or incarnation > self.view.incarnation:
            return True
        bench = any(member.uid == uid for member in self.view.bench)
        return bench or (self._gathering is not None and uid in self._gathering.expected)

    def _ready(self, seat: _Seat, message: Ready, now_s: float) -> None:
        seat.ready = message
        if self._gathering is not None or self.view is None:
            if self._gathering is not None and message.watched in self._gathering.losses:
                self._record(message.watched, "")
            return
        rank = self.view.rank_of(seat.member.uid)
        if rank is None:
            self._ask_to_regroup(self.view)
        else:
            self._gather(f"rank {rank} left: {message.error}" if message.error else "regrouping", now_s)

    def _depart(self, seat: _Seat, now_s: float) -> None:
        uid = seat.member.uid
        if self._gathering is None and self.view is not None and self.view.rank_of(uid) is not None:
            self._gather(f"{seat.member} left", now_s)
        del self._seats[uid]
        if self._gathering is not None:
            self._gathering.expected.pop(uid, None)

    def _evict(self, uid: str, reason: str, doing: str, now_s: float) -> None:
        """A process is lost, or as good as lost: the next view is without it, and it must not run on."""
        seat = self._seats.pop(uid, None)
        training_ends = self._ended or any(other.done for other in self._seats.values())
        if training_ends or (seat is not None and seat.done):
            self._finish()
            return
        rank = self.view.rank_of(uid) if self.view else None
        if self._gathering is None and rank is not None:
            self._gather(f"rank {rank} was lost", now_s)
        self._record(uid, reason, doing)
        if seat is not None:
            self._send(uid, Halt(reason=f"{seat.member} was evicted: {reason}"))
        self._kill()

    def _record(self, uid: str, reason: str, doing: str = "") -> None:
        """Note a loss of the last view. Noticed twice, by its link and by its watcher, it is one loss."""
        if self._gathering is None or self.view is None:
            return
        losses, member = self._gathering.losses, self._gathering.expected.pop(uid, None)
        if not doing:
            said = (seat.ready for seat in self._seats.values())
            doing = next((ready.heard for ready in said if ready and ready.watched == uid), "")
        if member is not None:
            self._condemned[uid] = member
            losses[uid] = Loss(member=member, rank=self.view.rank_of(uid), doing=doing, reason=reason)
        elif uid in losses and not losses[uid].doing:
            losses[uid] = replace(losses[uid], doing=doing)

    def _kill(self) -> None:
        """Ask a process of the same host to end those who must not run on. Where none is left, or none has
        come yet, the number of the next view is the fence."""
        by_host = {seat.member.host: uid for uid, seat in reversed(self._seats.items())}
        for uid, member in list(self._condemned.items()):
            if member.host in by_host:
                self._send(by_host[member.host], Kill(member=self._condemned.pop(uid)))

    # ---- views ----------------------------------------------------------------------------------------
    def _gather(self, reason: str, now_s: float) -> _Gathering:
        """End the view."""
        assert self.view is not None
        self._asked_to_regroup = False
        expected = {member.uid: member for member in self.view.members}
        self._gathering = _Gathering(reason=reason, since_s=now_s, expected=expected)
        for uid in expected:
            if uid in self._seats:
                self._send(uid, Stop(incarnation=self.view.incarnation, reason=reason))
        return self._gathering

    def _adopt(self, view: View, now_s: float) -> None:
        """A member knows a newer view, formed by a hub that was lost before everyone heard of it."""
        if self.view is None or view.incarnation <= self.view.incarnation or self._gathering is None:
            return
        lost = self._gathering.losses
        self.view = view
        self._gather(self._gathering.reason, now_s)
        for uid, loss in lost.items():
            self._record(uid, loss.reason, loss.doing)

    def _ask_to_regroup(self, view: View) -> None:
        """Newcomers wait: worth a new view when it would have more ranks."""
        ranks = len(view.members)
        waiting = sum(1 for uid, seat in self._seats.items() if seat.ready and view.rank_of(uid) is None)
        if self._asked_to_regroup or self.rules.usable(ranks + waiting) <= ranks:
            return
        self._asked_to_regroup = True
        for member in view.members:
            reason = f"{waiting} more to train on"
            self._send(member.uid, Regroup(incarnation=view.incarnation, reason=reason))

    def _form(self) -> None:
        """Form the next view once all who may still come are ready."""
        gathering = self._gathering
        if gathering is None or self._ended:
            return
        if any(uid not in self._seats or not self._seats[uid].ready for uid in gathering.expected):
            return
        present = [seat for seat in self._seats.values() if seat.ready]
        used = self.rules.usable(len(present)) if present else 0
        if used < (self.rules.world if self.view is None else max(1, self.rules.min_ranks)):
            return
        step, attempts = self._progress(gathering, present)
        if attempts > self.rules.max_restarts_per_step:
            last = "; ".join(map(str, gathering.losses.values())) or gathering.reason
            count = f"{attempts - 1} recoveries in a row completed no step after step {step}"
            self._halt(f"{count}; the last reason: {last}")
            return
        # Who trained before goes first: it has the state in memory.
        seats = sorted(
            present, key=lambda seat: (seat.member.uid not in gathering.expected, seat.member.slot)
        )
        ranked = sorted((seat.member for seat in seats[:used]), key=lambda member: member.slot)
        number = self.rules.claim(self.view, [seat.member.uid for seat in present])
        if number is None:
            self._halt("another part of the job has gone on; this one is cut off from it and ends")
            return
        self.view = View(
            incarnation=number,
            members=tuple(ranked),
            bench=tuple(seat.member for seat in seats[used:]),
            store=self.rules.open_store(),
            step=step,
            attempts=attempts,
            losses=tuple(gathering.losses.values()),
            reason=_lost(gathering) or gathering.reason,
        )
        self._gathering = None
        for member in ranked:
            self._seats[member.uid].ready = None
        for seat in present:
            self._send(seat.member.uid, Formed(view=self.view))

    def _progress(self, gathering: _Gathering, present: list[_Seat]) -> tuple[int, int]:
        """(steps completed by all who trained, recoveries in a row without a completed step)."""
        if self.view is None:
            return 0, 0
        left = [seat.ready for seat in present if seat.ready and seat.member.uid in gathering.expected]
        step = max(min((ready.step for ready in left), default=0), self.view.step)
        failed = bool(gathering.losses) or any(ready.error for ready in left)
        return step, self.view.attempts + 1 if failed and step == self.view.step else 0

    # ---- ends -----------------------------------------------------------------------------------------
    def _finish(self) -> None:
        """Over once every member that is still there is done."""
        if self.view is None or self._ended:
            return
        live = [seat for uid, seat in self._seats.items() if self.view.rank_of(uid) is not None]
        if all(seat.done for seat in live):
            self.over = True
            for uid in self._seats:
                self._send(uid, Over())

    def _halt(self, reason: str) -> None:
        self.halted = reason
        for uid in self._seats:
            self._send(uid, Halt(reason=reason))

    def _missing(self, gathering: _Gathering) -> str:
        """Who did not come, for the error."""
        present = {seat.member.slot for seat in self._seats.values() if seat.ready}
        within = f"within {self.rules.wait_timeout_s:g} s"
        if self.view is None:
            absent = sorted(set(range(self.rules.world)) - present)
            names = ", ".join(map(str, absent[:8])) + (", ..." if len(absent) > 8 else "")
            return f"ranks {names} did not come {within}"
        return (
            f"{len(present)} ranks are left, {self.rules.usable(len(present))} of which a layout can use; "
            f"elastic.min_ranks is {self.rules.min_ranks}, and no more came {within}; "
            f"lost: {'; '.join(map(str, gathering.losses.values())) or 'nobody'}"
        )

    def _send(self, uid: str, message: Message) -> None:
        self._outbox.append((uid, message))


def _lost(gathering: _Gathering) -> str:
    """`rank 1, rank 2 lost`; "" when nobody was."""
    ranks = ", ".join(f"rank {loss.rank}" for loss in gathering.losses.values())
    return f"{ranks} lost" if ranks else ""
