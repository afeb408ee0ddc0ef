"""Log-probs recorded at sampling are the training forward's, bit for bit, and tokens do not depend on the
layout.

Decoding with a cache, one row a step, samples that leave the batch when they end, and another mesh on one
side; whole sequences, packed and pipelined, on the other. The model has grouped heads, qk-norm, QKV bias and
tied embeddings.

Not covered here: accelerators, and prompts longer than a dozen tokens (attention tiles are 32 rows, so
responses cross them).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from tests.dist.rollout_ranks import Outcome, Run, rollout_config, sample_and_score
from tests.dist.run_ranks import RankPool
from unirl_scale.core.check import world_size_of
from unirl_scale.core.config import MeshConfig

TIMEOUT_S = 300.0
OPTIONS = {
    "plain": {},
    "hot": {"temperature": 1.7},
    "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.7, "temperature": 1.0},
    "both": {"top_k": 9, "top_p": 0.9, "temperature": 1.3},
}
Sampled = Callable[[Run], Outcome]


@pytest.fixture(scope="module")
def sampled(run_ranks: RankPool) -> Sampled:
    """The outcome of a run, after making sure that every rank has the same; runs each once."""
    known: dict[str, Outcome] = {}

    def of(run: Run) -> Outcome:
        if repr(run) in known:
            return known[repr(run)]
        outcomes = run_ranks(sample_and_score, world_size_of(run.cfg), run, timeout_s=TIMEOUT_S)
        for other in outcomes[1:]:
            assert other.bits == outcomes[0].bits
        return known.setdefault(repr(run), outcomes[0])

    return of


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_recorded_log_probs_are_the_training_forwards(sampled, options, precision) -> None:
    outcome = sampled(Run(cfg=rollout_config(precision=precision, **options)))
    assert all(outcome.equal)
    assert all(j.logprobs.shape == (len(j.tokens),) for j in outcome.judged)
    assert len({len(t) for t in outcome.tokens}) > 1, "samples must end at different times"


@pytest.mark.parametrize(
    ("actor", "rollout"),
    [
        (MeshConfig(tp=2, micro_batch_size=2), MeshConfig(tp=2)),
        (MeshConfig(tp=3, sequence_parallel=True, micro_batch_size=4), MeshConfig(tp=1, dp=3)),
        (MeshConfig(pp=4, micro_batch_size=3), MeshConfig(tp=2, dp=2)),
        (MeshConfig(pp=2, vpp=2, dp=2), MeshConfig(tp=3)),
        (MeshConfig(dp=3), MeshConfig(tp=6)),
        (MeshConfig(tp=2, pp=2), MeshConfig(tp=1, dp=2, first_rank=2)),
    ],
    ids=["same", "tp3-to-dp3", "pp4-to-tp2dp2", "interleaved-to-tp3", "dp3-to-tp6", "other-ranks"],
)
def test_any_rollout_mesh_gives_the_bits_of_one_rank(sampled, actor, rollout) -> None:
    expected = sampled(Run(cfg=rollout_config(**OPTIONS["both"])))
    outcome = sampled(Run(cfg=rollout_config(actor, rollout, **OPTIONS["both"])))
    assert outcome.bits == expected.bits
    assert all(outcome.equal)


@pytest.mark.parametrize(
    "rollout",
    [MeshConfig(tp=2), MeshConfig(tp=3, dp=2), MeshConfig(tp=1, dp=4)],
    ids=["tp2", "tp3dp2", "dp4"],
)
def test_groups_in_a_cache_for_one_sequence_give_the_bits_of_one_rank(sampled, rollout) -> None:
    """Prompts of a group are shared, and cut by data-parallel ranks; every other sequence is preempted."""
    expected = sampled(Run(cfg=rollout_config(), group=3))
    small = rollout_config(rollout=rollout, page_size=16, kv_cache_tokens=64, prefill_tokens=8)
    outcome = sampled(Run(cfg=small, group=3))
    assert outcome.bits == expected.bits
    assert all(outcome.equal)


@pytest.mark.parametrize("batch_size", [1, 2, 4])
def test_wave_size_changes_no_bit(sampled, batch_size) -> None:
    expected = sampled(Run(cfg=rollout_config()))
    assert sampled(Run(cfg=rollout_config(batch_size=batch_size))).bits == expected.bits


def test_stop_sequences_cut_the_response_that_would_have_been(sampled) -> None:
    run = Run(cfg=rollout_config(), stops=())
    whole = sampled(run)
    assert all(j.truncated and len(j.tokens) == 40 for j in whole.judged)
    pair = whole.tokens[0][5:7]
    single = next((token,) for token in whole.tokens[1] if token not in whole.tokens[0][:7])
    cut = sampled(replace(run, stops=(pair, single)))
    ends = [first_end(tokens, (pair, single)) for tokens in whole.tokens]
    assert cut.tokens == [tokens[:end] for tokens, end in zip(whole.tokens, ends)]
    assert [j.truncated for j in cut.judged] == [end is None for end in ends]
    for short, full in zip(cut.judged, whole.judged):
        assert short.logprobs.tobytes() == full.logprobs[: len(short.tokens)].tobytes()
    assert {tokens[-2:] == pair for tokens in cut.tokens} == {True, False}
    assert all(cut.equal)


def first_end(tokens: Sequence[int], stops: Sequence[Sequence[int]]) -> int | None:
    """Where the first stop sequence is complete."""
    for end in range(1, len(tokens) + 1):
        if any(tuple(tokens[max(0, end - len(stop)) : end]) == tuple(stop) for stop in stops):
            return end
    return None


def test_greedy_needs_no_noise(sampled) -> None:
    first = sampled(Run(cfg=rollout_config(), greedy=True))
    other = sampled(Run(cfg=rollout_config(rollout=MeshConfig(tp=2)), greedy=True, seed=12, step=4))
    assert first.tokens == other.tokens


def test_noise_follows_the_sample_id(sampled) -> None:
    """The same prompts under other ids are other samples; an id keeps its noise wherever it is drawn."""
    cfg = rollout_config()
    first, shifted = sampled(Run(cfg=cfg)), sampled(Run(cfg=cfg, ids=range(101, 110)))
    assert all(a != b for a, b in zip(first.tokens, shifted.tokens) if len(a) > 2)


# ---- negative controls ------------------------------------------------------------------------------
@pytest.mark.parametrize("change", [{"seed": 12}, {"step": 4}])
def test_another_seed_or_step_draws_other_tokens(sampled, change) -> None:
    run = Run(cfg=rollout_config())
    assert sampled(replace(run, **change)).tokens != sampled(run).tokens


def test_one_changed_bit_of_a_rollout_weight_shows(sampled) -> None:
    outcome = sampled(Run(cfg=rollout_config(), nudged=True))
    assert not all(outcome.equal)
