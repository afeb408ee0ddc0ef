"""View: who is in the job and in which order, as all ranks agree on it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A process of the job.

    Attributes:
        slot: the place that the launcher gave it, which a replacement takes over; ranks are in slot order.
        uid: names this process among all that ever were, see `process_uid`.
        node: name of its node, for people and for placement.
        host: name of its host; processes of one host can signal each other.
        pid: process id on that host.
        address: `ip:port` of its control thread.
    """

    slot: int
    uid: str
    node: str
    host: str
    pid: int
    address: str

    def __str__(self) -> str:
        return f"slot {self.slot} (node {self.node}, pid {self.pid})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """A member that is gone.

    Attributes:
        rank: its rank in the view that lost it; None for a spare.
        doing: step, phase and collective that it was last heard in; "" when nobody knows.
        reason: how the loss was noticed.
    """

    member: Member
    rank: int | None
    doing: str
    reason: str

    def __str__(self) -> str:
        who = "spare" if self.rank is None else f"rank {self.rank}"
        last = f", last in {self.doing}" if self.doing else ""
        return f"{who}, {self.member}: {self.reason}{last}"


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """One incarnation of the job.

    Attributes:
        incarnation: number of the view, rising over the whole life of a run directory.
        members: who has a rank; the index is the rank.
        bench: who waits without one.
        store: `ip:port` of the TCP store in which the members meet.
        step: steps completed by every member when the view was formed.
        attempts: recoveries in a row that completed no step.
        losses: who was lost since the previous view.
        reason: why the previous view ended, "" for the first one.
    """

    incarnation: int
    members: tuple[Member, ...]
    bench: tuple[Member, ...] = ()
    store: str = ""
    step: int = 0
    attempts: int = 0
    losses: tuple[Loss, ...] = ()
    reason: str = ""

    def rank_of(self, uid: str) -> int | None:
        """The rank of a process, None when it has none."""
        return next((rank for rank, member in enumerate(self.members) if member.uid == uid), None)

    def watched_by(self, uid: str) -> Member | None:
        """The member that this one watches: the rank before it, round the ring. None without a peer."""
        rank = self.rank_of(uid)
        return None if rank is None or len(self.members) == 1 else self.members[rank - 1]
