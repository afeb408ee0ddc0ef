"""Per-token losses. Elementwise, so a token's loss and gradient depend on that token alone, bit for bit.

Rules that keep it so: only add, sub, mul, exp, clamp and where (exp was measured position-invariant; sigmoid
and friends differ between a vector's body and its scalar tail); no fused multiply-add ops; `where` instead of
max so that a tie sends the whole gradient down one branch. Callers pass inputs already selected by the mask.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from unirl_scale.rl.reduce import row_sums, select

KlEstimator = Literal["k1", "k2", "k3"]
LOG_RATIO_LIMIT = 20.0  # exp(20) = 4.9e8: far beyond any clip, still harmless in fp32


def log_ratio(logprobs: Tensor, other: Tensor, mask: Tensor) -> Tensor:
    """logprobs - other, clamped to +-20, +0 where masked. No gradient flows beyond the clamp."""
    return (select(logprobs, mask) - select(other, mask)).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


class ClippedLoss(NamedTuple):
    """A token loss and which of its bounds is active, all [n, S]."""

    loss: Tensor
    clipped: Tensor  # bool: the clipped surrogate is the larger one
    dual_clipped: Tensor  # bool: the dual clip caps the loss


def ppo_clip(
    ratio: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float, dual_clip: float = 0.0
) -> ClippedLoss:
    """max(-r A, -clip(r, 1 - clip_low, 1 + clip_high) A); for A < 0 capped at -dual_clip A.

    Schulman et al. 2017, eq. 7; clip-higher: Yu et al. 2025 (DAPO), section 3.1; dual clip: Ye et al. 2020.

    Args:
        ratio: fp32 [n, S], exp of the clamped log-ratio.
        advantages: fp32 [n, S].
        dual_clip: the constant c > 1; 0 turns it off.
    """
    plain = -(ratio * advantages)
    bounded = -(ratio.clamp(1.0 - clip_low, 1.0 + clip_high) * advantages)
    clipped = bounded > plain
    loss = torch.where(clipped, bounded, plain)
    if dual_clip == 0.0:
        return ClippedLoss(loss, clipped, torch.zeros_like(clipped))
    cap = -(advantages * dual_clip)
    capped = (advantages < 0.0) & (loss > cap)
    return ClippedLoss(torch.where(capped, cap, loss), clipped, capped)


def clipped_value_loss(values: Tensor, returns: Tensor, old_values: Tensor, value_clip: float) -> ClippedLoss:
    """0.5 max((V - R)^2, (Vc - R)^2) with Vc = V_old + clip(V - V_old, +-value_clip).

    value_clip 0 is no clip: 0.5 (V - R)^2.
    """
    error = values - returns
    plain = error * error
    if value_clip == 0.0:
        clipped = torch.zeros_like(plain, dtype=torch.bool)
        return ClippedLoss(plain * 0.5, clipped, clipped)
    bounded_error = old_values + (values - old_values).clamp(-value_clip, value_clip) - returns
    bounded = bounded_error * bounded_error
    clipped = bounded > plain
    return ClippedLoss(torch.where(clipped, bounded, plain) * 0.5, clipped, torch.zeros_like(clipped))


def kl_estimate(x: Tensor, estimator: KlEstimator) -> Tensor:
    """Estimate of KL(policy | reference) a token from x = logprobs - ref_logprobs (clamped, `log_ratio`).

    k1 = x; k2 = x^2 / 2; k3 = exp(-x) + x - 1. Schulman 2020, "Approximating KL divergence". As a loss, k1
    has a gradient that is zero on average: use k2 or k3 there.
    """
    if estimator == "k1":
        return x
    if estimator == "k2":
        return x * x * 0.5
    return (-x).exp() + x - 1.0


def truncated_importance_weights(
    old_logprobs: Tensor,
    rollout_logprobs: Tensor,
    mask: Tensor,
    *,
    cap: float,
    level: Literal["token", "sequence"],
) -> Tensor:
    """min(exp(old_logprobs - rollout_logprobs), cap), without gradient: fp32 [n, S].

    Corrects for a rollout engine whose log-probs are not the trainer's (Yao et al. 2025). At level `sequence`
    the log-ratios of a row are added by the canonical tree and every token gets the row's weight.
    """
    old, rollout = old_logprobs.detach(), rollout_logprobs.detach()
    if level == "token":
        x = log_ratio(old, rollout, mask)
    else:
        total = row_sums(old - rollout, mask).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
        x = total[:, None].expand(mask.shape)
    return x.exp().clamp(max=cap)
