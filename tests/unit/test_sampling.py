"""Sampling is exact: integers decide, noise has a key (seed, step, sample, position), no row sees another."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from unirl_scale.core.philox import philox4x32, sampling_uniforms
from unirl_scale.kernels.reference import ReferenceOps
from unirl_scale.kernels.table import SAMPLE_SCALE
from unirl_scale.parallel.sampling import SamplingOptions, choose

ONES, OPS = 0xFFFFFFFF, ReferenceOps()


# ---- the generator ----------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((ONES,) * 4, (ONES,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_known_answers(counter, key, expected) -> None:
    """From Random123's kat_vectors."""
    words = philox4x32(tuple(np.array([w], dtype=np.uint64) for w in counter), key)
    assert tuple(int(w[0]) for w in words) == expected


def test_uniforms_depend_on_seed_step_sample_and_position_alone() -> None:
    base = sampling_uniforms(3, 5, [7, 2**32 - 1, 0], 4)
    assert base.shape == (3, 4) and base.dtype == np.float64
    assert ((base >= 0) & (base < 1)).all() and len(np.unique(base)) == 12
    assert (sampling_uniforms(3, 5, [0, 7], 2) == base[[2, 0], :2]).all()
    for other in (
        sampling_uniforms(4, 5, [7], 4),
        sampling_uniforms(3, 6, [7], 4),
        sampling_uniforms(3, 5, [8], 4),
    ):
        assert not (other == base[:1]).any()
    assert (sampling_uniforms(3 + (1 << 40), 5, [7], 4) != base[:1]).all(), "the seed's high word counts"


def test_seed_zero_and_step_zero_are_real() -> None:
    values = sampling_uniforms(0, 0, list(range(1000)), 50)
    assert abs(values.mean() - 0.5) < 0.005 and len(np.unique(values)) == values.size


# ---- the choice -------------------------------------------------------------------------------------
def expected_choice(logits: Tensor, uniform: float, top_k: int = 0, top_p: float = 1.0) -> int:
    """The definition with Python integers, from the logits' own exponentials."""
    x = logits.clone()
    if top_k:
        kth = sorted(x.tolist(), reverse=True)[min(top_k, x.numel()) - 1]
        x[x < kth] = -math.inf
    units = [int(w) for w in (torch.exp(x - x.max()).double() * SAMPLE_SCALE).tolist()]
    if top_p < 1:
        likeliest = sorted(range(len(units)), key=lambda i: (-units[i], i))
        kept, mass, limit = set(), 0, sum(units) * top_p
        for i in likeliest:
            if mass >= limit:
                break
            kept.add(i)
            mass += units[i]
        units = [w if i in kept else 0 for i, w in enumerate(units)]
    threshold = min(int(uniform * sum(units)), sum(units) - 1)
    running = 0
    for i, w in enumerate(units):
        running += w
        if running > threshold:
            return i
    raise AssertionError("unreachable")


def rows(count: int, vocab: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return 3 * torch.randn(count, vocab, generator=g), torch.rand(count, generator=g, dtype=torch.float64)


@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (5, 1.0), (0, 0.7), (9, 0.9), (100, 0.999)])
def test_choices_are_those_of_exact_arithmetic(top_k: int, top_p: float) -> None:
    logits, uniforms = rows(300, 37)
    uniforms[0], uniforms[1] = 0.0, 1.0 - 2.0**-53
    chosen = choose(OPS, logits, uniforms, SamplingOptions(top_k=top_k, top_p=top_p))
    wanted = [expected_choice(x, float(u), top_k, top_p) for x, u in zip(logits, uniforms)]
    assert chosen.tolist() == wanted


@pytest.mark.parametrize("options", [SamplingOptions(), SamplingOptions(top_k=7, top_p=0.8)])
def test_a_row_is_chosen_without_regard_to_the_others(options: SamplingOptions) -> None:
    logits, uniforms = rows(64, 501)
    together = choose(OPS, logits, uniforms, options)
    for i in (0, 1, 17, 63):
        assert choose(OPS, logits[i : i + 1], uniforms[i : i + 1], options).item() == together[i]
    assert torch.equal(choose(OPS, logits[5:12].clone(), uniforms[5:12], options), together[5:12])


def test_frequencies_follow_the_probabilities() -> None:
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0])
    n = 20_000
    uniforms = (torch.arange(n, dtype=torch.float64) + 0.5) / n
    counts = choose(OPS, logits.expand(n, 4), uniforms, SamplingOptions()).bincount(minlength=4)
    assert (counts - n * logits.double().softmax(0)).abs().max() <= 1


def test_top_k_keeps_all_tokens_tied_with_the_kth() -> None:
    logits = torch.tensor([[2.0, 1.0, 1.0, 1.0, 0.0]]).expand(500, 5)
    uniforms = (torch.arange(500, dtype=torch.float64) + 0.5) / 500
    chosen = choose(OPS, logits, uniforms, SamplingOptions(top_k=2))
    assert sorted(set(chosen.tolist())) == [0, 1, 2, 3]
    assert set(choose(OPS, logits, uniforms, SamplingOptions(top_k=1)).tolist()) == {0}


def test_top_p_keeps_the_smallest_set_that_reaches_the_mass() -> None:
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.15, 0.05]])).expand(1000, 4)
    uniforms = (torch.arange(1000, dtype=torch.float64) + 0.5) / 1000
    for top_p, kept in ((0.45, {0}), (0.55, {0, 1}), (0.79, {0, 1}), (0.81, {0, 1, 2}), (0.96, {0, 1, 2, 3})):
        assert set(choose(OPS, logits, uniforms, SamplingOptions(top_p=top_p)).tolist()) == kept, top_p
    equal = torch.zeros(1000, 4)
    assert set(choose(OPS, equal, uniforms, SamplingOptions(top_p=0.5)).tolist()) == {0, 1}, (
        "ties: lower ids first"
    )


def test_greedy_takes_the_first_maximum_and_no_noise() -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0], [5.0, -math.inf, 5.0]])
    for u in (0.0, 0.999):
        assert choose(
            OPS, logits, torch.full((2,), u).double(), SamplingOptions(temperature=0.0)
        ).tolist() == [
            1,
            0,
        ]


def test_a_token_of_weight_zero_is_never_drawn() -> None:
    logits = torch.tensor([[-math.inf, 0.0, -200.0, 0.0, -math.inf]]).expand(3, 5)
    uniforms = torch.tensor([0.0, 0.5, 1.0 - 2.0**-53], dtype=torch.float64)
    assert choose(OPS, logits, uniforms, SamplingOptions()).tolist() == [1, 3, 3]
