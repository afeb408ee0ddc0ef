"""Equal bits are not bought with coarse rounding: the engine against fp64, beside plain PyTorch.

One rank. The truth is tests/reference_model.py in fp64; the peer is the same model in fp32 (or bf16) under
autograd. The gradients of log-prob, entropy and value that start the backward span ten decades.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from tests import reference_model
from tests.dist.engine_ranks import GQA, MHA, Case, build_role
from unirl_scale.comm.groups import connect
from unirl_scale.core.config import MeshConfig
from unirl_scale.parallel.engine import NativeEngine
from unirl_scale.parallel.samples import Sample
from unirl_scale.train.roles import DTYPES

INV_TEMPERATURE = 1.25
LAYERS = 3
MODELS = {"mha": replace(MHA, num_layers=LAYERS), "gqa": replace(GQA, num_layers=LAYERS)}
CASES = [
    ("mha", "lm", "blocked", "fp32"),
    ("gqa", "lm", "blocked", "fp32"),
    ("gqa", "value", "blocked", "fp32"),
    ("gqa", "lm", "blocked", "bf16"),
    ("mha", "lm", "whole", "fp32"),
    ("mha", "lm", "off", "fp32"),
    ("gqa", "value", "off", "bf16"),
]


SEEDS = 4
FLOOR = 5e-7  # four roundings of one number, e.g. the value head's bias
LARGEST = {"fp32": 1e-5, "bf16": 0.1}  # of any parameter's relative error


def samples(model_vocab: int, seed: int) -> list[Sample]:
    rng = random.Random(seed)

    def tokens(n: int) -> tuple[int, ...]:
        return tuple(rng.randrange(model_vocab) for _ in range(n))

    return [Sample(tokens(rng.randrange(1, 9)), tokens(rng.choice((1, 3, 17, 33)))) for _ in range(9)]


def coefficients(data: Sequence[Sample], seed: int) -> list[Tensor]:
    """For every sample fp32 [2, response]: what multiplies log-prob (or value) and entropy in the loss."""
    g = torch.Generator().manual_seed(seed)
    out = []
    for s in data:
        shape = (2, len(s.response))
        size = 10.0 ** (torch.rand(shape, generator=g) * 10 - 6)
        out.append(size * torch.randn(shape, generator=g).sign())
    return out


@dataclass(frozen=True)
class Result:
    """Scores of all samples end to end, and gradients by stored name."""

    scores: dict[str, Tensor]
    gradients: dict[str, Tensor]


def engine_result(case: Case, data: list[Sample], coefs: list[Tensor]) -> Result:
    with connect(0, 1) as groups, torch.no_grad():
        engine = build_role(groups, case).engine
        assert engine is not None

        def loss(numbers, scores):
            width = scores[0].shape[1]
            rows = torch.zeros(2, len(numbers), width)
            for row, number in enumerate(numbers):
                rows[:, row, : coefs[number].shape[1]] = coefs[number]
            return sum(c * s for c, s in zip(rows, scores)), {}

        scored = engine.score(data).scores
        engine.accumulate(data, loss)
        engine.reduce()
        names = ("logprobs", "entropy") if case.head == "lm" else ("values",)
        scores = {n: torch.cat([scored[i][k] for i in range(len(data))]) for k, n in enumerate(names)}
        return Result(scores, reduced_gradients(engine))


def reduced_gradients(engine: NativeEngine) -> dict[str, Tensor]:
    """The gradients of a one-rank engine by stored name."""
    chunk, reduced, out = engine.chunks[0], engine._reduced[0], {}
    for name, spec in chunk.specs.items():
        space, flat = (chunk.leafed, reduced.shard) if spec.leafed else (chunk.replicated, reduced.replicated)
        shape = chunk.weights[name].shape
        start = space.offsets[name]
        out[name] = flat[start : start + shape.numel()].view(shape).clone()
    return out


def torch_result(case: Case, data: list[Sample], coefs: list[Tensor], dtype: torch.dtype) -> Result:
    """The plain model under autograd in a dtype."""
    stored = reference_model.stored_weights(case.model, case.leaves, case.head, seed=7)
    stored = rounded({n: w.detach() for n, w in stored.items()}, DTYPES[case.precision])
    weights = {name: w.to(dtype).requires_grad_() for name, w in stored.items()}
    loss, parts = torch.zeros((), dtype=dtype), []
    inv = INV_TEMPERATURE if case.head == "lm" else 1.0
    for s, c in zip(data, coefs):
        a, b = reference_model.score(case.model, case.leaves, weights, s.prompt, s.response, inv)
        parts.append((a, b))
        loss = loss + (c[0].to(dtype) * a).sum()
        if case.head == "lm":
            loss = loss + (c[1].to(dtype) * b).sum()
    grads = torch.autograd.grad(loss, list(weights.values()))
    names = ("logprobs", "entropy") if case.head == "lm" else ("values",)
    scores = {n: torch.cat([p[k] for p in parts]).detach() for k, n in enumerate(names)}
    return Result(scores, dict(zip(weights, grads)))


def rounded(weights: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """What an engine in `dtype` multiplies with: leafed parameters are rounded to it, norms stay fp32."""
    return {n: w if w.dim() == 1 else w.to(dtype).to(w.dtype) for n, w in weights.items()}


def errors(name: str, head: str, gemm: str, precision: str) -> dict[str, tuple[float, float]]:
    """Score or parameter -> root mean square over the seeds of the relative Frobenius errors against fp64 of
    (the engine, plain PyTorch in the same precision)."""
    off, dtype = gemm == "off", DTYPES[precision]
    case = Case(
        model=MODELS[name],
        head=head,
        leaves=1 if off else 6,
        slots=1 if off else 3,
        gemm=gemm,
        mode="off" if off else "layout",
        precision=precision,
        mesh=MeshConfig(micro_batch_size=2),
    )
    squares: dict[str, list[tuple[float, float]]] = {}
    for seed in range(SEEDS):
        data = samples(case.model.vocab_size, seed)
        coefs = coefficients(data, seed)
        ours, plain = engine_result(case, data, coefs), torch_result(case, data, coefs, dtype)
        truth = torch_result(case, data, coefs, torch.float64)
        for part in ("scores", "gradients"):
            for key, value in getattr(truth, part).items():
                pair = (error(getattr(r, part)[key], value) ** 2 for r in (ours, plain))
                squares.setdefault(key, []).append(tuple(pair))
    return {k: tuple((sum(e) / SEEDS) ** 0.5 for e in zip(*pairs)) for k, pairs in squares.items()}


def error(got: Tensor, truth: Tensor) -> float:
    return float((got.double() - truth).norm() / truth.norm())


@pytest.mark.parametrize(("name", "head", "gemm", "precision"), CASES)
def test_the_error_is_no_larger_than_plain_pytorchs(name, head, gemm, precision) -> None:
    """10% overall and 2x for one parameter are room for luck; a coarse shortcut costs a factor of ten."""
    found = errors(name, head, gemm, precision)
    ours, plain = (sum(e[k] ** 2 for e in found.values()) ** 0.5 for k in (0, 1))
    assert ours <= 1.1 * plain
    assert {k: e for k, e in found.items() if e[0] > max(2 * e[1], FLOOR)} == {}
    assert max(e[0] for e in found.values()) < LARGEST[precision]


def test_a_coarse_engine_would_be_seen() -> None:
    """Negative control: `invariance.leaf_dtype: bf16` in an fp32 model is such a shortcut."""
    model = MODELS["mha"]
    data = samples(model.vocab_size, 0)
    coefs = coefficients(data, 0)
    case = Case(model=model, leaves=6, slots=3, leaf_dtype="bf16")
    truth = torch_result(case, data, coefs, torch.float64)
    plain, ours = torch_result(case, data, coefs, torch.float32), engine_result(case, data, coefs)
    name = "layers.0.qkv"
    assert error(ours.gradients[name], truth.gradients[name]) > 10 * error(
        plain.gradients[name], truth.gradients[name]
    )
