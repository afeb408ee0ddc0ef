"""Norm, RoPE, SwiGLU, vocabulary, embedding, sums and optimizer on the GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.device.checks import assert_close, same_bits
from tests.device.conftest import Random
from unirl_scale.kernels.reference import ReferenceOps
from unirl_scale.kernels.spans import Spans

pytestmark = pytest.mark.cuda

DTYPES = [torch.bfloat16, torch.float32]
ROWS = [1, 31, 33, 928]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [45, 128, 2048, 5120])
@pytest.mark.parametrize("rows", ROWS)
def test_rmsnorm_matches_fp64_and_is_row_invariant(
    ops: Any, random: Random, rows: int, width: int, dtype: torch.dtype
) -> None:
    x, dy, w = random(rows, width, dtype=dtype), random(rows, width, dtype=dtype), random(width, dtype=dtype)
    x64 = x.double().requires_grad_()
    rstd = (x64.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
    want = x64 * rstd * w.double()
    y, got_rstd = ops.rmsnorm(x, w, 1e-6)
    assert_close(y, want.detach(), dtype)
    assert_close(got_rstd, rstd.detach().squeeze(-1), torch.float32)
    want.backward(dy.double())
    dx, dw = ops.rmsnorm_dx(dy, x, w, got_rstd)
    assert x64.grad is not None
    assert_close(dx, x64.grad, dtype)
    assert_close(dw, dy.double() * x.double() * rstd.detach(), torch.float32)
    beside, root = random(rows, width, dtype=dtype), random(rows, width, dtype=torch.float32)
    for delta in (root, root.to(dtype)):  # as one rank has it, and as it arrives from several
        total, normed, total_rstd = ops.add_rmsnorm(x, delta, w, 1e-6)
        assert same_bits(total, x + root.to(dtype)) and same_bits(ops.add(x, delta), total)
        assert all(same_bits(a, b) for a, b in zip((normed, total_rstd), ops.rmsnorm(total, w, 1e-6)))
        alone, rows_dw = ops.rmsnorm_dx(root.to(dtype), x, w, got_rstd)
        passed, same_dw = ops.rmsnorm_dx(delta, x, w, got_rstd, beside)
        assert same_bits(passed, beside + alone) and same_bits(same_dw, rows_dw)
    for at in {0, rows // 2, rows - 1}:
        row = slice(at, at + 1)
        one, one_rstd = ops.rmsnorm(x[row], w, 1e-6)
        assert same_bits(one, y[row]) and same_bits(one_rstd, got_rstd[row])
        assert all(
            same_bits(a, b[row]) for a, b in zip(ops.rmsnorm_dx(dy[row], x[row], w, one_rstd), (dx, dw))
        )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "width"), [(3, 24), (8, 64), (32, 128)])
def test_rope_matches_fp64_and_its_inverse_undoes_it(
    ops: Any, random: Random, heads: int, width: int, dtype: torch.dtype
) -> None:
    tokens = 101
    fused = random(tokens, heads + 2, width, dtype=dtype)
    x = fused[:, :heads]  # a strided view of a fused projection
    angle = random(tokens, width // 2, dtype=torch.float32)
    cos, sin = angle.cos(), angle.sin()
    a, b = x.double().chunk(2, -1)
    c, s = cos.double().unsqueeze(1), sin.double().unsqueeze(1)
    y = ops.rope(x, cos, sin)
    assert_close(y, torch.cat([a * c - b * s, b * c + a * s], -1), dtype)
    assert_close(ops.rope(y, cos, sin, inverse=True), x, dtype)
    assert same_bits(ops.rope(x[5:6, 1:2], cos[5:6], sin[5:6]), y[5:6, 1:2])
    k, v = fused[:, heads : heads + 1], fused[:, heads + 1 :]
    k_pages, v_pages = random(2, 13, 16, 1, width, dtype=dtype)
    slots = torch.randperm(13 * 16, device="cuda")[:tokens]
    assert same_bits(ops.rope_to_pages(x, k, v, cos, sin, k_pages, v_pages, slots), y)
    assert same_bits(k_pages.flatten(0, 1)[slots], ops.rope(k, cos, sin))
    assert same_bits(v_pages.flatten(0, 1)[slots], v.contiguous())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("leaves", "width"), [(3, 45), (4, 2048)])
def test_swiglu_matches_fp64_and_splits_over_leaves(
    ops: Any, random: Random, leaves: int, width: int, dtype: torch.dtype
) -> None:
    gate_up, dy = random(101, leaves, 2, width, dtype=dtype), random(101, leaves, width, dtype=dtype)
    exact = gate_up.double().requires_grad_()
    want = torch.nn.functional.silu(exact[:, :, 0]) * exact[:, :, 1]
    want.backward(dy.double())
    y, (dx, again) = ops.swiglu(gate_up), ops.swiglu_dx(dy, gate_up)
    assert same_bits(again, y)
    assert exact.grad is not None
    assert_close(y, want.detach(), dtype)
    assert_close(dx, exact.grad, dtype)
    part = gate_up[40:41, 1:2].contiguous()
    assert same_bits(ops.swiglu(part), y[40:41, 1:2])
    assert same_bits(ops.swiglu_dx(dy[40:41, 1:2].contiguous(), part)[0], dx[40:41, 1:2])


VOCABULARIES = [
    (1, 45, [45]),
    (3, 50, [50, 0, 33]),
    (4, 2500, [2500, 2500, 2500, 17]),
    (2, 16003, [16003, 9]),
]


@pytest.mark.parametrize(("leaves", "width", "valid"), VOCABULARIES)
def test_vocabulary_ops_match_fp64_and_split_over_leaves(
    ops: Any, random: Random, leaves: int, width: int, valid: list[int]
) -> None:
    rows = 33
    logits = random(rows, leaves * width, dtype=torch.float32) * 4
    real = torch.cat([torch.arange(width, device="cuda") < n for n in valid])
    logits[:, ~real] = torch.nan  # padding is never read as a number
    columns = torch.nonzero(real).squeeze(1)
    targets = columns[torch.arange(rows, device="cuda") * 7919 % len(columns)]
    targets[::5] = -1
    stats, picked = ops.vocab_stats(logits, leaves, valid, targets)
    for leaf, n in enumerate(valid):
        x = logits[:, leaf * width : leaf * width + n].double()
        if n == 0:
            assert stats[:, leaf].tolist() == [[-torch.inf, 0.0, 0.0]] * rows
            continue
        top = x.max(1).values
        e = (x - top[:, None]).exp()
        assert torch.equal(stats[:, leaf, 0].double(), top)
        assert_close(stats[:, leaf, 1], e.sum(1), torch.float32)
        assert_close(stats[:, leaf, 2] - 1e-3, (e * (x - top[:, None])).sum(1) - 1e-3, torch.float32)
        alone, _ = ops.vocab_stats(
            logits[:, leaf * width : (leaf + 1) * width].contiguous(), 1, [n], torch.full_like(targets, -1)
        )
        assert same_bits(alone[:, 0], stats[:, leaf])
    here = targets >= 0
    assert torch.equal(picked[here], logits[here].gather(1, targets[here, None]).squeeze(1))
    assert torch.equal(picked[~here], torch.zeros_like(picked[~here]))
    exact = logits[:, real].double().requires_grad_()
    logp = exact.log_softmax(1)
    entropy = -(logp.exp() * logp).sum(1)
    grad_logprob, grad_entropy = (random(rows, dtype=torch.float32) for _ in range(2))
    local = torch.full((leaves * width,), -1, device="cuda").masked_scatter(
        real, torch.arange(len(columns), device="cuda")
    )
    hit = logp.gather(1, local[targets.clamp(min=0)].clamp(min=0)[:, None]).squeeze(1)
    loss = (grad_logprob * torch.where(here, hit, -exact.logsumexp(1))).sum()
    (loss + (grad_entropy * entropy).sum()).backward()
    lse = exact.detach().logsumexp(1).float()
    arguments = (logits, leaves, valid, targets, lse, entropy.detach().float(), grad_logprob, grad_entropy)
    got = ops.vocab_dlogits(*arguments, scale=1.0, dtype=torch.float32)
    scaled = ops.vocab_dlogits(*arguments, scale=0.7, dtype=torch.bfloat16)
    assert same_bits(scaled, (got * 0.7).bfloat16())
    assert exact.grad is not None
    assert float((got[:, real].double() - exact.grad).norm() / exact.grad.norm()) < 2e-5
    assert torch.equal(got[:, ~real], torch.zeros_like(got[:, ~real]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [45, 1000])
def test_embedding_gradient_adds_in_token_order(
    ops: Any, random: Random, width: int, dtype: torch.dtype
) -> None:
    tokens, rows = 999, 37
    dy, out = random(tokens, width, dtype=dtype, spread=2), random(rows, width, dtype=torch.float32)
    ids = torch.arange(tokens, device="cuda") ** 2 % (rows + 1) - 1
    want = out.cpu()
    for t, row in enumerate(ids.tolist()):
        if row >= 0:
            want[row] += dy[t].cpu().float()
    ops.embedding_dw(dy, ids, out)
    assert same_bits(out.cpu(), want)


@pytest.mark.parametrize("n", [1, 2, 3, 4, 6, 7, 64, 65, 130])
def test_tree_sum_has_the_bits_of_the_truth(ops: Any, random: Random, n: int) -> None:
    leaves = random(n, 3, 701, dtype=torch.float32, spread=3)
    assert same_bits(ops.tree_sum(leaves).cpu(), ReferenceOps().tree_sum(leaves.cpu()))
    if n in (3, 7):
        assert not same_bits(ops.tree_sum(leaves), ops.tree_sum(leaves.flip(0).contiguous()))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lengths", [[1], [5, 0, 70, 300, 31], [4100], [0]])
def test_sum_tokens_has_the_bits_of_the_truth(
    ops: Any, random: Random, lengths: list[int], dtype: torch.dtype
) -> None:
    spans = Spans.of(lengths, "cuda")
    x, out = random(spans.total, 203, dtype=dtype, spread=2), random(203, dtype=torch.float32)
    want = out.cpu()
    ReferenceOps().sum_tokens(x.cpu(), Spans.of(lengths), want)
    ops.sum_tokens(x, spans, out)
    assert same_bits(out.cpu(), want)


@pytest.mark.parametrize("width", [1, 16, 64, 4096, 65536])
def test_block_sums_of_squares_have_the_bits_of_the_truth(ops: Any, random: Random, width: int) -> None:
    blocks = random(5, width, dtype=torch.float32, spread=3)
    assert same_bits(ops.block_sumsq(blocks).cpu(), ReferenceOps().block_sumsq(blocks.cpu()))


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_adamw_has_the_bits_of_the_truth_and_of_its_slices(
    ops: Any, random: Random, weight_decay: float
) -> None:
    state = [random(5003, dtype=torch.float32, spread=2) for _ in range(4)]
    state[2].abs_()
    options = {
        "lr": 3e-4,
        "beta1": 0.9,
        "beta2": 0.95,
        "eps": 1e-8,
        "weight_decay": weight_decay,
        "bias_correction1": 1 - 0.9**7,
        "bias_correction2": 1 - 0.95**7,
        "grad_scale": 0.37,
    }

    def step(table: Any, tensors: list[Tensor]) -> list[Tensor]:
        copies = [t.clone() for t in tensors]
        table.adamw(*copies, **options)
        return copies[:3]

    got = step(ops, state)
    for ours, truth in zip(got, step(ReferenceOps(), [t.cpu() for t in state])):
        assert same_bits(ours.cpu(), truth)
    for ours, part in zip(got, step(ops, [t[777:3001].clone() for t in state])):
        assert same_bits(ours[777:3001], part)
