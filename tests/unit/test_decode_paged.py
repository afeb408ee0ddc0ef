"""Rollout bits against the training forward, for any cache, batch, order, shared prompt and preemption.

One rank; tests/dist has the meshes. The model has grouped heads, qk-norm, QKV bias and tied embeddings.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta

import numpy as np
import pytest
import torch

from tests.dist.engine_ranks import GQA
from unirl_scale.comm.groups import Group, GroupFactory
from unirl_scale.core.config import InvarianceConfig, ModelsConfig, RolloutConfig, RunConfig
from unirl_scale.core.errors import ShapeError
from unirl_scale.core.load import resolve
from unirl_scale.kernels.check import same_bits
from unirl_scale.kernels.reference import ReferenceOps
from unirl_scale.parallel import decode
from unirl_scale.parallel.decode import Decoder, Stops
from unirl_scale.parallel.decode_graph import graph_rows, padded_rows
from unirl_scale.parallel.decode_step import DecodeStep
from unirl_scale.parallel.kv_cache import KvCache
from unirl_scale.parallel.samples import Sample
from unirl_scale.parallel.sampling import SamplingOptions
from unirl_scale.train.roles import Roles
from unirl_scale.train.rollout import Draw, Judged, sample

Tokens = tuple[int, ...]
LONGEST, ANSWER = 20, 24
STOPS = [(0,), (7,), (3, 4)]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What came out, and for each sample whether the training forward gives the recorded bits."""

    judged: list[Judged]
    equal: list[bool]
    counts: decode.Counts

    @property
    def bits(self) -> list[tuple[Tokens, bytes, bool]]:
        return [(j.tokens, j.logprobs.tobytes(), j.truncated) for j in self.judged]


def prompts_of(groups: int = 5, size: int = 2) -> list[Tokens]:
    rng = random.Random(3)
    lengths = [rng.randrange(1, LONGEST) for _ in range(groups)]
    distinct = [tuple(rng.randrange(GQA.vocab_size) for _ in range(n)) for n in lengths]
    return [p for p in distinct for _ in range(size)]


def roles_of(precision: str = "fp32", **rollout: object) -> Roles:
    fields = {"max_prompt_tokens": LONGEST, "max_response_tokens": ANSWER, "temperature": 0.8, **rollout}
    cfg = RunConfig(
        precision=precision,
        model=ModelsConfig(actor=replace(GQA, num_layers=2)),
        invariance=InvarianceConfig(model_leaves=3),
        rollout=RolloutConfig(**fields),
    )
    factory = GroupFactory(Group.single(), timedelta(minutes=1))
    roles = Roles(resolve(cfg), factory, ReferenceOps(), torch.device("cpu"))
    roles.refresh_rollout()
    return roles


def run(roles: Roles, prompts: Sequence[Tokens], ids: Sequence[int] = (), lag: int = 0) -> Outcome:
    assert roles.decoder is not None
    roles.decoder.lag = lag
    draw = Draw(prompts=prompts, sample_ids=ids or range(len(prompts)), seed=11, step=3)
    with torch.no_grad():
        judged = sample(roles, draw, roles.cfg.rollout, STOPS, lambda number, tokens: 0.0)
        scored = roles.actor.score([Sample(p, j.tokens) for p, j in zip(prompts, judged)])
    equal = [same_bits(torch.from_numpy(j.logprobs), s) for j, s in zip(judged, scored)]
    return Outcome(judged=judged, equal=equal, counts=roles.decoder.counts)


@pytest.fixture(scope="module")
def plain() -> Outcome:
    """A cache for everyone, all prompts at once."""
    outcome = run(roles_of(), prompts_of())
    assert all(outcome.equal) and outcome.counts.preempted == 0
    assert len({len(j.tokens) for j in outcome.judged}) > 3, "samples must end at different times"
    return outcome


def test_equal_prompts_run_once(plain: Outcome) -> None:
    assert plain.counts.prefilled_tokens == sum(len(p) for p in set(prompts_of()))
    assert plain.counts.steps == max(len(j.tokens) for j in plain.judged)


@pytest.mark.parametrize("seed", range(12))
def test_cache_batch_and_lag_change_no_bit(plain: Outcome, seed: int) -> None:
    rng = random.Random(seed)
    page = (16, 32, 64, 1)[seed % 4]
    least = -(-(LONGEST + ANSWER) // page) * page
    roles = roles_of(
        page_size=page,
        kv_cache_tokens=rng.choice((0, least, least + page, 2 * least)),
        batch_size=rng.choice((0, 1, 3)),
        prefill_tokens=rng.choice((1, 30, 8192)),
    )
    outcome = run(roles, prompts_of(), lag=rng.randrange(2))
    assert outcome.bits == plain.bits and all(outcome.equal)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_preempted_sequences_say_the_same(precision: str) -> None:
    roles = roles_of(precision, page_size=16, kv_cache_tokens=64)
    outcome = run(roles, prompts_of())
    assert outcome.counts.preempted > 0 and all(outcome.equal)
    assert outcome.bits == run(roles_of(precision), prompts_of()).bits


def test_any_order_of_admission_gives_the_same_answers(plain: Outcome) -> None:
    prompts = prompts_of()
    for seed, tokens in enumerate((0, 96, 48)):
        order = random.Random(seed).sample(range(len(prompts)), len(prompts))
        roles = roles_of(page_size=16, kv_cache_tokens=tokens, batch_size=4)
        outcome = run(roles, [prompts[i] for i in order], ids=order)
        assert outcome.bits == [plain.bits[i] for i in order] and all(outcome.equal)


def test_a_sample_alone_says_what_it_says_in_its_group(plain: Outcome) -> None:
    prompts = prompts_of()
    for number in (0, 3, 7):
        alone = run(roles_of(page_size=16), [prompts[number]], ids=[number])
        assert alone.bits == [plain.bits[number]]


def test_nothing_is_read_that_was_not_written(plain: Outcome, monkeypatch: pytest.MonkeyPatch) -> None:
    roles = roles_of(page_size=16, kv_cache_tokens=128)
    assert roles.decoder is not None

    def poisoned(pages: int) -> KvCache:
        cache = real(pages)
        for layer in cache.layers:
            layer.k[1:], layer.v[1:] = torch.nan, torch.nan
        return cache

    real = roles.decoder._cache
    monkeypatch.setattr(roles.decoder, "_cache", poisoned)
    assert run(roles, prompts_of()).bits == plain.bits


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
    outcome = run(roles_of(page_size=16, kv_cache_tokens=96), prompts_of())
    assert outcome.bits == plain.bits and all(outcome.equal)
    assert any(rows < size for rows, size in sizes)


@pytest.mark.parametrize(
    ("rows", "size"), [(1, 1), (2, 8), (8, 8), (9, 16), (33, 64), (64, 64), (65, 128), (129, 192)]
)
def test_graphs_come_in_a_few_sizes(rows: int, size: int) -> None:
    assert graph_rows(rows) == size


@pytest.mark.parametrize(("length", "rule"), [(0, "1 to 20"), (21, "1 to 20")])
def test_prompts_that_do_not_fit_are_named(length: int, rule: str) -> None:
    with pytest.raises(ShapeError, match=rf"prompt of {length} tokens \(sample 1\) .* takes {rule}"):
        run(roles_of(), [(1,), (2,) * length])


def test_no_prompt_no_answer() -> None:
    decoder: Decoder | None = roles_of().decoder
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
    outcome = run(roles_of(page_size=16), prompts_of())
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
    outcome = run(roles_of(page_size=16), prompts_of(size=1))
    assert wrong and not outcome.equal[wrong[0]]
    assert all(equal for number, equal in enumerate(outcome.equal) if number != wrong[0])


def test_a_shared_page_that_is_written_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without reference counts, members of a group write over each other."""
    monkeypatch.setattr("unirl_scale.parallel.kv_cache.PageAllocator.shared", lambda self, page: False)
    assert not all(run(roles_of(page_size=16), prompts_of()).equal)
