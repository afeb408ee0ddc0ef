"""Asking other processes for the hub, and what is learnt of them on the way."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from unirl_scale.train.elastic.links import Link, ask
from unirl_scale.train.elastic.messages import Elsewhere, Hello, Leave, Watch, Welcome
from unirl_scale.train.elastic.view import Member, View

ANSWER_S = 1.0  # a control thread that is alive answers within milliseconds
_AT_ONCE = 64

Found = tuple[Link, Welcome]
"""A link to the hub and its first word."""


class Search:
    """One process's search.

    Attributes:
        lost: members of the view found dead: uid -> (why, doing what).
        left: those of them who went in peace.
    """

    def __init__(self, run: str, me: Member) -> None:
        self._run, self._me, self._incarnation = run, me, 0
        self.lost: dict[str, tuple[str, str]] = {}
        self.left: set[str] = set()

    def begin(self, view: View) -> None:
        """Nothing is known against the members of a new view."""
        self._incarnation = view.incarnation
        self.lost.clear()
        self.left.clear()

    async def inquire(self, address: str, uid: str = "") -> tuple[Found | None, bool]:
        """(the hub, whether anybody answered): the process there, or the one that it names."""
        answer = await ask(address, self._greeting(), ANSWER_S)
        if answer is None:
            return None, False
        link, message = answer
        if isinstance(message, Welcome):
            return (link, message), True
        link.close()
        if isinstance(message, Leave):
            self.left.add(uid)
            return None, False
        if isinstance(message, Elsewhere) and message.hub is not None:
            return await self.hello(message.hub), True
        return None, True

    async def hello(self, hub: Member) -> Found | None:
        """The hub, if it is one and there."""
        answer = await ask(hub.address, self._greeting(), ANSWER_S)
        if answer is not None and isinstance(answer[1], Welcome):
            return answer[0], answer[1]
        if answer is not None:
            answer[0].close()
        else:
            self.lost.setdefault(hub.uid, ("unreachable", ""))
        return None

    async def probe(self, members: Sequence[Member]) -> None:
        """Ask several at once whether they are there. Who is silent is lost: a node that hangs, with its
        many ranks, costs the time of one."""
        asked = [member for member in members if member.uid not in self.lost][:_AT_ONCE]
        question = Watch(run=self._run, uid=self._me.uid)
        answers = await asyncio.gather(*(ask(member.address, question, ANSWER_S) for member in asked))
        for member, answer in zip(asked, answers, strict=True):
            if answer is None:
                self.lost.setdefault(member.uid, ("unreachable", ""))
            else:
                answer[0].close()

    def _greeting(self) -> Hello:
        return Hello(run=self._run, member=self._me, incarnation=self._incarnation, lost=tuple(self.lost))
