"""Causal attention on the GPU: against fp64, over heads, batch and neighbours; decode against training."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.device.checks import assert_close, same_bits
from tests.device.conftest import Random
from tests.paging import paged
from unirl_scale.kernels.spans import Spans

pytestmark = pytest.mark.cuda

# (lengths, query heads, kv heads, head size)
CASES = [
    ([128], 1, 1, 128),
    ([5, 0, 70, 300, 1], 4, 2, 128),
    ([1000, 513, 128], 8, 2, 64),
    ([257, 63, 65], 4, 1, 64),
    ([200, 57], 4, 4, 80),
    ([33, 31], 2, 1, 24),
    ([300], 2, 1, 256),
]
DTYPES = [torch.bfloat16, torch.float32]


def _inputs(random: Random, case: tuple[list[int], int, int, int], dtype: torch.dtype) -> tuple[Any, ...]:
    lengths, heads, kv_heads, width = case
    spans = Spans.of(lengths, "cuda")
    q, do = (random(spans.total, heads, width, dtype=dtype) for _ in range(2))
    k, v = (random(spans.total, kv_heads, width, dtype=dtype) for _ in range(2))
    return q, k, v, do, spans, width**-0.5


def _truth(q: Tensor, k: Tensor, v: Tensor, spans: Spans, scale: float) -> tuple[Tensor, Tensor]:
    """fp64 softmax(q k^T scale) v, sample by sample, and its log-sum-exp."""
    group = q.shape[1] // k.shape[1]
    outs, lses = [], []
    for start, stop in zip(spans.offsets, spans.offsets[1:]):
        a, b, c = (t[start:stop].transpose(0, 1) for t in (q, k, v))
        b, c = b.repeat_interleave(group, 0), c.repeat_interleave(group, 0)
        future = torch.ones(stop - start, stop - start, dtype=torch.bool, device=q.device).triu(1)
        scores = (a @ b.transpose(1, 2) * scale).masked_fill(future, -torch.inf)
        outs.append((scores.softmax(-1) @ c).transpose(0, 1))
        lses.append(scores.logsumexp(-1).transpose(0, 1))
    return torch.cat(outs), torch.cat(lses)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES)
def test_forward_and_backward_match_fp64(
    ops: Any, random: Random, case: tuple[list[int], int, int, int], dtype: torch.dtype
) -> None:
    q, k, v, do, spans, scale = _inputs(random, case, dtype)
    exact = [t.double().requires_grad_() for t in (q, k, v)]
    want, want_lse = _truth(*exact, spans, scale)
    want.backward(do.double())
    o, lse = ops.attention(q, k, v, spans, scale)
    assert_close(o, want.detach(), dtype)
    assert_close(lse, want_lse.detach(), torch.float32)
    for got, leaf in zip(ops.attention_dx(do, q, k, v, o, lse, spans, scale), exact):
        assert leaf.grad is not None
        assert_close(got, leaf.grad, dtype)


@pytest.mark.parametrize("case", [c for c in CASES if c[3] in (64, 128)])
def test_tuned_attention_has_the_bits_of_the_portable_one(
    ops: Any, portable: Any, random: Random, case: tuple[list[int], int, int, int]
) -> None:
    q, k, v, do, spans, scale = _inputs(random, case, torch.bfloat16)
    o, lse = ops.attention(q, k, v, spans, scale)
    assert all(same_bits(a, b) for a, b in zip((o, lse), portable.attention(q, k, v, spans, scale)))
    ours = ops.attention_dx(do, q, k, v, o, lse, spans, scale)
    theirs = portable.attention_dx(do, q, k, v, o, lse, spans, scale)
    assert [same_bits(a, b) for a, b in zip(ours, theirs)] == [True, True, True]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", [([70, 300, 129], 8, 4, 128), ([400, 65], 8, 4, 64), ([90, 40], 6, 2, 40)])
def test_heads_and_batch_split_without_a_trace(
    ops: Any, random: Random, case: tuple[list[int], int, int, int], dtype: torch.dtype
) -> None:
    q, k, v, do, spans, scale = _inputs(random, case, dtype)
    o, lse = ops.attention(q, k, v, spans, scale)
    grads = ops.attention_dx(do, q, k, v, o, lse, spans, scale)
    kv_heads, group = k.shape[1], q.shape[1] // k.shape[1]
    for kv_head in range(kv_heads):
        h, g = slice(kv_head * group, (kv_head + 1) * group), slice(kv_head, kv_head + 1)
        for start, stop in zip(spans.offsets, spans.offsets[1:]):
            at = slice(start, stop)
            one = Spans.of([stop - start], "cuda")
            part = [t.contiguous() for t in (do[at, h], q[at, h], k[at, g], v[at, g])]
            o1, lse1 = ops.attention(*part[1:], one, scale)
            assert same_bits(o1, o[at, h]) and same_bits(lse1, lse[at, h])
            dq, dk, dv = ops.attention_dx(*part, o1, lse1, one, scale)
            assert same_bits(dq, grads[0][at, h])
            assert same_bits(dk, grads[1][at, g])
            assert same_bits(dv, grads[2][at, g])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [64, 128, 40])
def test_decode_has_the_bits_of_training_at_every_length(
    ops: Any, random: Random, width: int, dtype: torch.dtype
) -> None:
    lengths = [1, 2, 63, 64, 65, 127, 128, 129, 200, 257]
    q, k, v, _, spans, scale = _inputs(random, (lengths, 8, 2, width), dtype)
    o, _ = ops.attention(q, k, v, spans, scale)
    for back in (0, 1, 5):  # the last token, and earlier ones as decode met them
        kept = [(i, n - back) for i, n in enumerate(lengths) if n > back]
        short = [n for _, n in kept]
        k_kept, v_kept = (
            torch.cat([t[spans.offsets[i] : spans.offsets[i] + n] for i, n in kept]) for t in (k, v)
        )
        rows = [spans.offsets[i] + n - 1 for i, n in kept]
        length = torch.tensor(short, device="cuda")
        for page in (16, 64, 256):
            (k_pages, table), (v_pages, _) = (paged(t, short, page) for t in (k_kept, v_kept))
            got = ops.attention_decode(q[rows], k_pages, v_pages, table, length, scale)
            assert same_bits(got, o[rows])
            alone = ops.attention_decode(q[rows[-1:]], k_pages, v_pages, table[-1:], length[-1:], scale)
            assert same_bits(alone, o[rows[-1:]])


def test_decode_notices_a_wrong_table_entry(ops: Any, random: Random) -> None:
    """Negative control."""
    q, k, v, _, spans, scale = _inputs(random, ([300], 2, 1, 64), torch.bfloat16)
    o, _ = ops.attention(q, k, v, spans, scale)
    (k_pages, table), (v_pages, _) = (paged(t, [300], 64) for t in (k, v))
    length = torch.tensor([300], device="cuda")
    assert same_bits(ops.attention_decode(q[-1:], k_pages, v_pages, table, length, scale), o[-1:])
    table[0, 1] = table[0, 3]
    assert not same_bits(ops.attention_decode(q[-1:], k_pages, v_pages, table, length, scale), o[-1:])


def test_a_neighbour_of_nan_stays_a_neighbour(ops: Any, random: Random) -> None:
    """The copy engine reads KV and query blocks past a sample's end."""
    for width in (64, 128):
        q, k, v, do, spans, scale = _inputs(random, ([70, 100], 4, 2, width), torch.bfloat16)
        o, lse = ops.attention(q, k, v, spans, scale)
        grads = ops.attention_dx(do, q, k, v, o, lse, spans, scale)
        bad = [t.clone() for t in (do, q, k, v)]
        for t in bad:
            t[70:] = torch.nan
        o2, lse2 = ops.attention(*bad[1:], spans, scale)
        assert same_bits(o2[:70], o[:70])
        for got, want in zip(ops.attention_dx(*bad, o2, lse2, spans, scale), grads):
            assert same_bits(got[:70], want[:70])


def test_another_order_of_keys_shows(ops: Any, random: Random) -> None:
    """Negative control: the last query sees all keys, so permuting them changes nothing but the order."""
    q, k, v, _, spans, scale = _inputs(random, ([300], 2, 1, 64), torch.bfloat16)
    o, _ = ops.attention(q, k, v, spans, scale)
    back, _ = ops.attention(q, k.flip(0), v.flip(0), spans, scale)
    assert not same_bits(o[-1], back[-1])
    assert_close(o[-1], back[-1].double(), torch.bfloat16)
