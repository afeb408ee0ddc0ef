"""The control thread of a process: its link to the hub, the rank that it watches, and its hub if it is one.

    every process   listens; keeps a link to the hub; sends beats to whoever watches it
    every member    watches the member before it, round the ring, so that watching costs the same at any size
    one member      is the hub. When it is lost, the first member that is left takes over

The thread owns everything here but `seen`, which the training thread reads under `changed`.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Coroutine
from dataclasses import replace
from typing import Any

from unirl_scale.core.progress import Progress
from unirl_scale.train.elastic.hub import Hub
from unirl_scale.train.elastic.links import Link
from unirl_scale.train.elastic.messages import (
    Alive,
    Announce,
    Done,
    Elsewhere,
    Formed,
    Halt,
    Hello,
    Kill,
    Leave,
    Message,
    Over,
    Ready,
    Regroup,
    Stop,
    Suspect,
    Watch,
    Welcome,
)
from unirl_scale.train.elastic.processes import kill
from unirl_scale.train.elastic.search import ANSWER_S, Found, Search
from unirl_scale.train.elastic.seen import ControlSettings, Seen
from unirl_scale.train.elastic.view import Member, View
from unirl_scale.train.elastic.watching import send_beats, watch

_RETRY_S = 0.05
_LAST_WORDS_S = 1.0  # of a process that fails: it closes its links before it has reported why
_PUBLISHED = 32  # members that a newcomer may ask for the hub


class Control:
    """The control plane in one process.

    Args:
        me: this process.
        listener: the bound socket of its address.
        progress: of the training thread, to tell others what it is doing.
    """

    def __init__(
        self, me: Member, listener: socket.socket, settings: ControlSettings, progress: Progress
    ) -> None:
        self._listener = listener
        self.me, self.settings, self.progress = me, settings, progress
        self.seen, self.changed = Seen(), threading.Condition()
        self._loop, self._ending = asyncio.new_event_loop(), asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._hub: Hub | None = None
        self._links: dict[str, Link] = {}  # of the hub to each process, by uid
        self._uplink: Link | None = None
        self._hub_member: Member | None = None  # who is the hub, as far as known
        self._announced: Member | None = None  # who says that it is
        self._search = Search(settings.run, me)
        self._leaving = False
        self._watched, self._heard = "", ""  # uid of the rank before this one, what it was last heard doing
        self._standing: dict[type, Message] = {}  # said until further notice: repeated to every new hub
        self._watching: asyncio.Task[None] | None = None
        self._thread = threading.Thread(target=self._run, name="elastic", daemon=True)

    # ---- for the training thread ----------------------------------------------------------------------
    def start(self) -> None:
        self._thread.start()

    def say(self, message: Message) -> None:
        """Tell the hub. Ready and Done are repeated to a successor of the hub; a hub that leaves resigns."""
        self._loop.call_soon_threadsafe(self._say, message)

    def end(self, timeout_s: float) -> None:
        """End the thread, once what it said is sent."""
        self._loop.call_soon_threadsafe(lambda: self._start(self._wind_up()))
        self._thread.join(timeout_s)

    # ---- the thread -----------------------------------------------------------------------------------
    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._main())

    async def _main(self) -> None:
        self._start(self._keep_time())
        self._start(self._stay_attached())
        async with await asyncio.start_server(self._serve, sock=self._listener):
            await self._ending.wait()

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _wind_up(self) -> None:
        """Hand over what is queued; a hub waits for the others to hang up first."""
        deadline_s = time.monotonic() + ANSWER_S
        for link in (*self._links.values(), *([self._uplink] if self._uplink else [])):
            await link.flush()
        while self._links.keys() - {self.me.uid} and time.monotonic() < deadline_s:
            await asyncio.sleep(_RETRY_S)
        self._ending.set()

    async def _keep_time(self) -> None:
        while True:
            await asyncio.sleep(self.settings.interval_s)
            if self._hub is not None:
                self._hub.tick(time.monotonic())
                self._post(self._hub)
            if self._uplink is not None and (self.seen.view is None or self.seen.stopped):
                self._uplink.send(Alive(doing=self.progress.describe()))

    def _say(self, message: Message) -> None:
        if isinstance(message, Leave):
            self._leaving = True
            self._resign()
        if isinstance(message, Ready):
            message = replace(message, watched=self._watched, heard=self._heard)
        if isinstance(message, Ready | Done):
            self._standing[type(message)] = message
        if self._uplink is not None:
            self._uplink.send(message)

    def _note(self, **news: object) -> None:
        """Update `seen` and wake the training thread."""
        with self.changed:
            for name, value in news.items():
                setattr(self.seen, name, value)
            self.changed.notify_all()

    # ---- whoever connects -----------------------------------------------------------------------------
    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        link = Link(reader, writer)
        try:
            # Cancelled when the thread ends, which asyncio's server would report as an error.
            with contextlib.suppress(TimeoutError, asyncio.CancelledError):
                first = await link.receive(ANSWER_S)
                if isinstance(first, Hello | Watch | Announce) and first.run == self.settings.run:
                    await self._answer(link, first)
        finally:
            link.close()

    async def _answer(self, link: Link, first: Hello | Watch | Announce) -> None:
        match first:
            case Watch():
                await send_beats(link, self.progress, self.settings.interval_s)
            case Hello() | Announce() if self._leaving:
                link.send(Leave())
                await link.flush()
            case Announce():
                self._yield_to(first.hub)
            case Hello() if self._hub is not None:
                await self._host(self._hub, link, first)
            case Hello():
                if self._hub_member is not None and self._hub_member.uid in first.lost:
                    self._start(self._doubt(self._hub_member))
                link.send(Elsewhere(hub=self._hub_member))
                await link.flush()

    def _yield_to(self, hub: Member) -> None:
        """Somebody took over. Of two that did so at once, the lower slot stays."""
        attached = self._uplink is not None and self._hub_member is not None
        if (attached and self._hub_member == hub) or (self._hub is not None and self.me.slot < hub.slot):
            return
        self._announced, self._hub = hub, None
        self._hang_up()
        self._leave_hub()

    def _resign(self) -> None:
        """A hub that leaves makes way for its successor."""
        for link in self._links.values() if self._hub is not None else ():
            link.send(Leave())
        self._hub = None
        self._hang_up()

    def _hang_up(self) -> None:
        for link in self._links.values():
            link.close()
        self._links.clear()

    # ---- the hub --------------------------------------------------------------------------------------
    def _become_hub(self) -> None:
        view = self.seen.view
        lost = {uid: how for uid, how in self._search.lost.items() if uid not in self._search.left}
        self._hub = Hub(self.settings.rules, view, lost, time.monotonic(), self._search.left)
        self._hub_member = self.me
        self.settings.directory.publish([self.me.address])
        for member in (*view.members, *view.bench) if view is not None else ():
            if member.uid != self.me.uid and member.uid not in self._search.lost:
                self._start(self._announce(self._hub, member))

    async def _announce(self, hub: Hub, member: Member) -> None:
        link = await Link.open(member.address, ANSWER_S)
        if link is None:
            hub.unreachable(member.uid, time.monotonic())
            self._post(hub)
            return
        link.send(Announce(run=self.settings.run, hub=self.me))
        with contextlib.suppress(TimeoutError):
            if isinstance(await link.receive(ANSWER_S), Leave):
                hub.departed(member.uid)
                self._post(hub)
        link.close()

    async def _host(self, hub: Hub, link: Link, hello: Hello) -> None:
        """Serve one process for as long as its link and this hub last."""
        uid = hello.member.uid
        link.send(Welcome(hub=self.me, incarnation=hub.view.incarnation if hub.view else 0))
        self._links[uid] = link
        hub.hello(hello.member, hello.incarnation, time.monotonic())
        self._post(hub)
        while self._hub is hub and (message := await link.receive()) is not None:
            hub.receive(uid, message, time.monotonic())
            self._post(hub)
        if self._hub is hub and self._links.get(uid) is link:
            del self._links[uid]
            hub.gone(uid, time.monotonic())
            self._post(hub)

    def _post(self, hub: Hub) -> None:
        """Send what the hub has to say."""
        for uid, message in hub.take():
            if uid in self._links:
                self._links[uid].send(message)
            if isinstance(message, Formed) and uid == message.view.members[0].uid:
                first = message.view.members[:_PUBLISHED]
                self.settings.directory.publish([self.me.address, *(member.address for member in first)])

    # ---- the way to the hub ---------------------------------------------------------------------------
    async def _stay_attached(self) -> None:
        alone_s, patience_s = time.monotonic(), self.settings.rules.wait_timeout_s
        while not (self.seen.halted or self.seen.over or self._leaving):
            found = await self._seek()
            if found is None:
                if time.monotonic() - alone_s > patience_s:
                    self._halt(f"found no hub of job {self.settings.run} within {patience_s:g} s")
                await asyncio.sleep(_RETRY_S)
                continue
            self._uplink, welcome = found
            self._hub_member = hub = welcome.hub
            self._announced = None
            if self.seen.view is not None and self.seen.view.incarnation > welcome.incarnation:
                self._uplink.send(Formed(view=self.seen.view))
            for message in self._standing.values():
                self._uplink.send(message)
            await self._follow(self._uplink)
            self._uplink.close()
            self._uplink = None
            alone_s = time.monotonic()
            if self._announced is None and self._hub is None:
                self._search.lost.setdefault(hub.uid, ("its process ended", self._heard_of(hub.uid)))

    async def _seek(self) -> Found | None:
        """Ask once whoever may be the hub, or know it; become the hub if that falls to this process."""
        if self._announced is not None:
            announced, self._announced = self._announced, None
            return await self._search.hello(announced)
        view = self.seen.view
        if view is None or view.rank_of(self.me.uid) is None:
            return await self._seek_as_newcomer()
        for member in view.members:
            if member.uid == self.me.uid:
                self._become_hub()
                return await self._search.hello(self.me)
            if member.uid not in self._search.lost:
                found, alive = await self._search.inquire(member.address, member.uid)
                if alive:
                    return found  # or it will be the hub once it has noticed that the old one is lost
                self._search.lost[member.uid] = ("unreachable", self._heard_of(member.uid))
                await self._search.probe(view.members[: view.members.index(self.me)])
        return None

    async def _seek_as_newcomer(self) -> Found | None:
        anybody = False
        for address in self.settings.directory.addresses():
            found, alive = await self._search.inquire(address)
            if found is not None:
                return found
            anybody = anybody or alive
        if anybody or not self.settings.founder:
            return None
        self._become_hub()
        return await self._search.hello(self.me)

    def _heard_of(self, uid: str) -> str:
        return self._heard if uid == self._watched else ""

    def _leave_hub(self) -> None:
        if self._uplink is not None:
            self._uplink.close()

    async def _doubt(self, hub: Member) -> None:
        """Another process takes the hub for dead: find out."""
        if hub.uid not in self._search.lost:
            await self._search.probe([hub])
            if hub.uid in self._search.lost:
                self._leave_hub()

    # ---- what the hub says ----------------------------------------------------------------------------
    async def _follow(self, link: Link) -> None:
        while (message := await link.receive()) is not None:
            match message:
                case Stop() if self._in_view(message.incarnation):
                    self._stop(message.reason)
                case Regroup() if self._in_view(message.incarnation):
                    self._note(regroup=message.reason)
                case Formed():
                    self._enter(message.view)
                case Kill():
                    self._start(self._end(message.member))
                case Leave() if self._hub_member is not None:
                    self._search.left.add(self._hub_member.uid)
                case Halt():
                    self._halt(message.reason)
                    return
                case Over():
                    self._note(over=True)
                    return
                case _:
                    pass

    async def _end(self, member: Member) -> None:
        await asyncio.sleep(_LAST_WORDS_S)
        kill(member)

    def _in_view(self, incarnation: int) -> bool:
        return self.seen.view is not None and self.seen.view.incarnation == incarnation

    def _halt(self, reason: str) -> None:
        self._note(halted=reason)
        self._stop(reason)

    def _stop(self, reason: str) -> None:
        """The view is over; ending collectives may take a while, so not on this thread."""
        if not self.seen.stopped:
            self._note(stopped=reason, stopped_s=time.monotonic())
            threading.Thread(target=self.settings.on_stop, args=(reason,), daemon=True).start()

    def _enter(self, view: View) -> None:
        if view.rank_of(self.me.uid) is not None:
            self._standing.pop(Ready, None)
        self._search.begin(view)
        self._note(view=view, stopped="", regroup="", formed_s=time.monotonic())
        if self._watching is not None:
            self._watching.cancel()
        target = view.watched_by(self.me.uid)
        self._watched, self._heard = target.uid if target else "", ""
        self._watching = self._start(self._watch(view, target)) if target is not None else None

    # ---- the rank before this one ---------------------------------------------------------------------
    async def _watch(self, view: View, target: Member) -> None:
        settings = self.settings

        def heard(doing: str) -> None:
            self._heard = doing

        reason = await watch(
            target,
            Watch(run=settings.run, uid=self.me.uid),
            heard,
            interval_s=settings.interval_s,
            timeout_s=settings.timeout_s,
            stall_timeout_s=settings.stall_timeout_s,
        )
        if self._hub_member is not None and self._hub_member.uid == target.uid:
            self._search.lost[target.uid] = (reason, self._heard)
            self._leave_hub()
            return
        self._say(Suspect(uid=target.uid, reason=reason, doing=self._heard))
        await asyncio.sleep(ANSWER_S)
        hub = self._hub_member
        deaf = self._in_view(view.incarnation) and not self.seen.stopped
        if deaf and hub is not None and hub.uid != self.me.uid:
            self._search.lost |= {
                target.uid: (reason, self._heard),
                hub.uid: (f"silent for {ANSWER_S:g} s", ""),
            }
            self._leave_hub()
