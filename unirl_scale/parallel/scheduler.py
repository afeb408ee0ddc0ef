"""Continuous batching: which sequences run in the next step, and in which pages. Host side, no tensors.

Requests are served in the order of their numbers. A step decodes one token of every running sequence and
admits waiting ones while their pages fit. When pages run out, the youngest running sequence gives its pages
back and is run again from its tokens later, which gives the same bits; the oldest can take every page, so
some sequence always advances. Nothing here can change a token: rows do not depend on each other, nor on where
their keys lie.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from unirl_scale.parallel.kv_cache import PageAllocator


@dataclass(slots=True, eq=False)
class Request:
    """A prompt to be answered.

    Attributes:
        number: place among the requests of a call; a lower number is older.
        group: requests with one prompt have one group.
        said: tokens of the response known to the host.
        launched: tokens of the response that were sampled or are being sampled; at least len(said).
        num_pages: entries of the request's row of `Scheduler.table` that it holds.
        room: positions its own pages take; one beyond them needs a new page or a copy.
    """

    number: int
    prompt: tuple[int, ...]
    group: int
    max_new: int
    said: list[int] = field(default_factory=list)
    launched: int = 0
    num_pages: int = 0
    room: int = 0

    @property
    def length(self) -> int:
        """Tokens so far, the one being sampled included."""
        return len(self.prompt) + self.launched


@dataclass(slots=True, eq=False)
class Prefix:
    """Tokens that run through the model once, and the pages that then hold their keys and values.

    Attributes:
        last_hidden: what the executor keeps of the last token, to sample from.
    """

    tokens: tuple[int, ...]
    pages: list[int]
    last_hidden: Any = None


class Start(NamedTuple):
    """A request whose next token is sampled from a prefix."""

    request: Request
    prefix: Prefix
    position: int  # of the token in the response


class Row(NamedTuple):
    """A request that feeds its last token."""

    request: Request
    length: int  # tokens with the one that is fed
    position: int  # of the token that is sampled, in the response


@dataclass(slots=True)
class Plan:
    """One step, in this order: copies, prefills, starts, rows."""

    copies: list[tuple[int, int]] = field(default_factory=list)
    prefills: list[Prefix] = field(default_factory=list)
    starts: list[Start] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    preempted: int = 0

    @property
    def empty(self) -> bool:
        return not self.starts and not self.rows


def pages_for(tokens: int, page_size: int) -> int:
    """Pages that hold this many positions."""
    return -(-tokens // page_size)


class Scheduler:
    """Plans steps over one cache until every request has ended.

    Args:
        requests: in order of their numbers 0, 1, ...; equal groups have equal prompts.
        allocator: at least the pages of the longest single request.
        max_running: most sequences that decode together.
        prefill_tokens: most tokens of the prefills of a step; one that is longer runs alone.

    Attributes:
        table: int32 [requests, pages of the longest], the block table of every running request.
    """

    def __init__(
        self,
        requests: Sequence[Request],
        allocator: PageAllocator,
        page_size: int,
        max_running: int,
        prefill_tokens: int,
    ) -> None:
        self.allocator, self.page_size = allocator, page_size
        self.max_running, self.prefill_tokens = max_running, prefill_tokens
        self.waiting: deque[Request] = deque(requests)
        self.running: list[Request] = []  # oldest first, all older than those waiting
        width = max(self._pages(len(r.prompt) + r.max_new) for r in requests)
        assert width <= allocator.pages, f"a sequence needs {width} pages, there are {allocator.pages}"
        self.table = np.zeros((len(requests), width), dtype=np.int32)
        self._unstarted = Counter(r.group for r in requests)
        self._prefixes: dict[int, Prefix] = {}  # of groups with unstarted members

    def plan(self) -> Plan:
        """The next step; the requests in it count as launched."""
        for request in [r for r in self.running if r.launched == r.max_new]:
            self._leave(request)  # its last token is sampled: the pages were read for the last time
        plan = Plan()
        for request in tuple(self.running):
            # An older request may have preempted this one a moment ago.
            if request.num_pages and self._make_room(request, plan):
                plan.rows.append(Row(request, request.length, request.launched))
        if not plan.preempted:
            self._admit(plan)
        for request in self.running:
            request.launched += 1
        return plan

    def finish(self, request: Request) -> None:
        """The request has ended before its limit, wherever it is by now."""
        if request.num_pages:
            self._leave(request)
        elif request in self.waiting:
            self.waiting.remove(request)

    # ---- pages ------------------------------------------------------------------------------------
    def _pages(self, tokens: int) -> int:
        return pages_for(tokens, self.page_size)

    def _held(self, request: Request) -> list[int]:
        held: list[int] = self.table[request.number, : request.num_pages].tolist()
        return held

    def _make_room(self, request: Request, plan: Plan) -> bool:
        """Give the request a page of its own for its last token; False when it had to leave instead."""
        if request.length <= request.room:
            return True
        index = (request.length - 1) // self.page_size
        pages = self.table[request.number]
        while index == request.num_pages or self.allocator.shared(int(pages[index])):
            page = self.allocator.take()
            if page is not None:
                if index < request.num_pages:
                    plan.copies.append((int(pages[index]), page))
                    self.allocator.drop([int(pages[index])])
                pages[index], request.num_pages = page, index + 1
                break
            if not self._forget_prefix():
                plan.preempted += 1
                if self._preempt_youngest() is request:
                    return False
        request.room = (index + 1) * self.page_size
        return True

    def _forget_prefix(self) -> bool:
        """Give up the prefix that is needed last; False when there is none."""
        if not self._prefixes:
            return False
        _, prefix = self._prefixes.popitem()
        self.allocator.drop(prefix.pages)
        return True

    def _preempt_youngest(self) -> Request:
        victim = self.running[-1]
        self._leave(victim)
        self.waiting.appendleft(victim)
        return victim

    def _leave(self, request: Request) -> None:
        self.allocator.drop(self._held(request))
        request.num_pages = request.room = 0
        self.running.remove(request)

    # ---- admission --------------------------------------------------------------------------------
    def _admit(self, plan: Plan) -> None:
        """Start waiting requests, oldest first, as far as rows, pages and prefill tokens reach."""
        reserve, prefilled = sum(self._will_grow(r) for r in self.running), 0
        while self.waiting and len(self.running) < self.max_running:
            request = self.waiting[0]
            prefix = None if request.launched else self._prefixes.get(request.group)
            cost = 0 if prefix else request.length
            if plan.prefills and prefilled + cost > self.prefill_tokens:
                return
            # Running sequences come first: whoever is admitted leaves each of them its next page.
            while self.allocator.free < self._pages(cost) + (reserve if self.running else 0):
                if self.running or not self._forget_prefix():
                    return
            self._start(self.waiting.popleft(), prefix, plan)
            prefilled += cost
            reserve += self._will_grow(request)

    def _will_grow(self, request: Request) -> bool:
        """Whether the request may still need another page, copies of shared ones aside."""
        return request.num_pages < self._pages(len(request.prompt) + request.max_new)

    def _start(self, request: Request, prefix: Prefix | None, plan: Plan) -> None:
        """Move a request to the running ones, on the pages of a prefix, or of a new one that it leads."""
        if prefix is None:
            prefix = Prefix(request.prompt + tuple(request.said), self._take(self._pages(request.length)))
            assert len(prefix.tokens) == request.length, "its last token must have reached the host"
            plan.prefills.append(prefix)
        self.allocator.share(prefix.pages)
        self.table[request.number, : len(prefix.pages)] = prefix.pages
        request.num_pages = len(prefix.pages)
        self.running.append(request)
        plan.starts.append(Start(request, prefix, request.launched))
        if request.launched:  # it was preempted: what it runs again is of no use to others
            self.allocator.drop(prefix.pages)
            return
        self._prefixes[request.group] = prefix
        self._unstarted[request.group] -= 1
        if not self._unstarted[request.group]:
            del self._prefixes[request.group]
            self.allocator.drop(prefix.pages)

    def _take(self, count: int) -> list[int]:
        pages = [page for page in (self.allocator.take() for _ in range(count)) if page is not None]
        assert len(pages) == count, "admission counted the free pages"
        return pages
