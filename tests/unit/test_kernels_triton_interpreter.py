"""The portable CUDA kernels, run on CPU by Triton's interpreter in fp32 (it has no bf16 products).

What this cannot show: tensor cores, bf16, races, and the kernels for one GPU. tests/device does.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.paging import paged
from tests.rollouts import roles_of, roll_out
from unirl_scale.core.config import ModelConfig
from unirl_scale.core.errors import ShapeError
from unirl_scale.kernels.reference import ReferenceOps
from unirl_scale.kernels.spans import Spans

SPANS = Spans.of([5, 0, 37, 3])


@pytest.fixture(scope="module")
def ops() -> Iterator[Any]:
    """CudaOps with every kernel interpreted: Triton reads the variable when it is first imported."""
    if find_spec("triton") is None:
        pytest.skip("triton is not installed (pip install unirl-scale[cuda])")
    if "triton" in sys.modules:
        pytest.skip("triton was imported before this module could ask for its interpreter")
    patch = pytest.MonkeyPatch()
    patch.setenv("TRITON_INTERPRET", "1")
    try:
        from unirl_scale.kernels.cuda.device import Device
        from unirl_scale.kernels.cuda.table import CudaOps

        table = CudaOps(Device())
        try:
            table.vocab_stats(torch.zeros(1, 4), 1, [4], torch.zeros(1, dtype=torch.int64))
        except Exception as error:
            if "0-dimensional" not in str(error):
                raise
            pytest.skip("this Triton's interpreter is older than the installed numpy (needs numpy < 2.4)")
        yield table
    finally:
        patch.undo()


@pytest.fixture
def random(request: pytest.FixtureRequest) -> Any:
    generator = torch.Generator().manual_seed(sum(request.node.name.encode()))
    return lambda *shape: torch.randn(shape, generator=generator)


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.int32), b.contiguous().view(torch.int32))


def assert_close(got: Tensor, want: Tensor) -> None:
    assert float((got.double() - want.double()).norm() / want.double().norm()) < 2e-6


def test_products_match_the_truth_and_split(ops: Any, random: Any) -> None:
    truth, (leaves, n, k, rows) = ReferenceOps(), (3, 20, 24, 33)
    w, x, inner = random(leaves, n, k), random(rows, k), random(rows, leaves * k)
    dy = random(rows, leaves * n)
    assert_close(ops.linear(x, w, random(leaves, n) * 0), truth.linear(x, w))
    for nodes in (((0, 3),), ((0, 2), (2, 3))):
        assert_close(ops.linear_dx_nodes(dy, w, nodes), truth.linear_dx_nodes(dy, w, nodes))
        assert_close(ops.row_linear_nodes(inner, w, nodes), truth.row_linear_nodes(inner, w, nodes))
    part = ops.linear(x[4:5], w[1:2])
    assert same_bits(part, ops.linear(x, w)[4:5, n : 2 * n])


def test_weight_gradients_add_samples_in_order(ops: Any, random: Any) -> None:
    truth, (leaves, n, k) = ReferenceOps(), (2, 20, 24)
    dy, x, start = random(SPANS.total, leaves * n), random(SPANS.total, k), random(leaves, n, k)
    got, want = start.clone(), start.clone()
    ops.linear_dw(dy, x, SPANS, got)
    truth.linear_dw(dy, x, SPANS, want)
    assert_close(got, want)
    serial = start.clone()
    for a, b in zip(SPANS.offsets, SPANS.offsets[1:]):
        ops.linear_dw(dy[a:b], x[a:b], Spans.of([b - a]), serial)
    assert same_bits(got, serial)


def test_attention_matches_the_truth_and_decode_its_rows(ops: Any, random: Any) -> None:
    truth, (heads, kv_heads, width), spans = ReferenceOps(), (2, 1, 24), Spans.of([5, 0, 37])
    q, do = random(spans.total, heads, width), random(spans.total, heads, width)
    k, v = random(spans.total, kv_heads, width), random(spans.total, kv_heads, width)
    o, lse = ops.attention(q, k, v, spans, 0.2)
    for got, want in zip((o, lse), truth.attention(q, k, v, spans, 0.2)):
        assert_close(got, want)
    grads = ops.attention_dx(do, q, k, v, o, lse, spans, 0.2)
    for got, want in zip(grads, truth.attention_dx(do, q, k, v, o, lse, spans, 0.2)):
        assert_close(got, want)
    lengths, rows = torch.tensor([5, 37]), [4, 41]
    for page in (1, 16, 32, 64, 96):
        (k_pages, table), (v_pages, _) = (paged(t, [5, 37], page) for t in (k, v))
        assert same_bits(ops.attention_decode(q[rows], k_pages, v_pages, table, lengths, 0.2), o[rows])
    earlier = ops.attention_decode(q[[2, 37]], k_pages, v_pages, table, torch.tensor([3, 33]), 0.2)
    assert same_bits(earlier, o[[2, 37]])


def test_decode_notices_a_wrong_table_entry_and_a_page_that_cuts_a_tile(ops: Any, random: Any) -> None:
    spans = Spans.of([37])
    q, k, v = random(37, 2, 24), random(37, 1, 24), random(37, 1, 24)
    o, _ = ops.attention(q, k, v, spans, 0.2)
    (k_pages, table), (v_pages, _) = (paged(t, [37], 16) for t in (k, v))
    last, length = q[36:], torch.tensor([37])
    table[0, 0] = table[0, 1]
    assert not same_bits(ops.attention_decode(last, k_pages, v_pages, table, length, 0.2), o[36:])
    k_pages, table = paged(k.bfloat16(), [37], 96)
    with pytest.raises(ShapeError, match=r"pages of 96 positions; .* KV tile of 128\nhint: 64 or 128"):
        ops.attention_decode(last.bfloat16(), k_pages, k_pages, table, length, 0.2)


def test_a_rollout_has_the_bits_of_the_training_forward(ops: Any) -> None:
    """Pages, shared prompts, sampling and scores through these kernels; a sequence is preempted."""
    model = ModelConfig(
        hidden_size=16,
        num_layers=1,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        ffn_size=16,
        vocab_size=20,
        init_std=0.5,
    )
    prompts = [(1, 2, 3, 4, 5), (1, 2, 3, 4, 5), (6,)]
    limits = {"max_prompt_tokens": 6, "max_response_tokens": 5, "page_size": 4}
    outcomes = [
        roll_out(roles_of(model, ops, "cpu", 2, **limits, kv_cache_tokens=tokens), prompts, [(0,)])
        for tokens in (0, 12)
    ]
    assert all(outcomes[0].equal) and outcomes[0].bits == outcomes[1].bits
    assert outcomes[0].tokens > 8 and outcomes[1].counts.preempted > 0


@pytest.mark.parametrize("columns", [1, 37, 4096, 9000])
def test_sampling_has_the_choices_of_the_truth(ops: Any, random: Any, columns: int) -> None:
    truth, rows = ReferenceOps(), 5
    uniforms = torch.linspace(0, 1 - 2**-53, rows, dtype=torch.float64)
    spread = 3 * random(rows, columns + 3)[:, :columns]  # rows lie apart
    some = torch.where(random(rows, columns) > 0.5, 0.0, -torch.inf)  # equal likelihoods or none
    some[:, columns // 2] = 0.0
    for logits in (spread, some, torch.zeros(rows, columns)):
        got = ops.sample(logits, uniforms)
        assert torch.equal(got, truth.sample(logits, uniforms))
        assert torch.equal(ops.sample(logits[3:4].clone(), uniforms[3:4]), got[3:4])
    if columns > 1:
        assert len(set(ops.sample(torch.zeros(rows, columns), uniforms).tolist())) > 1


@pytest.mark.parametrize("n", [1, 2, 3, 6, 65])
def test_sums_have_the_bits_of_the_truth(ops: Any, random: Any, n: int) -> None:
    truth, leaves = ReferenceOps(), random(n, 3, 7) * torch.exp(3 * random(n, 3, 7))
    assert same_bits(ops.tree_sum(leaves), truth.tree_sum(leaves))
    if n == 3:
        assert not same_bits(ops.tree_sum(leaves), ops.tree_sum(leaves.flip(0).contiguous()))
    spans = Spans.of([n, 0, 4])
    x, got = random(spans.total, 45), random(45)
    want = got.clone()
    ops.sum_tokens(x, spans, got)
    truth.sum_tokens(x, spans, want)
    assert same_bits(got, want)


def test_vocabulary_and_embedding(ops: Any, random: Any) -> None:
    truth, valid = ReferenceOps(), [50, 0, 33]
    logits, targets = random(5, 150) * 3, torch.tensor([3, -1, 120, 132, 49])
    for got, want in zip(
        ops.vocab_stats(logits, 3, valid, targets), truth.vocab_stats(logits, 3, valid, targets)
    ):
        assert_close(got.nan_to_num(neginf=-9), want.nan_to_num(neginf=-9))
    rows = [logits.logsumexp(1), *(random(5) for _ in range(3))]
    for options in ({"scale": 1.0, "dtype": torch.float32}, {"scale": 0.7, "dtype": torch.bfloat16}):
        got = ops.vocab_dlogits(logits, 3, valid, targets, *rows, **options)
        assert got.dtype == options["dtype"]
        want = truth.vocab_dlogits(logits, 3, valid, targets, *rows, **options)
        tolerance = 1e-2 if got.dtype == torch.bfloat16 else 2e-6  # exp may differ in its last bit
        assert float((got.float() - want.float()).norm() / want.float().norm()) < tolerance
    dy, ids, got = random(30, 20), torch.arange(30) ** 2 % 7 - 1, random(6, 20)
    want = got.clone()
    ops.embedding_dw(dy, ids, got)
    truth.embedding_dw(dy, ids, want)
    assert same_bits(got, want)


def test_optimizer_has_the_bits_of_the_truth(ops: Any, random: Any) -> None:
    blocks = random(3, 64)
    truth = ReferenceOps()
    assert torch.equal(ops.block_sumsq(blocks), truth.block_sumsq(blocks))
    state = [random(1500), random(1500), random(1500).abs(), random(1500)]
    other = [t.clone() for t in state]
    options = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}
    options |= {"bias_correction1": 0.3, "bias_correction2": 0.2, "grad_scale": 0.7}
    ops.adamw(*state, **options)
    truth.adamw(*other, **options)
    assert all(same_bits(a, b) for a, b in zip(state, other))


def test_rows(ops: Any, random: Any) -> None:
    truth = ReferenceOps()
    x, dy, w = random(7, 3, 45), random(7, 3, 45), random(45)
    y, rstd = ops.rmsnorm(x, w, 1e-6)
    assert_close(y, truth.rmsnorm(x, w, 1e-6)[0])
    beside = random(7, 3, 45)
    for args in ((dy, x, w, rstd), (dy, x, w, rstd, beside)):
        for got, want in zip(ops.rmsnorm_dx(*args), truth.rmsnorm_dx(*args)):
            assert_close(got, want)
    assert same_bits(ops.add(x, dy), truth.add(x, dy))
    for got, want in zip(ops.add_rmsnorm(x, dy, w, 1e-6), truth.add_rmsnorm(x, dy, w, 1e-6)):
        assert_close(got, want)
    heads, angle = random(9, 3, 24), random(9, 12)
    for inverse in (False, True):
        args = (heads, angle.cos(), angle.sin())
        assert_close(ops.rope(*args, inverse=inverse), truth.rope(*args, inverse=inverse))
    q, k, v = random(9, 7, 24).split([3, 2, 2], dim=1)
    slots, pages = torch.arange(9) * 2, random(2, 2, 3, 6, 2, 24)
    arguments = (q, k, v, angle.cos(), angle.sin())
    got = ops.rope_to_pages(*arguments, *pages[0], slots)
    assert_close(got, truth.rope_to_pages(*arguments, *pages[1], slots))
    written = slots.tolist()
    for mine, theirs in zip(pages[0].flatten(1, 2), pages[1].flatten(1, 2)):
        assert_close(mine[written], theirs[written])
    gate_up, dy = random(9, 3, 2, 50), random(9, 3, 50)
    assert_close(ops.swiglu(gate_up), truth.swiglu(gate_up))
    dx, again = ops.swiglu_dx(dy, gate_up)
    assert_close(dx, truth.swiglu_dx(dy, gate_up)[0])
    assert same_bits(again, ops.swiglu(gate_up))
