"""Golden values of the per-token losses."""

from __future__ import annotations

import math

import pytest
import torch

from unirl_scale.rl.losses import (
    clipped_value_loss,
    kl_estimate,
    log_ratio,
    ppo_clip,
    truncated_importance_weights,
)

RATIO = torch.tensor([[1.5, 0.5, 1.0, 4.0]])


def clip(advantage: float, dual_clip: float = 3.0, clip_high: float = 0.2) -> torch.Tensor:
    advantages = torch.full_like(RATIO, advantage)
    return ppo_clip(RATIO, advantages, clip_low=0.2, clip_high=clip_high, dual_clip=dual_clip).loss


def test_ppo_golden_positive_advantage() -> None:
    assert torch.allclose(clip(1.0), torch.tensor([[-1.2, -0.5, -1.0, -1.2]]))
    assert clip(1.0).mean().item() == pytest.approx(-0.975)


def test_ppo_golden_negative_advantage_with_and_without_dual_clip() -> None:
    assert torch.allclose(clip(-1.0), torch.tensor([[1.5, 0.8, 1.0, 3.0]]))
    assert clip(-1.0).mean().item() == pytest.approx(1.575)
    assert clip(-1.0, dual_clip=0.0).mean().item() == pytest.approx(1.825)


def test_clip_higher_moves_the_upper_bound_only() -> None:
    assert torch.allclose(clip(1.0, clip_high=0.28), torch.tensor([[-1.28, -0.5, -1.0, -1.28]]))
    assert torch.equal(clip(-1.0, clip_high=0.28), clip(-1.0))


def test_ppo_flags_say_which_bound_is_active() -> None:
    up = ppo_clip(RATIO, torch.ones_like(RATIO), clip_low=0.2, clip_high=0.2, dual_clip=3.0)
    down = ppo_clip(RATIO, -torch.ones_like(RATIO), clip_low=0.2, clip_high=0.2, dual_clip=3.0)
    assert up.clipped.tolist() == [[True, False, False, True]] and not up.dual_clipped.any()
    assert down.clipped.tolist() == [[False, True, False, False]]
    assert down.dual_clipped.tolist() == [[False, False, False, True]]


def test_no_gradient_where_a_bound_is_active() -> None:
    ratio = RATIO.clone().requires_grad_()
    ppo_clip(ratio, torch.ones_like(RATIO), clip_low=0.2, clip_high=0.2).loss.sum().backward()
    assert ratio.grad is not None and ratio.grad.tolist() == [[0.0, -1.0, -1.0, 0.0]]
    ratio = RATIO.clone().requires_grad_()
    ppo_clip(ratio, -torch.ones_like(RATIO), clip_low=0.2, clip_high=0.2, dual_clip=3.0).loss.sum().backward()
    assert ratio.grad is not None and ratio.grad.tolist() == [[1.0, 0.0, 1.0, 0.0]]


VALUES, RETURNS, OLD = (
    torch.tensor([[1.0, 0, 2]]),
    torch.tensor([[0.0, 0, 0.5]]),
    torch.tensor([[0.2, 0.1, 1]]),
)


def test_value_clip_golden() -> None:
    assert clipped_value_loss(VALUES, RETURNS, OLD, 0.2).loss.mean().item() == pytest.approx(
        0.5416667, abs=1e-7
    )


def test_value_clip_keeps_the_larger_error() -> None:
    """Where clipping hides the error, the clipped term is the larger one and stops the gradient."""
    values = torch.tensor([[0.5]]).requires_grad_()
    result = clipped_value_loss(values, torch.tensor([[0.6]]), torch.tensor([[0.0]]), 0.2)
    assert result.clipped.all() and result.loss.item() == pytest.approx(0.5 * 0.4**2)
    result.loss.sum().backward()
    assert values.grad is not None and values.grad.item() == 0.0
    plain = clipped_value_loss(values, torch.tensor([[0.6]]), torch.tensor([[0.0]]), 0.0)
    assert plain.loss.item() == pytest.approx(0.5 * 0.1**2)


@pytest.mark.parametrize(
    "estimator, expected",
    [("k1", [0.5, -1.0, 0.0]), ("k2", [0.125, 0.5, 0.0]), ("k3", [0.1065307, 0.7182817, 0.0])],
)
def test_kl_golden(estimator: str, expected: list[float]) -> None:
    logprobs, reference = torch.tensor([[-1.0, -2.0, -0.5]]), torch.tensor([[-1.5, -1.0, -0.5]])
    x = log_ratio(logprobs, reference, torch.ones(1, 3, dtype=torch.bool))
    got = kl_estimate(x, estimator)  # type: ignore[arg-type]
    assert torch.allclose(got, torch.tensor([expected]), atol=3e-7)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_and_ratio_stay_finite_under_absurd_log_ratios(estimator: str) -> None:
    logprobs = torch.tensor([[-300.0, 0.0]]).requires_grad_()
    x = log_ratio(logprobs, torch.tensor([[0.0, -300.0]]), torch.ones(1, 2, dtype=torch.bool))
    assert x.tolist() == [[-20.0, 20.0]]
    loss = kl_estimate(x, estimator) + x.exp()  # type: ignore[arg-type]
    loss.sum().backward()
    assert loss.isfinite().all() and logprobs.grad is not None and logprobs.grad.tolist() == [[0.0, 0.0]]


def test_tis_golden() -> None:
    old, rollout = torch.tensor([[0.0, -100.0]]), torch.tensor([[-100.0, 0.0]])
    mask = torch.ones(1, 2, dtype=torch.bool)
    got = truncated_importance_weights(old, rollout, mask, cap=2.0, level="token")
    assert got[0, 0].item() == 2.0 and got[0, 1].item() == pytest.approx(2.061e-9, rel=1e-3)


def test_tis_sequence_weight_is_the_product_and_ignores_masked_slots() -> None:
    old = torch.tensor([[-1.0, -2.0, math.nan], [-0.5, -0.5, -0.5]]).requires_grad_()
    rollout = torch.tensor([[-1.1, -1.7, 0.0], [-0.5, -0.4, -0.75]])
    mask = torch.tensor([[True, True, False], [True, True, True]])
    got = truncated_importance_weights(old, rollout, mask, cap=2.0, level="sequence")
    assert not got.requires_grad
    assert got[0].tolist() == pytest.approx([math.exp(-0.2)] * 3)
    assert got[1].tolist() == pytest.approx([math.exp(0.15)] * 3)
    alone = truncated_importance_weights(old[:1], rollout[:1], mask[:1], cap=2.0, level="sequence")
    assert torch.equal(alone, got[:1])
