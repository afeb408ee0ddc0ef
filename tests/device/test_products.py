"""Matrix products on the GPU: against fp64, over rows and splits, tuned kernels against portable ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.device.checks import assert_close, same_bits
from tests.device.conftest import Random
from unirl_scale.kernels.spans import Spans

pytestmark = pytest.mark.cuda

DTYPES = [torch.bfloat16, torch.float32]
ROWS = [1, 31, 32, 33, 63, 65, 928, 2274]
# (leaves, rows of a leaf, columns): aligned, hidden not a multiple of 256, and sizes nothing divides.
WEIGHTS = [(4, 192, 512), (3, 136, 328), (2, 77, 45)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("weight", WEIGHTS)
def test_linear_and_row_linear_dx_match_fp64(
    ops: Any, random: Random, weight: tuple[int, int, int], rows: int, dtype: torch.dtype
) -> None:
    leaves, n, k = weight
    x, w, bias = (
        random(rows, k, dtype=dtype),
        random(leaves, n, k, dtype=dtype),
        random(leaves, n, dtype=dtype),
    )
    want = torch.einsum("mk,lnk->mln", x.double(), w.double())
    assert_close(ops.linear(x, w), want.flatten(1), dtype)
    biased = ops.linear(x, w, bias, out_fp32=True)
    assert biased.dtype == torch.float32
    assert_close(biased, (want + bias.double()).flatten(1), torch.float32)
    dy = random(rows, n, dtype=dtype)
    assert_close(
        ops.row_linear_dx(dy, w), torch.einsum("mn,lnk->mlk", dy.double(), w.double()).flatten(1), dtype
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 33, 65, 928])
@pytest.mark.parametrize("weight", [(6, 192, 512), (6, 136, 328), (5, 77, 45)])
def test_nodes_are_the_canonical_tree_of_their_leaves(
    ops: Any, random: Random, weight: tuple[int, int, int], rows: int, dtype: torch.dtype
) -> None:
    leaves, n, k = weight
    x, w = random(rows, leaves * k, dtype=dtype), random(leaves, n, k, dtype=dtype)
    dy = random(rows, leaves * n, dtype=dtype)
    singles = tuple((i, i + 1) for i in range(leaves))
    for op, a, width in ((ops.row_linear_nodes, x, n), (ops.linear_dx_nodes, dy, k)):
        alone = op(a, w, singles)
        assert alone.shape == (leaves, rows, width)
        want = torch.einsum(
            "mlk,lnk->mn" if op == ops.row_linear_nodes else "mln,lnk->mk",
            a.view(rows, leaves, -1).double(),
            w.double(),
        )
        for nodes in (((0, leaves),), ((0, 4), (4, leaves)), ((0, 2), (2, 3), (3, leaves))):
            got = op(a, w, nodes)
            for node, (start, stop) in zip(got, nodes):
                assert same_bits(node, ops.tree_sum(alone[start:stop].contiguous())), nodes
        assert_close(op(a, w, ((0, leaves),))[0], want, torch.float32)


@pytest.mark.parametrize("rows", [33, 300])
def test_round_leaf_rounds_every_leaf_and_no_node(ops: Any, random: Random, rows: int) -> None:
    x, w = random(rows, 4 * 128), random(4, 256, 128)
    leaves = ops.row_linear_nodes(x, w, tuple((i, i + 1) for i in range(4)))
    got = ops.row_linear_nodes(x, w, ((0, 4),), round_leaf=True)[0]
    assert same_bits(got, ops.tree_sum(leaves.bfloat16().float()))
    assert not same_bits(got, ops.tree_sum(leaves))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("weight", [(4, 192, 512), (2, 77, 45)])
def test_a_row_does_not_depend_on_the_other_rows(
    ops: Any, random: Random, weight: tuple[int, int, int], dtype: torch.dtype
) -> None:
    """Decode (M <= 64), small and large batches: all tiles, both operand orders."""
    leaves, n, k = weight
    x, w = random(2274, k, dtype=dtype, spread=2), random(leaves, n, k, dtype=dtype, spread=2)
    inner = random(2274, leaves * k, dtype=dtype, spread=2)
    dy, dy_row = random(2274, leaves * n, dtype=dtype, spread=2), random(2274, n, dtype=dtype, spread=2)
    whole = ((0, leaves),)
    for op, a in (
        (lambda t: ops.linear(t, w), x),
        (lambda t: ops.linear(t, w, out_fp32=True), x),
        (lambda t: ops.row_linear_nodes(t, w, whole)[0], inner),
        (lambda t: ops.linear_dx_nodes(t, w, whole)[0], dy),
        (lambda t: ops.row_linear_dx(t, w), dy_row),
    ):
        full = op(a)
        for start, rows in ((0, 1), (1, 31), (64, 32), (7, 33), (100, 63), (200, 65), (5, 928), (2273, 1)):
            assert same_bits(op(a[start : start + rows].clone()), full[start : start + rows]), (start, rows)


@pytest.mark.parametrize("dtype", DTYPES)
def test_splitting_the_weight_gives_slices_of_the_unsplit_result(
    ops: Any, random: Random, dtype: torch.dtype
) -> None:
    rows, leaves, n, k = 700, 6, 192, 256
    w = random(leaves, n, k, dtype=dtype, spread=2)
    x, inner = random(rows, k, dtype=dtype), random(rows, leaves * k, dtype=dtype)
    dy, dy_row = random(rows, leaves * n, dtype=dtype), random(rows, n, dtype=dtype)
    for parts in (2, 3, 6):
        size = leaves // parts
        for p in range(parts):
            own = slice(p * size, (p + 1) * size)
            cols, inner_cols = slice(own.start * n, own.stop * n), slice(own.start * k, own.stop * k)
            assert same_bits(ops.linear(x, w[own]), ops.linear(x, w)[:, cols])
            assert same_bits(ops.row_linear_dx(dy_row, w[own]), ops.row_linear_dx(dy_row, w)[:, inner_cols])
            node = ((0, size),)
            here = ((own.start, own.stop),)
            assert same_bits(
                ops.row_linear_nodes(inner[:, inner_cols].contiguous(), w[own], node),
                ops.row_linear_nodes(inner, w, here),
            )
            assert same_bits(
                ops.linear_dx_nodes(dy[:, cols].contiguous(), w[own], node), ops.linear_dx_nodes(dy, w, here)
            )


def test_another_k_order_shows(ops: Any, random: Random) -> None:
    """The negative control of every equality above: the same sum in two halves of K has other bits."""
    x, w = random(300, 512), random(1, 192, 512)
    halves = sum(
        ops.linear(x[:, h].contiguous(), w[..., h].contiguous(), out_fp32=True) for h in _halves(512)
    )
    assert not same_bits(halves, ops.linear(x, w, out_fp32=True))


def _halves(k: int) -> tuple[slice, slice]:
    return slice(0, k // 2), slice(k // 2, k)


LENGTHS = [[928], [5, 0, 70, 300, 31], [64, 128, 1], [0, 0], [2274, 33]]


def _weight_gradients(ops: Any, dy: Tensor, x: Tensor, spans: Spans, start: Tensor, row: bool) -> Tensor:
    out = start.clone()
    (ops.row_linear_dw if row else ops.linear_dw)(dy, x, spans, out)
    return out


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("weight", [(3, 136, 200), (2, 77, 45)])
def test_weight_gradients_match_fp64_sample_by_sample(
    ops: Any, random: Random, weight: tuple[int, int, int], lengths: list[int], dtype: torch.dtype
) -> None:
    leaves, n, k = weight
    spans = Spans.of(lengths, "cuda")
    start = random(leaves, n, k, dtype=torch.float32)
    for row in (False, True):
        dy = random(spans.total, n if row else leaves * n, dtype=dtype)
        x = random(spans.total, leaves * k if row else k, dtype=dtype)
        got = _weight_gradients(ops, dy, x, spans, start, row)
        if spans.total == 0:
            assert same_bits(got, start)
            continue
        a, b = dy.double(), x.double()
        product = (
            torch.einsum("tn,tlk->lnk", a, b.view(-1, leaves, k))
            if row
            else torch.einsum("tln,tk->lnk", a.view(-1, leaves, n), b)
        )
        assert_close(got, start.double() + product, torch.float32)
        # Each sample from zero, then added: the same as one call a sample.
        serial = start.clone()
        for i, (a0, a1) in enumerate(zip(spans.offsets, spans.offsets[1:])):
            one = Spans.of([lengths[i]], "cuda")
            serial = _weight_gradients(ops, dy[a0:a1].clone(), x[a0:a1].clone(), one, serial, row)
        assert same_bits(got, serial)


def test_weight_gradients_split_over_leaves_and_do_not_leak_between_samples(ops: Any, random: Random) -> None:
    leaves, n, k, spans = 6, 136, 200, Spans.of([70, 0, 301, 64], "cuda")
    dy, x = random(spans.total, leaves * n, spread=2), random(spans.total, k, spread=2)
    zero = torch.zeros(leaves, n, k, device="cuda")
    whole = _weight_gradients(ops, dy, x, spans, zero, row=False)
    for leaf in range(leaves):
        part = dy[:, leaf * n : (leaf + 1) * n].contiguous()
        assert same_bits(_weight_gradients(ops, part, x, spans, zero[:1], row=False), whole[leaf : leaf + 1])
    first = Spans.of([70], "cuda")
    poisoned_dy, poisoned_x = dy.clone(), x.clone()
    poisoned_dy[70:] = torch.nan
    clean = _weight_gradients(ops, dy[:70].clone(), x[:70].clone(), first, zero, row=False)
    torn = zero.clone()
    # The copy engine reads past the first sample's end; what it finds there must not count.
    ops.products.weight_grad(
        poisoned_dy, poisoned_x.unsqueeze(1), _first_only(spans), torn.view(1, leaves * n, k)
    )
    assert same_bits(torn, clean)


def _first_only(spans: Spans) -> Spans:
    return Spans(spans.lengths[:1], spans.offsets[:2], spans.cu_seqlens[:2])


@pytest.mark.parametrize("rows", [1, 16, 33, 64, 65, 130, 928, 2274])
def test_tuned_products_have_the_bits_of_the_portable_ones(
    ops: Any, portable: Any, random: Random, rows: int
) -> None:
    leaves, n, k = 4, 320, 512
    w = random(leaves, n, k, spread=2)
    bias = random(leaves, n)
    x, inner = random(rows, k, spread=2), random(rows, leaves * k, spread=2)
    dy, dy_row = random(rows, leaves * n, spread=2), random(rows, n, spread=2)
    dy[::3] *= -0.0  # negative zeros too
    spans = Spans.of([rows // 3, rows - rows // 3], "cuda")
    for call in (
        lambda o: o.linear(x, w, bias),
        lambda o: o.linear(x, w, out_fp32=True),
        lambda o: o.row_linear_nodes(inner, w, ((0, 4),)),
        lambda o: o.row_linear_nodes(inner, w, ((0, 2), (2, 3))),
        lambda o: o.linear_dx_nodes(dy, w, ((0, 3),)),
        lambda o: o.linear_dx_nodes(dy, w, ((0, 4),), round_leaf=True),
        lambda o: o.row_linear_dx(dy_row, w),
        lambda o: _weight_gradients(o, dy, x, spans, torch.zeros_like(w, dtype=torch.float32), row=False),
        lambda o: _weight_gradients(
            o, dy_row, inner, spans, torch.zeros_like(w, dtype=torch.float32), row=True
        ),
    ):
        assert same_bits(call(ops), call(portable))
