"""Rollout bits against the training forward, for any cache, batch, order, shared prompt and preemption.

One rank; tests/dist has the meshes. The model has grouped heads, qk-norm, QKV bias and tied embeddings.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.dist.engine_ranks import GQA
from tests.rollouts import Outcome, Tokens, prompts_of, roles_of, roll_out
from unirl_scale.core.errors import ShapeError
from unirl_scale.kernels.reference import ReferenceOps
from unirl_scale.parallel import decode
from unirl_scale.parallel.decode import Decoder, Stops
from unirl_scale.parallel.decode_graph import DecodeGraphs, graph_rows, padded_rows
from unirl_scale.parallel.decode_step import DecodeStep
from unirl_scale.parallel.kv_cache import KvCache
from unirl_scale.parallel.sampling import SamplingOptions
from unirl_scale.train.roles import Roles

LONGEST, ANSWER = 20, 24
STOPS = [(0,), (7,), (3, 4)]


def make_prompts(groups: int = 5, size: int = 2) -> list[Tokens]:
    return prompts_of(GQA.vocab_size, LONGEST, groups, size)


def make_roles(precision: str = "fp32", **rollout: object) -> Roles:
    limits = {"max_prompt_tokens": LONGEST, "max_response_tokens": ANSWER, "temperature": 0.8}
    model = replace(GQA, num_layers=2)
    return roles_of(model, ReferenceOps(), "cpu", 3, precision, **{**limits, **rollout})


def run(roles: Roles, prompts: Sequence[Tokens], ids: Sequence[int] = (), lag: int = 0) -> Outcome:
    return roll_out(roles, prompts, STOPS, ids=ids, lag=lag)


@pytest.fixture(scope="module")
def plain() -> Outcome:
    """A cache for everyone, all prompts at once."""
    outcome = run(make_roles(), make_prompts())
    assert all(outcome.equal) and outcome.counts.preempted == 0
    assert len({len(j.tokens) for j in outcome.judged}) > 3, "samples must end at different times"
    return outcome


def test_equal_prompts_run_once(plain: Outcome) -> None:
    assert plain.counts.prefilled_tokens == sum(len(p) for p in set(make_prompts()))
    assert plain.counts.steps == max(len(j.tokens) for j in plain.judged)


@pytest.mark.parametrize("seed", range(12))
def test_cache_batch_and_lag_change_no_bit(plain: Outcome, seed: int) -> None:
    rng = random.Random(seed)
    page = (16, 32, 64, 1)[seed % 4]
    least = -(-(LONGEST + ANSWER) // page) * page
    roles = make_roles(
        page_size=page,
        kv_cache_tokens=rng.choice((0, least, least + page, 2 * least)),
        batch_size=rng.choice((0, 1, 3)),
        prefill_tokens=rng.choice((1, 30, 8192)),
    )
    outcome = run(roles, make_prompts(), lag=rng.randrange(2))
    assert outcome.bits == plain.bits and all(outcome.equal)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_preempted_sequences_say_the_same(precision: str) -> None:
    roles = make_roles(precision, page_size=16, kv_cache_tokens=64)
    outcome = run(roles, make_prompts())
    assert outcome.counts.preempted > 0 and all(outcome.equal)
    assert outcome.bits == run(make_roles(precision), make_prompts()).bits


def test_any_order_of_admission_gives_the_same_answers(plain: Outcome) -> None:
    prompts = make_prompts()
    for seed, tokens in enumerate((0, 96, 48)):
        order = random.Random(seed).sample(range(len(prompts)), len(prompts))
        roles = make_roles(page_size=16, kv_cache_tokens=tokens, batch_size=4)
        outcome = run(roles, [prompts[i] for i in order], ids=order)
        assert outcome.bits == [plain.bits[i] for i in order] and all(outcome.equal)


def test_a_sample_alone_says_what_it_says_in_its_group(plain: Outcome) -> None:
    prompts = make_prompts()
    for number in (0, 3, 7):
        alone = run(make_roles(page_size=16), [prompts[number]], ids=[number])
        assert alone.bits == [plain.bits[number]]


def test_nothing_is_read_that_was_not_written(plain: Outcome, monkeypatch: pytest.MonkeyPatch) -> None:
    roles = make_roles(page_size=16, kv_cache_tokens=128)
    assert roles.decoder is not None

    def poisoned(pages: int) -> KvCache:
        cache = real(pages)
        for layer in cache.layers:
            layer.k[1:], layer.v[1:] = torch.nan, torch.nan
        return cache

    real = roles.decoder._cache
    monkeypatch.setattr(roles.decoder, "_cache", poisoned)
    assert run(roles, make_prompts()).bits == plain.bits


def test_padding_rows_change_no_bit_and_no_page(plain: Outcome, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a CUDA graph runs, without the graph: every step padded to a graph's rows and to all pages."""
    sizes = []

    class Padded(DecodeStep):
        def feed(self, rows: np.ndarray, uniforms: np.ndarray, options: SamplingOptions) -> torch.Tensor:
            size = graph_rows(len(rows))
            sizes.append((len(rows), size))
            padded = padded_rows(rows, uniforms, size, width=9)
            return super().feed(*padded, options)[:, : len(rows)]

    monkeypatch.setattr(decode, "DecodeStep", Padded)
    outcome = run(make_roles(page_size=16, kv_cache_tokens=96), make_prompts())
    assert outcome.bits == plain.bits and all(outcome.equal)
    assert any(rows < size for rows, size in sizes)


class Recording:
    """A stand-in for torch's CUDA graphs on CPU: what is captured once runs again at each replay, on the same
    inputs and into the same output."""

    current: list[Recording] = []  # noqa: RUF012

    def __init__(self) -> None:
        self.call, self.output = None, torch.empty(0)

    def pool(self) -> None:
        return None

    def replay(self) -> None:
        self.output.copy_(self.call())

    @contextmanager
    def capture(self, **_: object) -> Iterator[None]:
        self.current.append(self)
        yield
        self.current.pop()


class RecordedStep(DecodeStep):
    """A step that tells the recording around it what it ran."""

    def advance(self, *arguments: object) -> torch.Tensor:
        output = super().advance(*arguments)
        if Recording.current:
            recording = Recording.current[-1]
            recording.call, recording.output = lambda: DecodeStep.advance(self, *arguments), output
        return output


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs on CPU, as far as they can be had without a GPU."""

    class Stream:
        def wait_stream(self, other: Stream) -> None: ...

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Recording)
    monkeypatch.setattr(torch.cuda, "graph", lambda graph, **kw: graph.capture(**kw))
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextmanager(lambda: iter([None]))())
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)

    def steps(self: Decoder, requests: Sequence[decode.Request]) -> DecodeGraphs:
        pages = self._pages(requests)
        kept = self._graphs
        if kept is None or not kept.fits(pages, len(requests), len(requests)):
            step = RecordedStep(self.chunk, self._cache(pages), len(requests))
            self._graphs = kept = DecodeGraphs(step, len(requests), 9)
        return kept

    monkeypatch.setattr(Decoder, "_steps", steps)


def test_replayed_steps_change_no_bit(plain: Outcome, recorded: None) -> None:
    """Static inputs, one graph a size and sampler, kept between calls; the weights may change in place."""
    roles = make_roles(page_size=16, kv_cache_tokens=96)
    assert roles.decoder is not None
    for _ in range(2):
        assert run(roles, make_prompts()).bits == plain.bits
    graphs = roles.decoder._graphs
    assert graphs is not None and {size for size, _ in graphs._captured} <= {1, 8, 16}
    greedy = roll_out(roles, make_prompts(), STOPS, greedy=True, score=False)
    assert greedy.bits == roll_out(make_roles(), make_prompts(), STOPS, greedy=True, score=False).bits
    assert roles.actor.engine is not None and roles.decoder._graphs is graphs
    roles.actor.engine.chunks[0].flat.mul_(1.5)
    roles.refresh_rollout()
    changed = run(roles, make_prompts())
    assert all(changed.equal) and changed.bits != plain.bits


@pytest.mark.parametrize(
    ("rows", "size"), [(1, 1), (2, 8), (8, 8), (9, 16), (33, 64), (64, 64), (65, 128), (129, 192)]
)
def test_graphs_come_in_a_few_sizes(rows: int, size: int) -> None:
    assert graph_rows(rows) == size


@pytest.mark.parametrize(("length", "rule"), [(0, "1 to 20"), (21, "1 to 20")])
def test_prompts_that_do_not_fit_are_named(length: int, rule: str) -> None:
    with pytest.raises(ShapeError, match=rf"prompt of {length} tokens \(sample 1\) .* takes {rule}"):
        run(make_roles(), [(1,), (2,) * length])


def test_no_prompt_no_answer() -> None:
    decoder: Decoder | None = make_roles().decoder
    assert decoder is not None
    assert decoder.generate([], np.zeros((0, 3)), SamplingOptions(), [], 3) == []


@pytest.mark.parametrize(
    ("said", "ends"), [([7], True), ([1, 3, 4], True), ([4], False), ([3, 4, 1], False), ([4, 3], False)]
)
def test_stops_look_at_the_end(said: list[int], ends: bool) -> None:
    assert Stops([(7,), (3, 4)]).end(said) is ends


# ---- negative controls ------------------------------------------------------------------------------
def test_a_stale_page_shows(plain: Outcome, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies that are not made leave what the page held before."""
    monkeypatch.setattr(KvCache, "copy", lambda self, pairs: None)
    outcome = run(make_roles(page_size=16), make_prompts())
    assert not all(outcome.equal) and outcome.bits != plain.bits


def test_a_wrong_table_entry_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    """One entry of one sequence points at the page of another, once."""
    real, wrong = decode.rows_array, []

    def rows_array(numbers: Sequence[int], lengths: Sequence[int], table: np.ndarray) -> np.ndarray:
        if not wrong and lengths[0] > 17:
            table[0, 0] = table[1, 0]
            wrong.append(numbers[0])
        return real(numbers, lengths, table)

    monkeypatch.setattr(decode, "rows_array", rows_array)
    outcome = run(make_roles(page_size=16), make_prompts(size=1))
    assert wrong and not outcome.equal[wrong[0]]
    assert all(equal for number, equal in enumerate(outcome.equal) if number != wrong[0])


def test_a_shared_page_that_is_written_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without reference counts, members of a group write over each other."""
    monkeypatch.setattr("unirl_scale.parallel.kv_cache.PageAllocator.shared", lambda self, page: False)
    assert not all(run(make_roles(page_size=16), make_prompts()).equal)


def test_rows_of_one_page_a_sequence_are_contiguous() -> None:
    """numpy lays a column out either way, and a kernel reads rows."""
    rows = decode.rows_array([4, 2], [3, 1], np.array([[7], [5]], dtype=np.int32))
    assert rows.tolist() == [[5, 3, 7], [3, 1, 5]] and rows.flags.c_contiguous
