"""Sums of the rl floor: the canonical tree, and totals that padding, order and empty rows cannot move."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from unirl_scale.rl.reduce import moments, row_sums, token_mean, tree_sum


def rfc6962_sum(leaves: list[np.float32]) -> np.float32:
    """Oracle: split at the largest power of two below n."""
    if len(leaves) == 1:
        return leaves[0]
    split = 1 << (len(leaves) - 1).bit_length() - 1
    return np.float32(rfc6962_sum(leaves[:split]) + rfc6962_sum(leaves[split:]))


def wide(shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    """Values from 1e-6 to 1e4 with both signs, so that the order of a sum shows."""
    g = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=g) * 10.0 ** (torch.rand(shape, generator=g) * 10 - 6)


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 6, 7, 8, 9, 13, 31, 33, 100])
def test_tree_sum_is_the_rfc6962_tree(n: int) -> None:
    x = wide((4, n))
    expected = np.array([rfc6962_sum(list(row)) for row in x.numpy()])
    assert np.array_equal(tree_sum(x, 1).numpy(), expected)
    assert np.array_equal(tree_sum(x.t().contiguous(), 0).numpy(), expected)


def test_another_order_gives_other_bits() -> None:
    x = wide((64, 33))
    serial = x[:, 0].clone()
    for t in range(1, 33):
        serial = serial + x[:, t]
    assert not torch.equal(tree_sum(x, 1), serial)
    assert not torch.equal(tree_sum(x, 1), tree_sum(x.flip(1), 1))


def test_a_row_sum_does_not_depend_on_the_other_rows() -> None:
    x = wide((7, 19))
    whole = tree_sum(x, 1)
    for i in range(7):
        assert torch.equal(tree_sum(x[i : i + 1], 1), whole[i : i + 1])


def test_no_leaves_sum_to_plus_zero() -> None:
    out = tree_sum(torch.empty(3, 0), 1)
    assert torch.equal(out, torch.zeros(3)) and not torch.signbit(out).any()


def test_gradient_of_the_tree_is_the_incoming_gradient() -> None:
    x = wide((3, 5)).requires_grad_()
    g = torch.tensor([0.1, -2.0, 3e-9])
    tree_sum(x, 1).backward(g)
    assert x.grad is not None and torch.equal(x.grad, g[:, None].expand(3, 5))


def test_row_sums_do_not_depend_on_the_padded_length() -> None:
    x, mask = wide((4, 9)), torch.rand(4, 9, generator=torch.Generator().manual_seed(1)) > 0.3
    x[0], mask[0] = -0.0, True  # a sum of -0 would turn to +0 as soon as there is padding
    short = row_sums(x, mask)
    for extra in (1, 2, 7, 23):
        pad = torch.full((4, extra), math.nan)
        long = row_sums(torch.cat([x, pad], 1), torch.cat([mask, torch.zeros(4, extra, dtype=torch.bool)], 1))
        assert torch.equal(long, short) and torch.equal(torch.signbit(long), torch.signbit(short))


def test_moments_ignore_row_order_and_empty_rows() -> None:
    x, mask = wide((6, 7)).double(), torch.rand(6, 7, generator=torch.Generator().manual_seed(2)) > 0.4
    stats = moments(x, mask)
    order = torch.tensor([3, 0, 5, 1, 4, 2])
    assert moments(x[order], mask[order]) == stats
    hole = torch.full((1, 7), math.nan, dtype=torch.float64)
    empty = torch.zeros(1, 7, dtype=torch.bool)
    assert moments(torch.cat([x[:2], hole, x[2:]]), torch.cat([mask[:2], empty, mask[2:]])) == stats
    assert moments(x * 1.0001, mask) != stats
    kept = x[mask].numpy()
    assert stats.mean == pytest.approx(kept.mean(), rel=1e-12)
    assert stats.var == pytest.approx(kept.var(ddof=1), rel=1e-12)


def test_variance_survives_a_large_mean() -> None:
    x = torch.tensor([[1e8 + 1.0, 1e8 + 2.0, 1e8 + 3.0]], dtype=torch.float64)
    assert moments(x, torch.ones(1, 3, dtype=torch.bool)).var == 1.0


def test_moments_of_one_token_and_of_none() -> None:
    x = torch.tensor([[3.0, 5.0]])
    one = moments(x, torch.tensor([[False, True]]))
    assert (one.mean, one.var, one.count) == (5.0, 0.0, 1)
    assert token_mean(x, torch.zeros(1, 2, dtype=torch.bool)) == 0.0


@pytest.mark.parametrize("op", [torch.exp, torch.log, torch.sqrt])
def test_transcendentals_used_here_do_not_depend_on_position(op: object) -> None:
    """The platform assumption behind elementwise losses; sigmoid would fail it on CPU."""
    x = wide((3, 1001)).abs().clamp(1e-6, 80.0)
    whole = op(x)  # type: ignore[operator]
    for size in (1, 3, 8, 13, 31):
        pieces = [op(piece.contiguous()) for piece in x.split(size, dim=1)]  # type: ignore[operator]
        assert torch.equal(torch.cat(pieces, dim=1), whole)
