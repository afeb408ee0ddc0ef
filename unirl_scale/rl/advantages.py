"""Token-level advantages: GAE, discounted returns, whitening. All in float64 on the whole batch.

A masked step inside a response (a tool's answer, say) is passed over: the next kept step's value and
advantage are carried across it, without discount. Each row depends on itself alone except in `whiten`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from unirl_scale.rl.reduce import moments, select

WHITEN_EPS = 1e-8


def gae(rewards: Tensor, values: Tensor, mask: Tensor, *, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation, Schulman et al. 2016, eq. 16.

    delta_t = r_t + gamma V_{t+1} - V_t; A_t = delta_t + gamma lam A_{t+1}; R = A + V. After the last kept
    step value and advantage are 0: a truncated response is not bootstrapped.

    Args:
        rewards, values: [B, S]; anything may stand in masked slots.
        mask: bool [B, S].

    Returns:
        float64 [B, S] advantages and returns; a masked slot holds the advantage and value carried across it.
    """
    rewards, values = select(rewards.double(), mask), select(values.double(), mask)
    advantages, returns = torch.empty_like(values), torch.empty_like(values)
    next_value = next_advantage = values.new_zeros(values.shape[0])
    for t in range(mask.shape[1] - 1, -1, -1):
        kept = mask[:, t]
        delta = rewards[:, t] + next_value * gamma - values[:, t]
        next_advantage = torch.where(kept, delta + next_advantage * (gamma * lam), next_advantage)
        next_value = torch.where(kept, values[:, t], next_value)
        advantages[:, t] = next_advantage
        returns[:, t] = next_advantage + next_value
    return advantages, returns


def discounted_returns(rewards: Tensor, mask: Tensor, gamma: float) -> Tensor:
    """G_t = sum_k gamma^k r_{t+k} over kept steps: [B, S] -> float64 [B, S], carried across masked slots."""
    rewards = select(rewards.double(), mask)
    out = torch.empty_like(rewards)
    following = rewards.new_zeros(rewards.shape[0])
    for t in range(mask.shape[1] - 1, -1, -1):
        following = torch.where(mask[:, t], rewards[:, t] + following * gamma, following)
        out[:, t] = following
    return out


def whiten(advantages: Tensor, mask: Tensor) -> Tensor:
    """(A - mean) / sqrt(var + 1e-8) over the kept tokens of the whole batch: float64 [B, S].

    The variance has Bessel's correction. Masked slots become +0. A row without kept tokens changes no bit
    of the others.
    """
    stats = moments(advantages, mask)
    return select((advantages.double() - stats.mean) * (1.0 / math.sqrt(stats.var + WHITEN_EPS)), mask)
