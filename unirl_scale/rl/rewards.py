"""Rewards: which are usable, on which token they sit, and what the KL takes away."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from unirl_scale.core.errors import UniRLError
from unirl_scale.rl.reduce import select

_FP32_MAX = torch.finfo(torch.float32).max
_NAMED_ROWS = 8  # how many bad rows an error spells out


class RewardError(UniRLError, ValueError):
    """A reward is not a finite number and `reward.on_invalid` is `error`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScreenedRewards:
    """Rewards after the invalid ones were set aside.

    Attributes:
        rewards: float64 [B]; 0 where invalid.
        valid_rows: bool [B].
        invalid_ids: global sample ids of the invalid rows, to be counted and named in the log.
    """

    rewards: Tensor
    valid_rows: Tensor
    invalid_ids: tuple[int, ...]


def screen_rewards(
    rewards: Sequence[float | None], sample_ids: Sequence[int], on_invalid: Literal["drop", "error"]
) -> ScreenedRewards:
    """Set aside rewards that are None, NaN, infinite or beyond the range of fp32.

    A dropped row has weight 0 and takes no part in any statistic; the run continues as if it were not there.

    Args:
        rewards: one a sample, as the task returned it.
        sample_ids: global sample ids, same order.
        on_invalid: `reward.on_invalid`.

    Raises:
        RewardError: on_invalid is "error" and a reward is invalid; names the samples and the values got.
    """
    usable = [r is not None and math.isfinite(r) and abs(r) <= _FP32_MAX for r in rewards]
    bad = [(i, r) for i, r, ok in zip(sample_ids, rewards, usable, strict=True) if not ok]
    if bad and on_invalid == "error":
        named = ", ".join(f"sample {i}: {r}" for i, r in bad[:_NAMED_ROWS])
        more = f" and {len(bad) - _NAMED_ROWS} more" if len(bad) > _NAMED_ROWS else ""
        raise RewardError(
            f"reward: got {named}{more}; every reward must be a finite number\n"
            "hint: reward.on_invalid: drop trains on the other samples and counts these"
        )
    kept = [float(r) if ok and r is not None else 0.0 for r, ok in zip(rewards, usable, strict=True)]
    return ScreenedRewards(
        rewards=torch.tensor(kept, dtype=torch.float64),
        valid_rows=torch.tensor(usable, dtype=torch.bool),
        invalid_ids=tuple(i for i, _ in bad),
    )


def on_last_token(rewards: Tensor, mask: Tensor) -> Tensor:
    """Put each sequence's reward on its last kept token.

    Args:
        rewards: float64 [B].
        mask: bool [B, S], may have gaps.

    Returns:
        float64 [B, S], +0 elsewhere; an empty row carries nothing.
    """
    kept_from_here = mask.flip(1).cumsum(dim=1).flip(1)
    return select(rewards.double()[:, None], mask & (kept_from_here == 1))


def subtract_kl(token_rewards: Tensor, kl: Tensor, kl_coef: float, mask: Tensor) -> Tensor:
    """Token rewards minus kl_coef times the KL estimate of each kept token: float64 [B, S].

    A coefficient of 0 leaves the rewards alone, whatever the KL holds.
    """
    if kl_coef == 0.0:
        return token_rewards
    return token_rewards - select(kl.double(), mask) * kl_coef
