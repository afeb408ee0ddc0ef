"""ReferenceOps: every op against fp64, gradients against autograd, and the contract of kernels/table.py.

The contract's properties (rows, splits, leaves, decode against training) are also what kernels/check.py
probes at start-up; here are other shapes and cuts. The self-check itself is tested in test_kernels_select.py.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.canonical import naive_tree
from unirl_scale.core.errors import ShapeError
from unirl_scale.kernels.check import same_bits
from unirl_scale.kernels.reference import ReferenceOps
from unirl_scale.kernels.spans import Spans

PATHS = ["whole", "blocked"]
ERROR = {torch.float32: 1e-6, torch.bfloat16: 4e-3}  # relative Frobenius; bf16 rounds each result to 8 bits
LENGTHS = [40, 1, 70, 39]
SPANS = Spans.of(LENGTHS)
T, L, N, K = SPANS.total, 3, 20, 48


@pytest.fixture(params=PATHS)
def ops(request: pytest.FixtureRequest) -> ReferenceOps:
    return ReferenceOps(request.param)


@pytest.fixture(params=ERROR, ids=["fp32", "bf16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


def wide(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Values from about 1e-6 to 1e4, so that cancellation and another order of addition show."""
    g = torch.Generator().manual_seed(seed)
    size = 10.0 ** (torch.rand(shape, generator=g) * 10 - 6)
    return (size * torch.randn(shape, generator=g).sign()).to(dtype)


def normal(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def error(got: Tensor, truth: Tensor) -> float:
    """Relative Frobenius distance from an fp64 truth."""
    return float((got.double() - truth).norm() / truth.norm())


def by_leaf(x: Tensor, leaves: int) -> list[Tensor]:
    return list(x.double().unflatten(1, (leaves, -1)).unbind(1))


# ---- GEMM -------------------------------------------------------------------------------------------
@pytest.mark.parametrize("values", [wide, normal])
def test_products_against_fp64(ops, dtype, values) -> None:
    x, w = values(T, K, seed=0, dtype=dtype), values(L, N, K, seed=1, dtype=dtype)
    bias, dy = values(L, N, seed=2, dtype=dtype), values(T, L * N, seed=3, dtype=dtype)
    flat = w.double().flatten(0, 1)
    forward = x.double() @ flat.t()
    assert error(ops.linear(x, w), forward) < ERROR[dtype]
    assert error(ops.linear(x, w, bias), forward + bias.double().view(-1)) < ERROR[dtype]
    assert ops.linear(x, w).dtype == dtype
    logits = ops.linear(x, w, out_fp32=True)
    assert logits.dtype == torch.float32 and error(logits, forward) < 1e-6
    assert error(ops.linear_dx_nodes(dy, w, ((0, L),))[0], dy.double() @ flat) < 1e-6
    xl, wl = values(T, L * N, seed=4, dtype=dtype), values(L, K, N, seed=5, dtype=dtype)
    row = sum(a @ b.double().t() for a, b in zip(by_leaf(xl, L), wl))
    assert error(ops.row_linear_nodes(xl, wl, ((0, L),))[0], row) < 1e-6
    dyr = values(T, K, seed=6, dtype=dtype)
    dx = torch.cat([dyr.double() @ b.double() for b in wl], dim=1)
    assert error(ops.row_linear_dx(dyr, wl), dx) < ERROR[dtype]


def test_weight_gradients_add_sample_by_sample(ops, dtype) -> None:
    dy, x = wide(T, L * N, seed=0, dtype=dtype), wide(T, K, seed=1, dtype=dtype)
    start = normal(L, N, K, seed=2)
    out = start.clone()
    ops.linear_dw(dy, x, SPANS, out)
    assert error(out, start.double() + (dy.double().t() @ x.double()).view(L, N, K)) < 1e-6
    one_by_one, row = start.clone(), 0
    for n in LENGTHS:
        ops.linear_dw(dy[row : row + n], x[row : row + n], Spans.of([n]), one_by_one)
        row += n
    assert same_bits(out, one_by_one)
    dyr, xl = wide(T, K, seed=3, dtype=dtype), wide(T, L * N, seed=4, dtype=dtype)
    out = torch.zeros(L, K, N)
    ops.row_linear_dw(dyr, xl, SPANS, out)
    assert error(out, torch.stack([dyr.double().t() @ b for b in by_leaf(xl, L)])) < 1e-6


def test_a_sample_without_rows_adds_nothing_not_even_zero(ops) -> None:
    dy, x = normal(5, L * N, seed=0), normal(5, K, seed=1)
    out = torch.full((L, N, K), -0.0)
    ops.linear_dw(dy[:0], x[:0], Spans.of([0]), out)
    ops.row_linear_dw(x[:0], dy[:0], Spans.of([0]), out.view(L, K, N))
    ops.sum_tokens(dy[:0], Spans.of([0]), out.view(-1)[: L * N])
    assert same_bits(out, torch.full((L, N, K), -0.0))


def test_nodes_are_trees_over_leaves_and_round_leaf_rounds_leaves(ops) -> None:
    leaves = 5
    dy, w = wide(9, leaves * N, seed=0), wide(leaves, N, K, seed=1)
    alone = [ops.linear_dx_nodes(dy, w, ((i, i + 1),))[0] for i in range(leaves)]
    nodes = ops.linear_dx_nodes(dy, w, ((0, 4), (4, 5)))
    assert same_bits(nodes[0], naive_tree(alone[:4], torch.add))
    assert same_bits(nodes[1], alone[4])
    rounded = ops.linear_dx_nodes(dy, w, ((0, leaves),), round_leaf=True)[0]
    assert same_bits(rounded, naive_tree([a.bfloat16().float() for a in alone], torch.add))
    x, wr = wide(9, leaves * N, seed=2), wide(leaves, K, N, seed=3)
    alone = [ops.row_linear_nodes(x, wr, ((i, i + 1),))[0] for i in range(leaves)]
    rounded = ops.row_linear_nodes(x, wr, ((1, 4),), round_leaf=True)[0]
    assert same_bits(rounded, naive_tree([a.bfloat16().float() for a in alone[1:4]], torch.add))


CUTS = [(0, 1), (149, 150), (31, 33), (5, 21), (63, 65), (2, 150), (70, 134)]


@pytest.mark.parametrize("columns", [1, 2, 20, 64])
def test_blocked_products_are_row_and_leaf_invariant(dtype, columns) -> None:
    ops = ReferenceOps("blocked")
    x, w = wide(T, K, seed=0, dtype=dtype), wide(L, columns, K, seed=1, dtype=dtype)
    y = ops.linear(x, w)
    dy = wide(T, L * columns, seed=2, dtype=dtype)
    dx = ops.linear_dx_nodes(dy, w, ((0, L),))[0]
    for a, b in CUTS:
        assert same_bits(ops.linear(x[a:b].clone(), w), y[a:b]), (a, b)
        assert same_bits(ops.linear_dx_nodes(dy[a:b].clone(), w, ((0, L),))[0], dx[a:b]), (a, b)
    for leaf in range(L):
        part = slice(leaf * columns, (leaf + 1) * columns)
        assert same_bits(ops.linear(x, w[leaf : leaf + 1]), y[:, part])
        own = torch.zeros(1, columns, K)
        every = torch.zeros(L, columns, K)
        ops.linear_dw(dy, x, SPANS, every)
        ops.linear_dw(dy[:, part].contiguous(), x, SPANS, own)
        assert same_bits(own[0], every[leaf])


def test_no_product_is_handed_to_a_matrix_vector_kernel(ops, monkeypatch) -> None:
    """BLAS has other kernels, with other bits, for one row or one column (a value head, a decode step)."""
    seen, mm = [], torch.mm

    def recorded(a: Tensor, b: Tensor, **out: Tensor) -> Tensor:
        seen.append((a.shape[0], b.shape[1]))
        return mm(a, b, **out)

    monkeypatch.setattr(torch, "mm", recorded)
    x, w = normal(1, K, seed=0), normal(1, 1, K, seed=1)
    assert error(ops.linear(x, w), x.double() @ w[0].double().t()) < 1e-6
    ops.row_linear_nodes(normal(1, L * N, seed=2), normal(L, K, N, seed=3), ((0, L),))
    ops.linear_dx_nodes(normal(1, L * N, seed=2), normal(L, N, K, seed=3), ((0, L),))
    ops.row_linear_dx(x, normal(L, K, N, seed=3))
    assert len(seen) == 1 + 3 * L and min(min(shape) for shape in seen) >= 16


# ---- sums -------------------------------------------------------------------------------------------
@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 6, 7, 12, 31, 33])
def test_tree_sum_is_the_canonical_tree(ops, count) -> None:
    leaves = wide(count, 7, seed=count)
    leaves[:, 0] = -0.0
    assert same_bits(ops.tree_sum(leaves), naive_tree(list(leaves), torch.add))


def test_token_sums_and_block_squares(ops, dtype) -> None:
    x, out = wide(T, 11, seed=0, dtype=dtype), torch.zeros(11)
    ops.sum_tokens(x, SPANS, out)
    assert error(out, x.double().sum(0)) < 1e-6
    blocks = wide(5, 1024, seed=1)
    got = ops.block_sumsq(blocks)
    assert got.dtype == torch.float64 and error(got, blocks.double().square().sum(1)) < 1e-6
    assert same_bits(ops.block_sumsq(blocks[2:3]), got[2:3])


def test_embedding_gradient_adds_in_token_order(ops, dtype) -> None:
    dy, ids = wide(60, 8, seed=0, dtype=dtype), torch.randint(-1, 5, (60,))
    out = wide(5, 8, seed=1)
    expected = out.clone()
    for t, row in enumerate(ids.tolist()):
        if row >= 0:
            expected[row] = expected[row] + dy[t].float()
    ops.embedding_dw(dy, ids, out)
    assert same_bits(out, expected)


# ---- pointwise, norm, rope --------------------------------------------------------------------------
def leaf64(*tensors: Tensor) -> list[Tensor]:
    return [t.detach().double().requires_grad_() for t in tensors]


@pytest.mark.parametrize("values", [wide, normal])
def test_rmsnorm_and_its_gradient(ops, dtype, values) -> None:
    x, w, dy = values(T, K, seed=0, dtype=dtype), values(K, seed=1), values(T, K, seed=2, dtype=dtype)
    y, rstd = ops.rmsnorm(x, w, 1e-6)
    dx, dw_rows = ops.rmsnorm_dx(dy, x, w, rstd)
    x64, w64 = leaf64(x, w)
    truth = torch.nn.functional.rms_norm(x64, (K,), w64, 1e-6)
    gx, gw = torch.autograd.grad(truth, (x64, w64), dy.double())
    assert error(y, truth.detach()) < ERROR[dtype]
    assert error(dx, gx) < ERROR[dtype]
    assert error(dw_rows.double().sum(0), gw) < 1e-6
    for a, b in CUTS:
        assert same_bits(ops.rmsnorm(x[a:b].clone(), w, 1e-6)[0], y[a:b])
        assert same_bits(ops.rmsnorm_dx(dy[a:b].clone(), x[a:b].clone(), w, rstd[a:b])[0], dx[a:b])


def test_residual_connections_round_the_sum_before_they_add_it(ops, dtype) -> None:
    x, w, root = normal(T, K, seed=0, dtype=dtype), wide(K, seed=1), wide(T, K, seed=2)
    delta = root.to(dtype)
    for given in (root, delta):
        y, normed, rstd = ops.add_rmsnorm(x, given, w, 1e-6)
        assert same_bits(y, x + delta) and same_bits(ops.add(x, given), y)
        assert all(same_bits(a, b) for a, b in zip((normed, rstd), ops.rmsnorm(y, w, 1e-6)))
        dx, dw_rows = ops.rmsnorm_dx(given, x, w, rstd)
        beside = normal(T, K, seed=3, dtype=dtype)
        total, same_rows = ops.rmsnorm_dx(given, x, w, rstd, beside)
        assert same_bits(dx, ops.rmsnorm_dx(delta, x, w, rstd)[0])
        assert same_bits(total, beside + dx) and same_bits(same_rows, dw_rows)


def test_decode_writes_rotated_keys_and_values_to_their_slots(ops, dtype) -> None:
    fused = normal(4, 8, D, seed=0, dtype=dtype)
    q, k, v = fused.split([4, 2, 2], dim=1)
    angle = normal(4, D // 2, seed=1)
    k_pages, v_pages = normal(2, 3, 4, 2, D, seed=2, dtype=dtype)
    before, slots = k_pages.clone(), torch.tensor([11, 0, 5, 6])
    got = ops.rope_to_pages(q, k, v, angle.cos(), angle.sin(), k_pages, v_pages, slots)
    assert same_bits(got, ops.rope(q, angle.cos(), angle.sin()))
    assert same_bits(k_pages.flatten(0, 1)[slots], ops.rope(k, angle.cos(), angle.sin()))
    assert same_bits(v_pages.flatten(0, 1)[slots], v.contiguous())
    others = [row for row in range(12) if row not in slots.tolist()]
    assert same_bits(k_pages.flatten(0, 1)[others], before.flatten(0, 1)[others])


def test_rope_turns_pairs_and_its_inverse_is_the_gradient(ops, dtype) -> None:
    x, g = normal(T, 3, 8, seed=0, dtype=dtype), normal(T, 3, 8, seed=1, dtype=dtype)
    angle = torch.arange(T).double()[:, None] * 10000.0 ** (-torch.arange(4).double() / 4)
    cos, sin = angle.cos().float(), angle.sin().float()
    (x64,) = leaf64(x)
    a, b = x64.chunk(2, -1)
    c, s = angle.cos()[:, None], angle.sin()[:, None]
    truth = torch.cat([a * c - b * s, b * c + a * s], -1)
    (gx,) = torch.autograd.grad(truth, x64, g.double())
    assert error(ops.rope(x, cos, sin), truth.detach()) < ERROR[dtype]
    assert error(ops.rope(g, cos, sin, inverse=True), gx) < ERROR[dtype]


def test_swiglu_and_its_gradient(ops, dtype) -> None:
    gate_up, dy = 4 * normal(T, L, 2, 10, seed=0, dtype=dtype), wide(T, L, 10, seed=1, dtype=dtype)
    (g64,) = leaf64(gate_up)
    truth = torch.nn.functional.silu(g64[:, :, 0]) * g64[:, :, 1]
    (gg,) = torch.autograd.grad(truth, g64, dy.double())
    assert error(ops.swiglu(gate_up), truth.detach()) < ERROR[dtype]
    dx, again = ops.swiglu_dx(dy, gate_up)
    assert error(dx, gg) < ERROR[dtype]
    assert same_bits(again, ops.swiglu(gate_up))
    big = torch.tensor([[[[-200.0, 200.0, -0.0]], [[3.0, 3.0, 3.0]]]]).view(1, 1, 2, 3)
    assert torch.isfinite(ops.swiglu(big)).all() and torch.isfinite(ops.swiglu_dx(big[:, :, 0], big)[0]).all()


# ---- attention --------------------------------------------------------------------------------------
D, HEADS, KV_HEADS = 8, 6, 2


def attention64(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Causal attention per sample over packed [T, h, d], in fp64."""
    out = []
    k, v = (t.repeat_interleave(HEADS // KV_HEADS, 1) for t in (k, v))
    for a, b in zip(SPANS.offsets, SPANS.offsets[1:]):
        q1, k1, v1 = (t[a:b].transpose(0, 1) for t in (q, k, v))
        scores = q1 @ k1.transpose(1, 2) * scale
        scores = scores.masked_fill(torch.ones(b - a, b - a, dtype=torch.bool).triu(1), -torch.inf)
        out.append((scores.softmax(-1) @ v1).transpose(0, 1))
    return torch.cat(out)


@pytest.mark.parametrize("size", [1.0, 6.0])
def test_attention_and_its_gradient(ops, dtype, size) -> None:
    q = size * normal(T, HEADS, D, seed=0, dtype=dtype)
    k = normal(T, KV_HEADS, D, seed=1, dtype=dtype)
    v, do = wide(T, KV_HEADS, D, seed=2, dtype=dtype), wide(T, HEADS, D, seed=3, dtype=dtype)
    o, lse = ops.attention(q, k, v, SPANS, D**-0.5)
    grads = ops.attention_dx(do, q, k, v, o, lse, SPANS, D**-0.5)
    q64, k64, v64 = leaf64(q, k, v)
    truth = attention64(q64, k64, v64, D**-0.5)
    wanted = torch.autograd.grad(truth, (q64, k64, v64), do.double())
    assert error(o, truth.detach()) < ERROR[dtype]
    for name, got, want in zip(("dq", "dk", "dv"), grads, wanted):
        # dq and dk are differences of large terms; with bf16 the rounded o is part of them.
        assert error(got, want) < (4e-6 if dtype == torch.float32 else 2e-2), name


def test_attention_of_a_sample_and_a_head_does_not_depend_on_the_others(ops, dtype) -> None:
    q, do = normal(T, HEADS, D, seed=0, dtype=dtype), normal(T, HEADS, D, seed=3, dtype=dtype)
    k, v = normal(T, KV_HEADS, D, seed=1, dtype=dtype), normal(T, KV_HEADS, D, seed=2, dtype=dtype)
    o, lse = ops.attention(q, k, v, SPANS, D**-0.5)
    grads = ops.attention_dx(do, q, k, v, o, lse, SPANS, D**-0.5)
    group = HEADS // KV_HEADS
    for a, b in zip(SPANS.offsets, SPANS.offsets[1:]):
        for j in range(KV_HEADS):
            h, own = slice(j * group, (j + 1) * group), Spans.of([b - a])
            part = [t.contiguous() for t in (q[a:b, h], k[a:b, j : j + 1], v[a:b, j : j + 1])]
            o1, lse1 = ops.attention(*part, own, D**-0.5)
            assert same_bits(o1, o[a:b, h]) and same_bits(lse1, lse[a:b, h])
            own_grads = ops.attention_dx(do[a:b, h].contiguous(), *part, o1, lse1, own, D**-0.5)
            for got, whole, heads in zip(own_grads, grads, (h, slice(j, j + 1), slice(j, j + 1))):
                assert same_bits(got, whole[a:b, heads])


@pytest.mark.parametrize("garbage", [0.0, 3e4, torch.nan])
def test_decode_has_the_bits_of_the_training_row_at_every_position(ops, dtype, garbage) -> None:
    """What a cache holds past a sample's end does not matter."""
    q = normal(T, HEADS, D, seed=0, dtype=dtype)
    k, v = normal(T, KV_HEADS, D, seed=1, dtype=dtype), wide(T, KV_HEADS, D, seed=2, dtype=dtype)
    o, _ = ops.attention(q, k, v, SPANS, D**-0.5)
    caches = [torch.full((4, 96, KV_HEADS, D), garbage, dtype=dtype) for _ in range(2)]
    for position in range(70):
        alive = [b for b, n in enumerate(LENGTHS) if position < n]
        rows = [SPANS.offsets[b] + position for b in alive]
        for t, cache in zip((k, v), caches):
            cache[alive, position] = t[rows]
        lengths = torch.full((len(alive),), position + 1)
        one_page_each = torch.tensor(alive, dtype=torch.int32).unsqueeze(1)
        got = ops.attention_decode(q[rows], *caches, one_page_each, lengths, D**-0.5)
        assert same_bits(got, o[rows]), position


# ---- vocabulary -------------------------------------------------------------------------------------
def log_softmax_parts(ops: ReferenceOps, logits: Tensor, valid: list[int], targets: Tensor) -> list[Tensor]:
    """(logprob, entropy, lse) from the partial statistics of all leaves, as an LM head finishes them."""
    stats, picked = ops.vocab_stats(logits, len(valid), valid, targets)
    m, s, u = stats.double().unbind(-1)
    shift = m - m.amax(1, keepdim=True)
    total = (shift.exp() * s).sum(1)
    moment = (shift.exp() * (u + torch.where(shift.isinf(), 0.0, shift) * s)).sum(1)
    lse = m.amax(1) + total.log()
    return [picked.double() - lse, total.log() - moment / total, lse]


def test_vocabulary_statistics_and_gradient(ops) -> None:
    width, valid = 10, [10, 10, 7, 0]
    logits, targets = 5 * normal(T, 40, seed=0), torch.randint(0, 27, (T,))
    glp, gent = wide(T, seed=1), wide(T, seed=2)
    (x64,) = leaf64(logits)
    logp = x64[:, :27].log_softmax(-1)
    truth = logp.gather(1, targets[:, None])[:, 0]
    entropy = -(logp.exp() * logp).sum(-1)
    got = log_softmax_parts(ops, logits, valid, targets)
    assert error(got[0], truth.detach()) < 1e-6
    assert error(got[1], entropy.detach()) < 1e-5
    (want,) = torch.autograd.grad((truth * glp.double() + entropy * gent.double()).sum(), x64)
    lse, ent = got[2].float(), got[1].float()
    grad = ops.vocab_dlogits(logits, 4, valid, targets, lse, ent, glp, gent, scale=1.0, dtype=torch.float32)
    assert error(grad, want) < 1e-5
    scaled = ops.vocab_dlogits(
        logits, 4, valid, targets, lse, ent, glp, gent, scale=0.7, dtype=torch.bfloat16
    )
    assert same_bits(scaled, (grad * 0.7).bfloat16())
    assert not grad[:, 27:].any()
    stats, picked = ops.vocab_stats(logits, 4, valid, targets)
    assert stats[:, 3].tolist() == [[-torch.inf, 0.0, 0.0]] * T
    for leaf in range(4):
        cut = logits[:, leaf * width : (leaf + 1) * width].contiguous()
        here = torch.where(targets // width == leaf, targets % width, -1)
        own, own_picked = ops.vocab_stats(cut, 1, valid[leaf : leaf + 1], here)
        assert same_bits(own[:, 0], stats[:, leaf].contiguous())
        assert same_bits(own_picked, torch.where(here >= 0, picked, torch.zeros(T)))
        parts = (cut, 1, valid[leaf : leaf + 1], here, lse, ent, glp, gent)
        dlogits = ops.vocab_dlogits(*parts, scale=1.0, dtype=torch.float32)
        assert same_bits(dlogits, grad[:, leaf * width : (leaf + 1) * width])


# ---- optimizer --------------------------------------------------------------------------------------
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_adamw_against_torch_in_fp64(ops, decay) -> None:
    p64 = torch.nn.Parameter(normal(500, seed=0).double())
    truth = torch.optim.AdamW([p64], lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=decay)
    p = normal(500, seed=0)
    m, v = torch.zeros(500), torch.zeros(500)
    for step in range(1, 6):
        grad = wide(500, seed=step)
        p64.grad = grad.double() * 0.25
        truth.step()
        ops.adamw(
            p,
            m,
            v,
            grad,
            lr=1e-2,
            beta1=0.9,
            beta2=0.95,
            eps=1e-8,
            weight_decay=decay,
            bias_correction1=1 - 0.9**step,
            bias_correction2=1 - 0.95**step,
            grad_scale=0.25,
        )
    assert error(p, p64.detach()) < 1e-6
    assert error(m, truth.state[p64]["exp_avg"]) < 1e-6
    assert error(v, truth.state[p64]["exp_avg_sq"]) < 1e-6


def test_adamw_of_an_element_does_not_depend_on_its_neighbours(ops) -> None:
    """Any shard may hold it, at any place and alignment."""

    def run(part: slice) -> list[Tensor]:
        state = [wide(999, seed=i)[part].abs().clone() for i in range(3)]
        settings = {"lr": 3e-3, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}
        ops.adamw(
            *state,
            wide(999, seed=9)[part].clone(),
            **settings,
            bias_correction1=0.1,
            bias_correction2=0.05,
            grad_scale=0.3,
        )
        return state

    whole = run(slice(None))
    for part in (slice(0, 1), slice(1, 8), slice(3, 700), slice(998, 999)):
        assert all(same_bits(a, b[part]) for a, b in zip(run(part), whole))


# ---- poisoned memory, wrong shapes ------------------------------------------------------------------
def everything(ops: ReferenceOps) -> list[Tensor]:
    """One result of every op that allocates."""
    x, w, dy = normal(T, K, seed=0), normal(L, N, K, seed=1), normal(T, L * N, seed=2)
    wr, q, k = normal(L, K, N, seed=3), normal(T, HEADS, D, seed=4), normal(T, KV_HEADS, D, seed=5)
    o, lse = ops.attention(q, k, k, SPANS, 0.3)
    targets = torch.randint(0, 25, (T,), generator=torch.Generator().manual_seed(6))
    stats, picked = ops.vocab_stats(dy, L, [20, 20, 9], targets)
    cache, table = normal(4, 32, KV_HEADS, D, seed=7), torch.tensor([[3, 9], [0, 2]], dtype=torch.int32)
    return [
        ops.linear(x, w),
        ops.linear(x, w[:1, :1]),
        ops.linear_dx_nodes(dy, w, ((0, 2), (2, 3))),
        ops.row_linear_nodes(dy, wr, ((0, L),)),
        ops.row_linear_dx(x, wr),
        o,
        lse,
        *ops.attention_dx(q, q, k, k, o, lse, SPANS, 0.3),
        ops.attention_decode(q[:2], cache, cache, table, torch.tensor([3, 50]), 0.3),
        stats,
        picked,
        ops.tree_sum(x),
        ops.block_sumsq(normal(3, 1024, seed=8)),
    ]


def test_results_never_read_memory_that_was_not_written(ops, monkeypatch) -> None:
    clean = everything(ops)

    def poisoned(allocate: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda *a, **kw: allocate(*a, **kw).fill_(torch.nan)

    monkeypatch.setattr(torch, "empty", poisoned(torch.empty))
    monkeypatch.setattr(torch, "empty_like", poisoned(torch.empty_like))
    assert torch.empty(3).isnan().all()
    for i, (a, b) in enumerate(zip(clean, everything(ops), strict=True)):
        assert same_bits(a, b), i


Z = torch.zeros
WRONG: dict[str, Callable[[ReferenceOps], object]] = {
    "linear": lambda ops: ops.linear(Z(4, 5), Z(2, 3, 6)),
    "linear_dx_nodes": lambda ops: ops.linear_dx_nodes(Z(4, 5), Z(2, 3, 6), ((0, 2),)),
    "row_linear_nodes": lambda ops: ops.row_linear_nodes(Z(4, 5), Z(2, 3, 6), ((0, 2),)),
    "row_linear_dx": lambda ops: ops.row_linear_dx(Z(4, 5), Z(2, 3, 6)),
    "linear_dw": lambda ops: ops.linear_dw(Z(4, 5), Z(4, 6), Spans.of([4]), Z(2, 3, 6)),
    "row_linear_dw": lambda ops: ops.row_linear_dw(Z(4, 5), Z(4, 12), Spans.of([4]), Z(2, 3, 6)),
    "attention": lambda ops: ops.attention(Z(4, 5, 8), Z(4, 2, 8), Z(4, 2, 8), Spans.of([4]), 1.0),
}


@pytest.mark.parametrize("op", WRONG)
def test_a_shape_that_does_not_fit_is_named(ops, op) -> None:
    with pytest.raises(ShapeError, match=rf"^{op}: got \[4, 5"):
        WRONG[op](ops)
