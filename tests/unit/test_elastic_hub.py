"""The hub forms the right views whatever is lost, hangs, leaves or comes, or stops with a reason."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from unirl_scale.train.elastic.hub import Hub, Rules
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
from unirl_scale.train.elastic.view import Member, View

TIMEOUT_S = 3.0


def member(slot: int, generation: int = 0, host: str = "host") -> Member:
    return Member(
        slot=slot, uid=f"u{slot}.{generation}", node=host, host=host, pid=100 + slot, address=f"ip:{slot}"
    )


@dataclass
class Job:
    """A hub, the time, and every message that it sent."""

    world: int = 3
    min_ranks: int = 1
    claimed: list[int] = field(default_factory=list)
    refuse_claims: bool = False
    now_s: float = 100.0
    sent: list[tuple[str, Message]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.hub = Hub(self.rules(), None, {}, self.now_s)

    def rules(self) -> Rules:
        return Rules(
            world=self.world,
            min_ranks=self.min_ranks,
            usable=lambda ranks: min(ranks, self.world),
            max_restarts_per_step=3,
            heartbeat_timeout_s=TIMEOUT_S,
            regroup_timeout_s=20.0,
            wait_timeout_s=60.0,
            claim=self.claim,
            open_store=lambda: "ip:store",
        )

    def claim(self, view: View | None, present: Collection[str]) -> int | None:
        self.claimed.append(view.incarnation + 1 if view else 1)
        return None if self.refuse_claims else self.claimed[-1]

    def take_over(self, view: View, left: Collection[str] = (), **lost: str) -> None:
        dead = {uid.replace("_", "."): (why, "step 3, reduce") for uid, why in lost.items()}
        self.hub = Hub(self.rules(), view, dead, self.now_s, left)

    def hello(self, *members: Member, incarnation: int = 0) -> None:
        for each in members:
            self.hub.hello(each, incarnation, self.now_s)
        self.sent += self.hub.take()

    def say(self, who: Member, message: Message) -> None:
        self.hub.receive(who.uid, message, self.now_s)
        self.sent += self.hub.take()

    def ready(self, *members: Member, incarnation: int = 0, step: int = 0, error: str = "") -> None:
        for each in members:
            self.say(each, Ready(incarnation=incarnation, step=step, error=error))

    def lose(self, who: Member) -> None:
        self.hub.gone(who.uid, self.now_s)
        self.sent += self.hub.take()

    def wait(self, seconds: float, *heard: Member) -> None:
        """Ticks, with members that are alive but not ready."""
        for _ in range(round(seconds / 0.5)):
            self.now_s += 0.5
            for each in heard:
                self.hub.receive(each.uid, Alive(doing="step 4, score"), self.now_s)
            self.hub.tick(self.now_s)
        self.sent += self.hub.take()

    def start(self, *members: Member) -> View:
        self.hello(*members)
        self.ready(*members)
        return self.view

    @property
    def view(self) -> View:
        assert self.hub.view is not None
        return self.hub.view

    @property
    def slots(self) -> list[int]:
        return [m.slot for m in self.view.members]

    def got(self, who: Member, kind: type[Message]) -> list[Message]:
        return [message for uid, message in self.sent if uid == who.uid and isinstance(message, kind)]


A, B, C = member(0), member(1), member(2)


def test_the_first_view_waits_for_every_rank_and_orders_them_by_slot() -> None:
    job = Job()
    job.hello(C, A, B)
    job.ready(C, A)
    assert job.hub.view is None
    job.ready(B)
    assert (job.slots, job.view.incarnation, job.view.store, job.view.losses) == (
        [0, 1, 2],
        1,
        "ip:store",
        (),
    )
    assert all(job.got(each, Formed) == [Formed(view=job.view)] for each in (A, B, C))
    assert [job.view.watched_by(m.uid) for m in job.view.members] == [C, A, B]


def test_a_rank_that_does_not_come_is_named() -> None:
    job = Job()
    job.hello(A, B, C)
    job.ready(A, C)
    job.wait(61, A, C)
    assert job.hub.halted == "ranks 1 did not come within 60 s"
    assert job.got(A, Halt) == [Halt(reason=job.hub.halted)]


def test_the_survivors_of_a_loss_go_on_once_all_have_stopped() -> None:
    job = Job()
    job.start(A, B, C)
    job.lose(B)
    assert job.got(A, Stop) == job.got(C, Stop) == [Stop(incarnation=1, reason="rank 1 was lost")]
    job.ready(A, incarnation=1, step=7, error="all_gather: connection closed")
    assert job.view.incarnation == 1  # C has not stopped yet
    job.say(C, Ready(incarnation=1, step=7, watched=B.uid, heard="step 8, reduce"))
    assert (job.view.incarnation, job.slots, job.view.step, job.view.attempts) == (2, [0, 2], 7, 0)
    (loss,) = job.view.losses
    expected = "rank 1, slot 1 (node host, pid 101): its process ended, last in step 8, reduce"
    assert str(loss) == expected


def test_what_a_lost_rank_was_doing_is_known_whichever_news_comes_first() -> None:
    job = Job()
    job.start(A, B, C)
    job.say(C, Ready(incarnation=1, step=7, error="broken", watched=B.uid, heard="step 8, reduce"))
    job.lose(B)
    job.ready(A, incarnation=1, step=7)
    assert job.view.losses[0].doing == "step 8, reduce"


def test_a_hung_rank_is_evicted_and_killed_on_its_host() -> None:
    job = Job()
    far = member(2, host="far")
    job.start(A, B, far)
    job.say(A, Suspect(uid=far.uid, reason="silent for 3 s", doing="step 2, rollout"))
    assert job.got(far, Halt) and not job.got(A, Kill) and not job.got(B, Kill)
    again = member(2, generation=1, host="far")
    job.hello(again)
    assert job.got(again, Kill) == [Kill(member=far)]
    job.ready(A, B, incarnation=1)
    assert job.slots == [0, 1]
    job.say(A, Suspect(uid=B.uid, reason="silent for 3 s", doing=""))
    assert job.got(A, Kill) == [Kill(member=B)]
    assert job.got(A, Stop)[-1] == Stop(incarnation=2, reason="rank 1 was lost")


def test_a_rank_that_hangs_while_the_others_gather_is_evicted() -> None:
    job = Job()
    job.start(A, B, C)
    job.lose(C)
    job.ready(A, incarnation=1, step=3)
    job.wait(TIMEOUT_S, A)
    assert job.view.incarnation == 1
    job.wait(0.5, A)
    assert job.slots == [0] and job.got(A, Kill) == [Kill(member=C), Kill(member=B)]
    assert [loss.reason for loss in job.view.losses] == ["its process ended", "silent for 3.5 s"]


def test_a_rank_that_is_alive_but_does_not_stop_is_evicted_later() -> None:
    job = Job()
    job.start(A, B, C)
    job.lose(C)
    job.ready(A, incarnation=1, step=3)
    job.wait(20, A, B)
    assert job.view.incarnation == 1
    job.wait(1, A, B)
    assert job.slots == [0]
    assert str(job.view.losses[1]).endswith("did not stop within 20 s, last in step 4, score")


def test_a_second_loss_during_recovery_is_in_the_same_view() -> None:
    job = Job()
    job.start(A, B, C)
    job.lose(B)
    job.ready(A, incarnation=1)
    job.lose(C)
    assert (job.slots, len(job.view.losses)) == ([0], 2)


def test_a_rank_that_leaves_a_view_by_itself_ends_it_and_stays_in_the_next() -> None:
    job = Job()
    job.start(A, B, C)
    job.ready(B, incarnation=1, step=5, error="exchange: timed out")
    reason = "rank 1 left: exchange: timed out"
    assert job.got(A, Stop) == [Stop(incarnation=1, reason=reason)]
    job.ready(A, C, incarnation=1, step=4)
    assert (job.slots, job.view.reason, job.view.step) == ([0, 1, 2], reason, 4)


def test_a_spare_takes_the_place_at_once() -> None:
    job = Job()
    spare = member(3)
    job.start(A, B, C)
    job.hello(spare)
    job.ready(spare)
    assert job.view.incarnation == 1 and not job.got(A, Regroup)  # it would add no rank
    job.lose(A)
    job.ready(B, C, incarnation=1, step=1)
    assert (job.slots, job.view.bench) == ([1, 2, 3], ())
    assert job.got(spare, Formed) == [Formed(view=job.view)]


def test_a_rank_that_comes_back_is_asked_in_at_a_step_boundary() -> None:
    job = Job()
    job.start(A, B, C)
    job.lose(B)
    job.ready(A, C, incarnation=1, step=2)
    again = member(1, generation=1)
    job.hello(again)
    assert not job.got(A, Regroup)  # it still imports
    job.ready(again)
    assert job.got(A, Regroup) == job.got(C, Regroup) == [Regroup(incarnation=2, reason="1 more to train on")]
    assert job.view.incarnation == 2
    job.ready(A, C, incarnation=2, step=3)
    assert (job.slots, job.view.attempts, job.view.losses) == ([0, 1, 2], 0, ())
    assert job.view.members[1] == again


def test_who_trained_before_keeps_its_rank_when_there_are_more_than_needed() -> None:
    job = Job(world=2)
    job.start(A, B)
    job.hello(C)
    job.ready(C)
    again = member(0, generation=1)
    job.lose(A)
    job.hello(again)
    job.ready(again)
    job.ready(B, incarnation=1)
    assert job.slots == [0, 1] and job.view.members[1] == B  # the lowest newcomer, and B
    assert [m.slot for m in job.view.bench] == [2]


def test_fewer_than_min_ranks_wait_for_others_and_then_stop_with_the_arithmetic() -> None:
    job = Job(min_ranks=3)
    job.start(A, B, C)
    job.lose(C)
    job.ready(A, B, incarnation=1, step=6)
    job.wait(30, A, B)
    assert job.view.incarnation == 1 and not job.hub.halted
    again = member(2, generation=1)
    job.hello(again)
    job.ready(again)
    assert (job.view.incarnation, job.slots) == (2, [0, 1, 2])
    job.lose(again)
    job.ready(A, B, incarnation=2, step=7)
    job.wait(61, A, B)
    assert job.hub.halted.startswith("2 ranks are left, 2 of which a layout can use; elastic.min_ranks is 3")


def test_three_recoveries_without_a_step_are_the_last() -> None:
    job = Job(world=1)
    for attempt in range(4):
        job.hello(A, incarnation=attempt)
        job.ready(A, incarnation=attempt, step=5 if attempt else 0, error="it broke" if attempt else "")
    assert job.view.incarnation == 4 and job.view.attempts == 2
    job.ready(A, incarnation=4, step=6, error="it broke")  # a step was completed
    assert (job.view.attempts, job.view.step) == (0, 6)
    for attempt in range(3):
        job.ready(A, incarnation=5 + attempt, step=6, error="it broke")
    assert job.view.attempts == 3 and not job.hub.halted
    job.ready(A, incarnation=8, step=6, error="it broke")
    expected = "3 recoveries in a row completed no step after step 6; the last reason: rank 0 left: it broke"
    assert job.hub.halted == expected


def test_a_successor_gathers_the_others_without_the_lost_hub() -> None:
    job = Job()
    view = job.start(A, B, C)
    job.take_over(view, u0_0="its process ended")
    job.hello(B, C, incarnation=1)
    assert job.got(B, Kill) == [Kill(member=A)]  # it may only hang
    assert job.got(C, Stop) == [Stop(incarnation=1, reason="the hub was lost")]
    job.ready(B, incarnation=1, step=2)
    assert job.view.incarnation == 1
    job.ready(C, incarnation=1, step=2)
    assert (job.slots, [loss.rank for loss in job.view.losses]) == ([1, 2], [0])


def test_a_successor_neither_waits_for_nor_kills_who_left_in_peace() -> None:
    job = Job()
    view = job.start(A, B, C)
    job.take_over(view, left=[A.uid])
    job.hello(C, incarnation=1)
    job.ready(C, incarnation=1, step=2)
    assert job.view.incarnation == 1, "B may still come"
    job.hub.departed(B.uid)
    job.sent += job.hub.take()
    assert (job.slots, job.view.losses) == ([2], ())
    assert job.got(C, Kill) == []


def test_a_successor_does_not_wait_for_ever_for_those_who_never_come() -> None:
    job = Job()
    view = job.start(A, B, C)
    job.take_over(view, u0_0="its process ended")
    job.hello(B, incarnation=1)
    job.ready(B, incarnation=1, step=2)
    job.wait(TIMEOUT_S + 0.5, B)
    assert job.slots == [1]


def test_a_successor_learns_of_a_view_that_only_others_have_heard_of() -> None:
    job = Job()
    first = job.start(A, B, C)
    job.lose(C)
    job.ready(A, B, incarnation=1, step=4)
    second = job.view
    job.take_over(first, u0_0="its process ended")
    job.hello(B, incarnation=2)
    job.say(B, Formed(view=second))
    job.ready(B, incarnation=2, step=4)
    assert (job.view.incarnation, job.slots) == (3, [1])  # C, not in the second view, is not waited for


def test_a_part_that_was_cut_off_ends() -> None:
    job = Job()
    job.start(A, B, C)
    job.lose(A)
    job.refuse_claims = True
    job.ready(B, C, incarnation=1)
    assert job.hub.halted == "another part of the job has gone on; this one is cut off from it and ends"
    assert job.claimed[-1] == 2


def test_an_evicted_process_that_returns_is_told() -> None:
    job = Job()
    job.start(A, B, C)
    job.say(A, Suspect(uid=C.uid, reason="silent", doing=""))
    job.ready(A, B, incarnation=1)
    job.sent.clear()
    job.hello(C, incarnation=1)
    (halt,) = job.got(C, Halt)
    assert isinstance(halt, Halt) and "was left behind after view 1" in halt.reason
    job.ready(C, incarnation=1)
    assert job.slots == [0, 1] and job.view.incarnation == 2


def test_a_rank_that_leaves_in_peace_is_no_failure() -> None:
    job = Job()
    job.start(A, B, C)
    job.ready(A, B, incarnation=1, step=0)
    job.say(C, Leave())
    assert (job.slots, job.view.attempts, job.view.losses) == ([0, 1], 0, ())


def test_training_is_over_when_all_are_done_and_spares_are_told() -> None:
    job = Job()
    spare = member(3)
    job.start(A, B, C)
    job.hello(spare)
    job.ready(spare)
    job.say(A, Done())
    job.lose(A)  # its process ends
    assert not job.hub.over
    job.say(B, Done())
    job.lose(C)  # too late to matter: whoever is done has passed the last collective
    assert job.hub.over and job.got(spare, Over) == [Over()]
    assert job.view.incarnation == 1 and not job.got(B, Stop)
