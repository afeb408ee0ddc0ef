"""Invalid rewards, where the reward sits, and the KL in it."""

from __future__ import annotations

import math

import pytest
import torch

from unirl_scale.core.errors import UniRLError
from unirl_scale.rl.rewards import RewardError, on_last_token, screen_rewards, subtract_kl

IDS = [40, 41, 42, 43]


@pytest.mark.parametrize("bad", [math.nan, None, math.inf, -math.inf, 1e300])
def test_an_invalid_reward_is_set_aside_and_named(bad: float | None) -> None:
    screened = screen_rewards([1.0, bad, 0.0, 1.0], IDS, "drop")
    assert screened.valid_rows.tolist() == [True, False, True, True]
    assert screened.rewards.tolist() == [1.0, 0.0, 0.0, 1.0] and screened.rewards.dtype == torch.float64
    assert screened.invalid_ids == (41,)


def test_on_invalid_error_names_every_sample_and_the_way_out() -> None:
    with pytest.raises(RewardError, match=r"sample 41: nan, sample 43: None") as caught:
        screen_rewards([1.0, math.nan, 0.0, None], IDS, "error")
    assert "hint: reward.on_invalid: drop" in str(caught.value) and isinstance(caught.value, UniRLError)


def test_a_long_list_of_invalid_rewards_is_cut() -> None:
    with pytest.raises(RewardError, match="and 92 more"):
        screen_rewards([None] * 100, range(100), "error")


def test_valid_rewards_pass_both_ways() -> None:
    for on_invalid in ("drop", "error"):
        screened = screen_rewards([1, -2.5, 0.0, 1e30], IDS, on_invalid)  # type: ignore[arg-type]
        assert screened.rewards.tolist() == [1.0, -2.5, 0.0, 1e30] and screened.invalid_ids == ()


def test_reward_sits_on_the_last_kept_token() -> None:
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 0, 1, 0], [0, 0, 0, 0]], dtype=torch.bool)
    got = on_last_token(torch.tensor([1.0, 2.0, 3.0, math.nan], dtype=torch.float64), mask)
    assert got.tolist() == [[0, 0, 0, 1], [0, 2, 0, 0], [0, 0, 3, 0], [0, 0, 0, 0]]


def test_a_batch_of_width_zero_carries_no_reward() -> None:
    assert on_last_token(torch.ones(2), torch.zeros(2, 0, dtype=torch.bool)).shape == (2, 0)


def test_kl_comes_off_kept_tokens_only() -> None:
    rewards, kl = torch.tensor([[0.0, 1.0, 0.0]]).double(), torch.tensor([[0.5, 0.25, math.nan]])
    mask = torch.tensor([[True, True, False]])
    assert subtract_kl(rewards, kl, 0.5, mask).tolist() == [[-0.25, 0.875, 0.0]]
    assert subtract_kl(rewards, kl, 0.0, mask) is rewards
