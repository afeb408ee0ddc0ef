"""Rollout on the GPU: the training forward's bits with and without CUDA graphs, whatever the cache and batch.

About 10^5 tokens are held with `==`. The model is small, and wide enough for the tuned kernels (hidden 512,
heads of 64, W = 2 leaves).
"""

from __future__ import annotations

import pickle
import random
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp

from tests.rollouts import Outcome, Tokens, prompts_of, roles_of, roll_out
from unirl_scale.comm.groups import connect
from unirl_scale.core.config import (
    InvarianceConfig,
    MeshConfig,
    MeshesConfig,
    ModelConfig,
    ModelsConfig,
    RolloutConfig,
    RunConfig,
)
from unirl_scale.core.load import resolve
from unirl_scale.parallel.decode_graph import DecodeGraphs
from unirl_scale.parallel.kv_cache import KvCache
from unirl_scale.train.roles import Roles

pytestmark = pytest.mark.cuda

MODEL = ModelConfig(
    hidden_size=512,
    num_layers=4,
    num_heads=8,
    num_kv_heads=2,
    head_dim=64,
    ffn_size=1024,
    vocab_size=1000,
    qk_norm=True,
    init_std=0.05,
)
LONGEST, ANSWER = 150, 170
STOPS: list[Tokens] = [*((token,) for token in range(8)), (9, 10)]  # about one token in a hundred
LIMITS: dict[str, Any] = {"max_prompt_tokens": LONGEST, "max_response_tokens": ANSWER, "temperature": 0.8}


def make_roles(ops: Any, precision: str = "bf16", **rollout: object) -> Roles:
    return roles_of(MODEL, ops, "cuda", 2, precision, **{**LIMITS, **rollout})


def make_prompts(groups: int = 12, size: int = 4) -> list[Tokens]:
    return prompts_of(MODEL.vocab_size, LONGEST, groups, size)


@pytest.fixture(autouse=True)
def poison() -> None:
    """Off here: with torch's deterministic kernels, graphs would hold others than a run's."""


@pytest.fixture(scope="module")
def plain(ops: Any) -> Outcome:
    """One launch an op, the host reading each token before the next step."""
    outcome = roll_out(make_roles(ops, cuda_graphs=False), make_prompts(), STOPS, lag=0)
    assert all(outcome.equal)
    assert len({len(j.tokens) for j in outcome.judged}) > 5, "samples must end at different times"
    return outcome


def graphs_of(roles: Roles) -> DecodeGraphs:
    assert roles.decoder is not None and roles.decoder._graphs is not None
    return roles.decoder._graphs


@pytest.mark.parametrize("graphs", [False, True])
def test_graphs_and_late_reading_change_no_bit(ops: Any, plain: Outcome, graphs: bool) -> None:
    roles = make_roles(ops, cuda_graphs=graphs)
    assert roles.decoder is not None and roles.decoder.lag == 1
    for _ in range(2):  # the second call replays what the first captured
        outcome = roll_out(roles, make_prompts(), STOPS)
        assert outcome.bits == plain.bits and all(outcome.equal)
    assert (roles.decoder._graphs is not None) == graphs


@pytest.mark.parametrize("seed", range(8))
def test_cache_batch_and_order_change_no_bit(ops: Any, plain: Outcome, seed: int) -> None:
    rng = random.Random(seed)
    page = (16, 64, 128, 256)[seed % 4]
    least = -(-(LONGEST + ANSWER) // page) * page
    roles = make_roles(
        ops,
        page_size=page,
        kv_cache_tokens=rng.choice((least, 3 * least, 8 * least)),
        batch_size=rng.choice((0, 5, 17)),
        prefill_tokens=rng.choice((1, 500, 8192)),
        cuda_graphs=seed % 2 == 0,
    )
    prompts = make_prompts()
    order = rng.sample(range(len(prompts)), len(prompts))
    outcome = roll_out(roles, [prompts[i] for i in order], STOPS, ids=order)
    assert outcome.bits == [plain.bits[i] for i in order] and all(outcome.equal)


def test_preempted_sequences_say_the_same(ops: Any, plain: Outcome) -> None:
    outcome = roll_out(make_roles(ops, page_size=16, kv_cache_tokens=640), make_prompts(), STOPS)
    assert outcome.counts.preempted > 0 and outcome.bits == plain.bits


@pytest.mark.parametrize("graphs", [False, True])
def test_a_hundred_thousand_tokens_equal_the_training_forward(ops: Any, graphs: bool) -> None:
    roles = make_roles(ops, batch_size=200, cuda_graphs=graphs)
    outcome = roll_out(roles, make_prompts(groups=80, size=8), [])
    assert outcome.tokens >= 100_000 and all(outcome.equal)


def test_fp32_keeps_the_promise_too(ops: Any) -> None:
    outcomes = [
        roll_out(make_roles(ops, "fp32", cuda_graphs=graphs), make_prompts(4, 2), STOPS)
        for graphs in (False, True)
    ]
    assert outcomes[0].bits == outcomes[1].bits and all(outcomes[0].equal)


@pytest.mark.parametrize(
    "sampler", [{"top_k": 20}, {"top_p": 0.8}, {"top_k": 50, "top_p": 0.9, "temperature": 1.3}]
)
def test_every_sampler_is_captured(ops: Any, sampler: dict[str, Any]) -> None:
    outcomes = [
        roll_out(make_roles(ops, cuda_graphs=graphs, **sampler), make_prompts(4, 2), STOPS)
        for graphs in (False, True)
    ]
    assert outcomes[0].bits == outcomes[1].bits and all(outcomes[1].equal)


def test_greedy_and_sampled_steps_have_graphs_of_their_own(ops: Any, plain: Outcome) -> None:
    roles = make_roles(ops)
    assert roll_out(roles, make_prompts(), STOPS).bits == plain.bits
    greedy = roll_out(roles, make_prompts(), STOPS, greedy=True, score=False)
    eager = roll_out(make_roles(ops, cuda_graphs=False), make_prompts(), STOPS, greedy=True, score=False)
    assert greedy.bits == eager.bits != plain.bits
    assert roll_out(roles, make_prompts(), STOPS).bits == plain.bits


def test_graphs_see_new_weights(ops: Any, plain: Outcome) -> None:
    roles = make_roles(ops)
    assert roll_out(roles, make_prompts(), STOPS).bits == plain.bits
    kept = graphs_of(roles)
    assert roles.actor.engine is not None
    with torch.no_grad():
        roles.actor.engine.chunks[0].flat.mul_(1.25)
        roles.refresh_rollout()
    changed = roll_out(roles, make_prompts(), STOPS)
    assert graphs_of(roles) is kept and all(changed.equal) and changed.bits != plain.bits


def test_a_larger_batch_gets_new_graphs(ops: Any, plain: Outcome) -> None:
    roles = make_roles(ops)
    few = roll_out(roles, make_prompts()[:6], STOPS)
    kept = graphs_of(roles)
    assert few.bits == plain.bits[:6]
    assert roll_out(roles, make_prompts(), STOPS).bits == plain.bits
    assert graphs_of(roles) is not kept


def test_nothing_is_read_that_was_not_written(
    ops: Any, plain: Outcome, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pages start as NaN; a graph's padding rows may touch the scratch page only."""
    roles = make_roles(ops, page_size=16, kv_cache_tokens=2000)
    decoder = roles.decoder
    assert decoder is not None
    real = decoder._cache

    def poisoned(pages: int) -> KvCache:
        cache = real(pages)
        for layer in cache.layers:
            layer.k[1:], layer.v[1:] = torch.nan, torch.nan
        return cache

    monkeypatch.setattr(decoder, "_cache", poisoned)
    assert roll_out(roles, make_prompts(), STOPS).bits == plain.bits


# ---- several ranks ----------------------------------------------------------------------------------
def _tp2(rank: int, folder: str) -> None:
    torch.cuda.set_device(rank)
    from unirl_scale.kernels.cuda.table import CudaOps

    mesh = MeshConfig(tp=2)
    cfg = RunConfig(
        precision="bf16",
        model=ModelsConfig(actor=MODEL),
        invariance=InvarianceConfig(model_leaves=2),
        mesh=MeshesConfig(actor=mesh, rollout=mesh),
        rollout=RolloutConfig(**LIMITS),
    )
    device = torch.device("cuda", rank)
    with connect(
        rank, 2, "nccl", init_method=f"file://{folder}/store", timeout=timedelta(minutes=3), device=device
    ) as factory:
        with torch.no_grad():
            roles = Roles(resolve(cfg), factory, CudaOps(), device)
            roles.refresh_rollout()
        for _ in range(2):
            outcome = roll_out(roles, make_prompts(), STOPS)
            Path(folder, str(rank)).write_bytes(pickle.dumps((outcome.bits, outcome.equal)))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_ranks_replay_their_collectives(plain: Outcome, tmp_path: Path) -> None:
    """NCCL inside the graph; the bits are those of one rank."""
    mp.spawn(_tp2, (str(tmp_path),), nprocs=2)
    for rank in range(2):
        bits, equal = pickle.loads((tmp_path / str(rank)).read_bytes())
        assert bits == plain.bits and all(equal)


# ---- negative controls ------------------------------------------------------------------------------
def test_stale_inputs_show(ops: Any, plain: Outcome, monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph that replays the rows of the step before."""
    roles = make_roles(ops)
    assert roll_out(roles, make_prompts(), STOPS).bits == plain.bits
    real, calls = DecodeGraphs._fill, []

    def fill(self: DecodeGraphs, *arrays: Any) -> None:
        calls.append(len(arrays[0]))
        if len(calls) != 20:
            real(self, *arrays)

    monkeypatch.setattr(DecodeGraphs, "_fill", fill)
    outcome = roll_out(roles, make_prompts(), STOPS)
    assert len(calls) > 20 and not all(outcome.equal)


def test_a_missing_copy_shows(ops: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Members of a group that find a stale page in place of the last one of their prompt."""

    def no_copy(self: KvCache, pairs: Sequence[tuple[int, int]]) -> None: ...

    monkeypatch.setattr(KvCache, "copy", no_copy)
    assert not all(roll_out(make_roles(ops, page_size=16), make_prompts(), STOPS).equal)
