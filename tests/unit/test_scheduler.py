"""Whatever is admitted, shared, copied, preempted or late: each sequence finds its own tokens in its pages.

The device is a dict of pages that remember tokens. What a sequence says is a function of its number, so a run
can be held against what must come out.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from dataclasses import dataclass, field

import pytest

from unirl_scale.parallel.kv_cache import SCRATCH, PageAllocator
from unirl_scale.parallel.scheduler import Plan, Request, Scheduler

Tokens = tuple[int, ...]


def answer(number: int, length: int) -> Tokens:
    """What request `number` says; no two say the same."""
    return tuple(1000 * (number + 1) + i for i in range(length))


@dataclass(kw_only=True)
class Device:
    """Runs plans against pages that remember tokens, and checks every read.

    Attributes:
        lengths: tokens after which each request stops.
        lag: plans made before the tokens of an earlier one are known.
        max_steps: a run that takes longer is stuck.
    """

    scheduler: Scheduler
    requests: list[Request]
    lengths: list[int]
    lag: int = 0
    max_steps: int = 20_000
    pages: dict[tuple[int, int], int] = field(default_factory=dict)
    events: Counter[str] = field(default_factory=Counter)

    def run(self) -> list[Tokens]:
        flying: deque[list[tuple[Request, int]]] = deque()
        for _ in range(self.max_steps):
            plan = self.scheduler.plan()
            self.check_order()
            if not plan.empty:
                flying.append(self.execute(plan))
            elif not flying:
                break
            while flying and (plan.empty or len(flying) > self.lag):
                for request, position in flying.popleft():
                    self.record(request, position)
        else:
            raise AssertionError("stuck")
        assert self.scheduler.allocator.free == self.scheduler.allocator.pages, "pages were lost"
        return [tuple(r.said) for r in self.requests]

    def record(self, request: Request, position: int) -> None:
        if len(request.said) == self.lengths[request.number]:
            self.events["wasted"] += 1
            return
        assert len(request.said) == position
        request.said.append(answer(request.number, position + 1)[position])
        if len(request.said) == self.lengths[request.number]:
            self.scheduler.finish(request)

    def execute(self, plan: Plan) -> list[tuple[Request, int]]:
        size = self.scheduler.page_size
        old = dict(self.pages)
        for source, target in plan.copies:
            for i in range(size):
                self.pages[target, i] = old.get((source, i), -1)
        for prefix in plan.prefills:
            for at, token in enumerate(prefix.tokens):
                self.write(prefix.pages[at // size], at % size, token)
        for row in plan.rows:
            table = self.scheduler.table[row.request.number]
            last, page = row.length - 1, int(table[(row.length - 1) // size])
            assert not self.scheduler.allocator.shared(page), "a shared page is written"
            self.write(page, last % size, self.history(row.request, row.length)[-1])
        for request, prefix, position in plan.starts:
            self.read(request, len(request.prompt) + position)
            assert prefix.tokens == self.history(request, len(prefix.tokens))
        for row in plan.rows:
            self.read(row.request, row.length)
        self.events["copies"] += len(plan.copies)
        self.events["prefills"] += len(plan.prefills)
        self.events["starts"] += len(plan.starts)
        self.events["preempted"] += plan.preempted
        self.events["steps"] += 1
        self.events["most"] = max(self.events["most"], len(plan.rows) + len(plan.starts))
        return [(r, position) for r, _, position in plan.starts + plan.rows]

    def write(self, page: int, place: int, token: int) -> None:
        assert page != SCRATCH
        self.pages[page, place] = token

    def history(self, request: Request, length: int) -> Tokens:
        return (request.prompt + answer(request.number, length))[:length]

    def read(self, request: Request, length: int) -> None:
        table, size = self.scheduler.table[request.number], self.scheduler.page_size
        found = tuple(self.pages[int(table[at // size]), at % size] for at in range(length))
        assert found == self.history(request, length)

    def check_order(self) -> None:
        numbers = [r.number for r in (*self.scheduler.running, *self.scheduler.waiting)]
        assert numbers == sorted(numbers), "a younger request is ahead of an older one"


def device(
    prompts: list[Tokens],
    lengths: list[int],
    *,
    pages: int,
    page_size: int = 4,
    max_new: int = 12,
    max_running: int = 0,
    prefill_tokens: int = 1000,
    lag: int = 0,
) -> Device:
    groups: dict[Tokens, int] = {}
    requests = [
        Request(i, prompt, groups.setdefault(prompt, len(groups)), max_new)
        for i, prompt in enumerate(prompts)
    ]
    scheduler = Scheduler(
        requests, PageAllocator(pages), page_size, max_running or len(requests), prefill_tokens
    )
    return Device(scheduler=scheduler, requests=requests, lengths=lengths, lag=lag)


def expected(lengths: list[int], max_new: int = 12) -> list[Tokens]:
    return [answer(i, min(n, max_new)) for i, n in enumerate(lengths)]


PROMPTS = [(1, 2, 3), (4,), (5, 6, 7, 8), (9, 10, 11, 12, 13), (1, 2, 3), (4,)]
LENGTHS = [12, 3, 7, 1, 12, 9]


@pytest.mark.parametrize("lag", [0, 1])
def test_a_large_cache_runs_everyone_at_once(lag: int) -> None:
    d = device(PROMPTS, LENGTHS, pages=100, lag=lag)
    assert d.run() == expected(LENGTHS)
    assert d.events["most"] == 6 and d.events["preempted"] == 0
    assert d.events["prefills"] == 4, "equal prompts run once"
    assert d.events["wasted"] == (4 if lag else 0), "a stop inside the limit costs one row when late"


@pytest.mark.parametrize("lag", [0, 1])
def test_a_group_shares_its_prompt_and_copies_the_last_page(lag: int) -> None:
    prompt = tuple(range(10))  # two whole pages and a half
    d = device([prompt] * 5, [12] * 5, pages=100, lag=lag)
    first = d.scheduler.plan()
    assert len(first.prefills) == 1 and len(first.starts) == 5
    assert d.scheduler.allocator.free == 100 - 3
    assert {tuple(d.scheduler.table[i, :3]) for i in range(5)} == {tuple(first.prefills[0].pages)}
    launched = d.execute(first)
    for request, position in launched:
        d.record(request, position)
    second = d.scheduler.plan()
    assert len(second.copies) == 4, "the last holder writes in place"
    assert {source for source, _ in second.copies} == {first.prefills[0].pages[2]}
    assert d.scheduler.allocator.free == 100 - 2 - 5


def test_a_prompt_of_whole_pages_needs_no_copy() -> None:
    d = device([tuple(range(8))] * 3, [12] * 3, pages=100)
    assert d.run() == expected([12] * 3)
    assert d.events["copies"] == 0 and d.events["prefills"] == 1


def test_late_members_of_a_group_still_find_its_prompt() -> None:
    d = device([tuple(range(10))] * 6, [5] * 6, pages=100, max_running=2)
    assert d.run() == expected([5] * 6)
    assert d.events["most"] == 2 and d.events["prefills"] == 1


@pytest.mark.parametrize("lag", [0, 1])
def test_the_smallest_cache_serves_one_after_another(lag: int) -> None:
    """One sequence of 5 + 12 tokens fills all five pages: shared prompts are forgotten, the young wait."""
    d = device(PROMPTS, LENGTHS, pages=5, lag=lag)
    assert d.run() == expected(LENGTHS)
    assert d.events["preempted"] > 0 and d.events["prefills"] > 4


def test_the_oldest_never_waits() -> None:
    """It gives one token a step from its first, whatever the others want."""
    d = device([tuple(range(9))] * 4, [12] * 4, pages=6)
    oldest = d.requests[0]
    for step in range(12):
        launched = d.execute(d.scheduler.plan())
        assert (oldest, step) in launched
        for request, position in launched:
            d.record(request, position)


def test_a_step_that_preempted_admits_nobody() -> None:
    d = device(PROMPTS, LENGTHS, pages=5)
    seen = 0
    for _ in range(60):
        plan = d.scheduler.plan()
        if plan.preempted:
            assert not plan.starts
            seen += 1
        for request, position in d.execute(plan):
            d.record(request, position)
    assert seen


def test_prefills_of_a_step_are_bounded_but_one_always_runs() -> None:
    prompts = [tuple(range(i, i + 6)) for i in range(5)] + [tuple(range(50, 70))]
    d = device(prompts, [2] * 6, pages=100, prefill_tokens=13)
    sizes = []
    while not (plan := d.scheduler.plan()).empty:
        sizes.append([len(prefix.tokens) for prefix in plan.prefills])
        for request, position in d.execute(plan):
            d.record(request, position)
    assert [s for s in sizes if s] == [[6, 6], [6, 6], [6], [20]]


def test_plans_are_the_same_every_time() -> None:
    def trace() -> list[str]:
        d, out = device(PROMPTS, LENGTHS, pages=6, max_running=3), []
        while not (plan := d.scheduler.plan()).empty:
            rows = [(r.request.number, r.length) for r in plan.rows]
            starts = [(s.request.number, tuple(s.prefix.pages)) for s in plan.starts]
            out.append(f"{plan.copies} {starts} {rows} {d.scheduler.table.tolist()}")
            for request, position in d.execute(plan):
                d.record(request, position)
        return out

    assert trace() == trace()


@pytest.mark.parametrize("seed", range(60))
def test_random_loads(seed: int) -> None:
    rng = random.Random(seed)
    page_size, max_new = rng.choice((1, 2, 4, 16)), rng.randrange(1, 20)
    pool = [tuple(rng.randrange(90) for _ in range(rng.randrange(1, 20))) for _ in range(6)]
    prompts = [rng.choice(pool) for _ in range(rng.randrange(1, 25))]
    lengths = [rng.randrange(1, max_new + 5) for _ in prompts]
    least = max(-(-(len(p) + max_new) // page_size) for p in prompts)
    d = device(
        prompts,
        lengths,
        pages=rng.choice((least, least + 1, 2 * least, 30 * least)),
        page_size=page_size,
        max_new=max_new,
        max_running=rng.choice((0, 1, 3, 8)),
        prefill_tokens=rng.choice((1, 16, 1000)),
        lag=rng.choice((0, 1)),
    )
    assert d.run() == expected(lengths, max_new)


def test_pages_for_all_preempt_nobody_and_start_everyone() -> None:
    """What `kv_cache_tokens: 0` gives: the pages of all whole sequences, shared prompts counted fully."""
    for seed in range(20):
        rng = random.Random(seed)
        pool = [tuple(rng.randrange(90) for _ in range(rng.randrange(1, 20))) for _ in range(3)]
        prompts = [rng.choice(pool) for _ in range(12)]
        d = device(prompts, [12] * 12, pages=sum(-(-(len(p) + 12) // 4) for p in prompts))
        assert d.run() == expected([12] * 12)
        assert d.events["preempted"] == 0 and d.events["most"] == 12
        assert d.events["steps"] == 12 and d.events["prefills"] == len(set(prompts))


# ---- negative controls ------------------------------------------------------------------------------
def test_the_device_notices_a_wrong_table_entry() -> None:
    d = device(PROMPTS, LENGTHS, pages=100)
    d.execute(d.scheduler.plan())
    d.scheduler.table[0, 0] = d.scheduler.table[2, 0]
    with pytest.raises(AssertionError):
        d.execute(d.scheduler.plan())


def test_the_device_notices_a_missing_copy() -> None:
    d = device([(1, 2, 3)] * 3, [12] * 3, pages=100)
    d.execute(d.scheduler.plan())
    plan = d.scheduler.plan()
    assert plan.copies
    plan.copies.pop()
    with pytest.raises((AssertionError, KeyError)):
        d.execute(plan)


def test_a_cache_too_small_for_one_sequence_is_refused() -> None:
    with pytest.raises(AssertionError, match="a sequence needs 5 pages, there are 4"):
        device(PROMPTS, LENGTHS, pages=4)
