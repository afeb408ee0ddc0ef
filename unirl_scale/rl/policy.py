"""The policy loss that PPO and the group-relative algorithms share, and its options."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from unirl_scale.core.errors import ConfigError
from unirl_scale.rl.interface import LossBatch, Scored, TokenLoss
from unirl_scale.rl.kl_controller import KlController
from unirl_scale.rl.losses import KlEstimator, kl_estimate, log_ratio, ppo_clip, truncated_importance_weights
from unirl_scale.rl.reduce import select, token_mean


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyOptions:
    """Options of every policy-gradient algorithm here. 0 turns off whatever is a coefficient, clip or cap."""

    gamma: float = 1.0
    clip_low: float = 0.2
    clip_high: float = 0.2  # DAPO's clip-higher: 0.28
    dual_clip: float = 3.0  # caps the loss at this times |A| when A < 0
    entropy_coef: float = 0.0
    kl_in_reward_coef: float = 0.0  # the first value when kl_target adapts it
    kl_loss_coef: float = 0.0
    kl_estimator: KlEstimator = "k3"
    kl_target: float = 0.0  # nats a token; > 0: adaptive kl_in_reward_coef
    kl_horizon: int = 10_000  # samples
    kl_metric: bool = False  # log the KL even with both coefficients 0; builds the reference model
    tis_cap: float = 0.0  # truncated importance sampling for a rollout engine that is not ours
    tis_level: Literal["token", "sequence"] = "token"
    drop_truncated: bool = False  # responses cut at the maximum length do not train
    aggregation_length: int = 0  # L_max of seq-mean-token-sum-norm, tokens


def policy_option_errors(options: PolicyOptions) -> list[str]:
    """Every rule that the shared options break, as `field: got ..., rule` lines."""
    at_least_zero = (
        "clip_low",
        "clip_high",
        "entropy_coef",
        "kl_in_reward_coef",
        "kl_loss_coef",
        "kl_target",
        "tis_cap",
    )
    errors = range_errors(options, ("gamma",), 0.0, 1.0) + range_errors(options, at_least_zero, 0.0, math.inf)
    if options.clip_low >= 1.0:
        errors.append(f"clip_low: got {options.clip_low}, must be below 1\nhint: 0.2")
    if options.dual_clip != 0.0 and not options.dual_clip > 1.0:
        errors.append(f"dual_clip: got {options.dual_clip}, must be above 1, or 0 for off\nhint: 3.0")
    if options.kl_horizon < 1:
        errors.append(f"kl_horizon: got {options.kl_horizon}, must be at least 1 sample\nhint: 10000")
    if options.kl_target > 0.0 and options.kl_in_reward_coef == 0.0:
        errors.append(
            f"kl_target: got {options.kl_target} with kl_in_reward_coef 0, which no factor can move\n"
            "hint: kl_in_reward_coef: 0.05, or kl_target: 0"
        )
    return errors


def range_errors(options: object, names: tuple[str, ...], low: float, high: float) -> list[str]:
    """The named float options that are not finite numbers in [low, high]."""
    errors = []
    for name in names:
        value = getattr(options, name)
        if not (math.isfinite(value) and low <= value <= high):
            nearest = low if not value > high else high
            errors.append(f"{name}: got {value}, must lie in [{low:g}, {high:g}]\nhint: {name}: {nearest:g}")
    return errors


def raise_if_any(errors: list[str]) -> None:
    """Raises: ConfigError that lists all of them, one after the other."""
    if errors:
        raise ConfigError("\n".join(f"algorithm.{error}" for error in errors))


def uses_reference(options: PolicyOptions) -> bool:
    """Whether any KL term or metric needs the reference model."""
    return options.kl_in_reward_coef != 0.0 or options.kl_loss_coef != 0.0 or options.kl_metric


def initial_kl(options: PolicyOptions) -> KlController:
    """The controller of the KL coefficient in the reward."""
    return KlController(coef=options.kl_in_reward_coef, target=options.kl_target, horizon=options.kl_horizon)


def required(x: Tensor | None, name: str) -> Tensor:
    """x, or an error that names what the trainer did not pass."""
    if x is None:
        raise ValueError(f"{name}: got None, but the algorithm's options need it")
    return x


def training_mask(batch: Scored, options: PolicyOptions) -> Tensor:
    """bool [B, S]: the batch's mask without rows of invalid reward and, if asked, without truncated ones."""
    rows = batch.valid_rows
    if options.drop_truncated:
        rows = rows & ~batch.truncated
    return batch.mask & rows[:, None]


def reward_kl(batch: Scored, mask: Tensor, options: PolicyOptions) -> Tensor:
    """KL estimate of each kept token of the sampled policy against the reference: float64 [B, S].

    All zero when no reference log-probs were scored and none are needed.
    """
    if batch.ref_logprobs is None and batch.kl_coef == 0.0:
        return torch.zeros_like(batch.old_logprobs, dtype=torch.float64)
    reference = required(batch.ref_logprobs, "ref_logprobs")
    x = log_ratio(batch.old_logprobs.double(), reference.double(), mask)
    return select(kl_estimate(x, options.kl_estimator), mask)


def batch_metrics(batch: Scored, mask: Tensor, kl: Tensor) -> dict[str, float]:
    """Counts and means every algorithm logs. Reward means are over the rows that train."""
    rewards = [r for r, kept in zip(batch.rewards.tolist(), mask.any(dim=1).tolist(), strict=True) if kept]
    metrics = {
        "invalid_rewards": float((~batch.valid_rows).sum()),
        "empty_rows": float((~batch.mask.any(dim=1)).sum()),
        "truncated_rows": float(batch.truncated.sum()),
        "kl_coef": batch.kl_coef,
    }
    if rewards:
        metrics["reward_mean"] = math.fsum(rewards) / len(rewards)
        metrics["response_tokens_mean"] = int(mask.sum()) / len(rewards)
        if batch.ref_logprobs is not None:
            metrics["kl_ref"] = token_mean(kl, mask)
    return metrics


def policy_loss(logprobs: Tensor, entropy: Tensor, batch: LossBatch, options: PolicyOptions) -> TokenLoss:
    """Clipped surrogate, times importance weights, minus the entropy bonus, plus the KL term.

    Args:
        logprobs, entropy: fp32 [n, S] with gradient, nats.

    Returns:
        fp32 [n, S] unweighted loss, and detached diagnostics of the same shape: `approx_kl` (k3 of old
        against new), `ratio`, `clip_fraction`, `dual_clip_fraction`, `entropy`; with TIS
        `tis_weight`, with a KL loss `kl_loss`. All +0 where masked.
    """
    mask = batch.mask
    x = log_ratio(logprobs, batch.old_logprobs, mask)
    ratio = x.exp()
    surrogate = ppo_clip(
        ratio,
        select(batch.advantages, mask),
        clip_low=options.clip_low,
        clip_high=options.clip_high,
        dual_clip=options.dual_clip,
    )
    loss = surrogate.loss
    diagnostics = {
        "approx_kl": ratio - 1.0 - x,
        "ratio": ratio,
        "clip_fraction": surrogate.clipped.float(),
        "dual_clip_fraction": surrogate.dual_clipped.float(),
        "entropy": entropy,
    }
    if options.tis_cap:
        rollout = required(batch.rollout_logprobs, "rollout_logprobs")
        weight = truncated_importance_weights(
            batch.old_logprobs, rollout, mask, cap=options.tis_cap, level=options.tis_level
        )
        loss, diagnostics["tis_weight"] = loss * weight, weight
    if options.entropy_coef:
        loss = loss - select(entropy, mask) * options.entropy_coef
    if options.kl_loss_coef:
        reference = required(batch.ref_logprobs, "ref_logprobs")
        kl = kl_estimate(log_ratio(logprobs, reference, mask), options.kl_estimator)
        loss, diagnostics["kl_loss"] = loss + kl * options.kl_loss_coef, kl
    return select(loss, mask), {name: select(value.detach(), mask) for name, value in diagnostics.items()}
