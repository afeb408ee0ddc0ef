"""Golden values and edge cases of the group-relative advantages."""

from __future__ import annotations

import math
import statistics

import pytest
import torch

from unirl_scale.rl import groups


def f64(values: list[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def one_group(values: list[float]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    n = len(values)
    return f64(values), torch.ones(n, dtype=torch.bool), torch.zeros(n, dtype=torch.int64)


def close(got: torch.Tensor, expected: list[float], atol: float = 1e-6) -> bool:
    return torch.allclose(got, f64(expected), rtol=0.0, atol=atol)


def test_golden_of_two_right_two_wrong() -> None:
    batch = one_group([1.0, 0.0, 0.0, 1.0])
    assert close(groups.grpo(*batch).advantages, [0.8660239, -0.8660239, -0.8660239, 0.8660239], 1e-7)
    assert close(groups.group_mean_baseline(*batch).advantages, [0.5, -0.5, -0.5, 0.5], 0.0)
    assert close(groups.rloo(*batch).advantages, [0.6666667, -0.6666667, -0.6666667, 0.6666667], 1e-7)


ESTIMATORS = [
    groups.grpo,
    groups.group_mean_baseline,
    groups.rloo,
    lambda *batch: groups.rloo(*batch, normalize=True),
]


@pytest.mark.parametrize("estimate", ESTIMATORS)
def test_a_group_of_one_is_exactly_zero_and_counted(estimate: object) -> None:
    result = estimate(*one_group([2.0]))  # type: ignore[operator]
    assert result.advantages.tolist() == [0.0]
    assert (result.singleton_groups, result.zero_variance_groups) == (1, 0)


@pytest.mark.parametrize("estimate", ESTIMATORS)
@pytest.mark.parametrize("n, reward", [(7, 0.7), (6, 0.9), (12, 100.1), (64, 10000.1)])
def test_equal_rewards_give_exactly_zero(estimate: object, n: int, reward: float) -> None:
    result = estimate(*one_group([reward] * n))  # type: ignore[operator]
    assert result.advantages.tolist() == [0.0] * n
    assert (result.singleton_groups, result.zero_variance_groups) == (0, 1)


@pytest.mark.parametrize("n, reward", [(7, 0.7), (6, 0.9), (12, 100.1), (64, 10000.1)])
def test_the_plain_formula_does_not_give_zero(n: int, reward: float) -> None:
    """Control: in fp32 the mean of equal rewards is not the reward, and 1e-6 does not hide it."""
    x = torch.full((n,), reward)
    assert ((x - x.mean()) / (x.std() + 1e-6)).abs().min() > 0.05


def test_rloo_golden_and_normalised() -> None:
    batch = one_group([0.0] + [0.95] * 7)
    assert close(groups.rloo(*batch).advantages, [-0.95] + [0.1357143] * 7)
    normalised = groups.rloo(*batch, normalize=True).advantages
    assert normalised.abs().max() <= math.sqrt(8)
    assert close(normalised[:1], [-0.95 / statistics.stdev([0.0] + [0.95] * 7)], 1e-4)


def test_rloo_is_reward_minus_mean_of_the_others() -> None:
    rewards = [0.3, -1.25, 7.5, 2.0, 0.125]
    expected = [r - (sum(rewards) - r) / 4 for r in rewards]
    assert close(groups.rloo(*one_group(rewards)).advantages, expected, 1e-12)


def test_an_invalid_row_takes_no_part() -> None:
    """[1, NaN, 0, 1]: the others are judged by the three finite ones."""
    rewards, group_ids = f64([1.0, 0.0, 0.0, 1.0]), torch.zeros(4, dtype=torch.int64)
    valid = torch.tensor([True, False, True, True])
    got = groups.group_mean_baseline(rewards, valid, group_ids).advantages
    assert close(got, [1 / 3, 0.0, -2 / 3, 1 / 3], 1e-12) and got[1] == 0.0
    rewards[1] = math.nan
    assert torch.equal(groups.group_mean_baseline(rewards, valid, group_ids).advantages, got)
    assert not torch.equal(
        groups.group_mean_baseline(rewards.nan_to_num(0.0), valid | True, group_ids).advantages, got
    )


@pytest.mark.parametrize("estimate", ESTIMATORS)
def test_bits_do_not_depend_on_row_order_or_absent_rows(estimate: object) -> None:
    g = torch.Generator().manual_seed(5)
    rewards = torch.randn(12, generator=g, dtype=torch.float64) * 10.0 ** torch.randint(
        -3, 4, (12,), generator=g
    )
    group_ids = torch.tensor([4, 4, 4, 9, 9, 9, 9, 1, 1, 1, 1, 1])
    rows = torch.ones(12, dtype=torch.bool)
    whole = estimate(rewards, rows, group_ids).advantages  # type: ignore[operator]
    order = torch.randperm(12, generator=g)
    assert torch.equal(estimate(rewards[order], rows, group_ids[order]).advantages, whole[order])  # type: ignore[operator]
    rows[[1, 8]] = False
    masked = estimate(rewards, rows, group_ids).advantages  # type: ignore[operator]
    gone = estimate(rewards[rows], rows[rows], group_ids[rows]).advantages  # type: ignore[operator]
    assert torch.equal(masked[rows], gone) and not torch.equal(masked[rows], whole[rows])


def test_groups_may_interleave() -> None:
    rewards, group_ids = f64([1.0, 5.0, 0.0, 7.0]), torch.tensor([3, 8, 3, 8])
    got = groups.group_mean_baseline(rewards, torch.ones(4, dtype=torch.bool), group_ids).advantages
    assert got.tolist() == [0.5, -1.0, -0.5, 1.0]


def test_dapo_filter_drops_groups_without_variance() -> None:
    rewards = f64([0.7] * 3 + [1.0, 0.0] + [2.0] + [1.0, 0.0])
    group_ids = torch.tensor([0, 0, 0, 1, 1, 2, 3, 3])
    rows = torch.tensor([True] * 7 + [False])  # group 3 has one sample left
    assert (
        groups.informative_rows(rewards, rows, group_ids).tolist() == [False] * 3 + [True] * 2 + [False] * 3
    )


def test_dapo_overlong_penalty_golden() -> None:
    lengths = torch.tensor([0, 79, 80, 81, 90, 100, 101, 500])
    got = groups.overlong_penalty(lengths, 100, 20)
    assert got.tolist() == [0.0, 0.0, 0.0, -0.05, -0.5, -1.0, -1.0, -1.0]
    assert not torch.signbit(got[:3]).any()
