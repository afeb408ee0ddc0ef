"""Golden values of GAE, returns and whitening."""

from __future__ import annotations

import math

import torch

from unirl_scale.rl.advantages import discounted_returns, gae, whiten

NAN = math.nan


def f64(rows: list[list[float]]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def bits(*rows: str) -> torch.Tensor:
    return torch.tensor([[c == "1" for c in row] for row in rows])


REWARDS = f64([[0, 0, 0, 1], [0, 0, -1, 0]])
VALUES = f64([[0.1, 0.2, 0.3, 0.4], [0.5, 0.5, 0.5, 0.5]])
MASK = bits("1111", "1110")


def close(got: torch.Tensor, expected: list[float], atol: float = 1e-6) -> bool:
    return torch.allclose(got, torch.tensor(expected, dtype=got.dtype), rtol=0.0, atol=atol)


def test_gae_golden() -> None:
    advantages, returns = gae(REWARDS, VALUES, MASK, gamma=1.0, lam=0.95)
    assert close(advantages[0], [0.799675, 0.7365, 0.67, 0.6])
    assert close(returns[0], [0.899675, 0.9365, 0.97, 1.0])
    assert close(advantages[1, :3], [-1.35375, -1.425, -1.5])


def test_gae_golden_with_discount() -> None:
    _, returns = gae(REWARDS, VALUES, MASK, gamma=0.99, lam=0.95)
    assert close(returns[0], [0.87329, 0.91801, 0.96030, 1.0], atol=1e-5)


def test_whitening_golden() -> None:
    advantages, _ = gae(REWARDS, VALUES, MASK, gamma=1.0, lam=0.95)
    white = whiten(advantages, MASK)
    assert close(white[0], [0.88619, 0.83076, 0.77242, 0.71100], atol=1e-5)
    assert close(white[1], [-1.00318, -1.06569, -1.13150, 0.0], atol=1e-5)
    assert not torch.signbit(white[1, 3])


def test_gae_carries_value_and_advantage_across_a_gap() -> None:
    rewards, values = f64([[0, 0, 0, 1]]), f64([[0.1, 0.9, 0.3, 0.4]])
    advantages, _ = gae(rewards, values, bits("1011"), gamma=1.0, lam=0.95)
    assert close(advantages[0], [0.8365, 0.67, 0.67, 0.6])
    unmasked, _ = gae(rewards, values, bits("1111"), gamma=1.0, lam=0.95)
    assert not close(unmasked[0], [0.8365, 0.67, 0.67, 0.6])


def test_a_gap_costs_no_discount() -> None:
    """With a gap the kept steps get what they get when the gap is not there at all."""
    rewards, values = f64([[0, 7, 0, 1]]), f64([[0.1, 0.9, 0.3, 0.4]])
    kept = [0, 2, 3]
    with_gap, _ = gae(rewards, values, bits("1011"), gamma=0.9, lam=0.8)
    without, _ = gae(rewards[:, kept], values[:, kept], bits("111"), gamma=0.9, lam=0.8)
    assert torch.equal(with_gap[:, kept], without)


def test_garbage_in_masked_slots_is_selected_away() -> None:
    rewards, values = f64([[0, NAN, 0, 1, NAN]]), f64([[0.1, NAN, 0.3, 0.4, math.inf]])
    mask = bits("10110")
    clean = torch.where(mask, rewards, 0.0), torch.where(mask, values, 0.0)
    for got, expected in zip(
        gae(rewards, values, mask, gamma=1.0, lam=0.95), gae(*clean, mask, gamma=1.0, lam=0.95)
    ):
        assert torch.equal(got, expected) and got.isfinite().all()
    assert torch.equal(discounted_returns(rewards, mask, 0.9), discounted_returns(clean[0], mask, 0.9))
    assert whiten(values, mask).isfinite().all()


def test_each_row_of_gae_stands_alone() -> None:
    g = torch.Generator().manual_seed(0)
    rewards, values = torch.randn(5, 11, generator=g), torch.randn(5, 11, generator=g)
    mask = torch.rand(5, 11, generator=g) > 0.3
    whole = gae(rewards, values, mask, gamma=0.97, lam=0.9)
    for i in range(5):
        row = gae(rewards[i : i + 1], values[i : i + 1], mask[i : i + 1], gamma=0.97, lam=0.9)
        assert torch.equal(row[0][0], whole[0][i]) and torch.equal(row[1][0], whole[1][i])


def test_reinforce_returns_golden() -> None:
    got = discounted_returns(f64([[0, 0, 1]]), bits("111"), 0.9)
    assert close(got[0], [0.81, 0.9, 1.0], atol=1e-12)


def test_whitening_is_bit_equal_without_an_empty_row_and_under_more_padding() -> None:
    g = torch.Generator().manual_seed(3)
    x, mask = torch.randn(4, 6, generator=g, dtype=torch.float64), torch.rand(4, 6, generator=g) > 0.3
    white = whiten(x, mask)
    with_empty = whiten(
        torch.cat([x[:1], torch.full((1, 6), NAN, dtype=torch.float64), x[1:]]),
        torch.cat([mask[:1], torch.zeros(1, 6, dtype=torch.bool), mask[1:]]),
    )
    assert torch.equal(with_empty[[0, 2, 3, 4]], white)
    assert torch.equal(with_empty[1], torch.zeros(6, dtype=torch.float64))
    padded = whiten(torch.nn.functional.pad(x, (0, 5)), torch.nn.functional.pad(mask, (0, 5)))
    assert torch.equal(padded[:, :6], white)
    assert not torch.equal(whiten(x, torch.ones_like(mask))[mask], white[mask])


def test_whitening_nothing_and_one_token() -> None:
    x = f64([[2.0, 3.0]])
    assert torch.equal(whiten(x, bits("00")), f64([[0.0, 0.0]]))
    assert torch.equal(whiten(x, bits("10")), f64([[0.0, 0.0]]))
