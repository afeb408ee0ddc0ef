"""PPO with a critic of its own. Schulman et al. 2017; RLHF form after Ouyang et al. 2022."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from unirl_scale.rl.advantages import gae, whiten
from unirl_scale.rl.aggregate import Aggregation, token_weights
from unirl_scale.rl.interface import LossBatch, Needs, Scored, Targets, TokenLoss, Weights
from unirl_scale.rl.kl_controller import KlController
from unirl_scale.rl.losses import clipped_value_loss
from unirl_scale.rl.policy import (
    PolicyOptions,
    batch_metrics,
    initial_kl,
    policy_loss,
    policy_option_errors,
    raise_if_any,
    range_errors,
    required,
    reward_kl,
    training_mask,
    uses_reference,
)
from unirl_scale.rl.reduce import moments, select
from unirl_scale.rl.rewards import on_last_token, subtract_kl


@dataclass(frozen=True, slots=True, kw_only=True)
class PpoOptions(PolicyOptions):
    """PPO's own options on top of the shared ones."""

    lam: float = 0.95  # GAE's lambda
    value_clip: float = 0.2
    whiten_advantages: bool = True
    aggregation: Aggregation = "token-mean"
    value_aggregation: Aggregation = "token-mean"


class Ppo:
    """Actor and critic, GAE over token rewards (last-token reward minus KL)."""

    options_type: ClassVar[type[PpoOptions]] = PpoOptions

    def __init__(self, options: PpoOptions) -> None:
        errors = policy_option_errors(options)
        errors += range_errors(options, ("lam",), 0.0, 1.0)
        errors += range_errors(options, ("value_clip",), 0.0, float("inf"))
        norm = "seq-mean-token-sum-norm"
        if norm in (options.aggregation, options.value_aggregation) and options.aggregation_length < 1:
            errors.append(
                f"aggregation_length: got {options.aggregation_length}, {norm} divides by it\n"
                "hint: rollout.max_response_tokens is the usual value"
            )
        raise_if_any(errors)
        self.options = options

    @property
    def needs(self) -> Needs:
        return Needs(critic=True, reference=uses_reference(self.options))

    @property
    def initial_kl(self) -> KlController:
        return initial_kl(self.options)

    def advantages(self, batch: Scored) -> Targets:
        """GAE advantages (whitened over the batch if asked) and returns; see `interface.Algorithm`."""
        options = self.options
        mask = training_mask(batch, options)
        kl = reward_kl(batch, mask, options)
        rewards = subtract_kl(on_last_token(batch.rewards, mask), kl, batch.kl_coef, mask)
        values = required(batch.values, "values")
        raw, returns = gae(rewards, values, mask, gamma=options.gamma, lam=options.lam)
        advantages = whiten(raw, mask) if options.whiten_advantages else select(raw, mask)
        metrics = batch_metrics(batch, mask, kl)
        metrics |= _value_metrics(raw, returns, mask)
        return Targets(
            mask=mask, advantages=advantages.float(), returns=select(returns, mask).float(), metrics=metrics
        )

    def weights(self, mask: Tensor) -> Weights:
        """Weights of actor and critic; see `interface.Algorithm`."""
        options = self.options
        return Weights(
            actor=token_weights(mask, options.aggregation, options.aggregation_length),
            critic=token_weights(mask, options.value_aggregation, options.aggregation_length),
            num_rows=int(mask.any(dim=1).sum()),
            num_tokens=int(mask.sum()),
        )

    def actor_loss(self, logprobs: Tensor, entropy: Tensor, batch: LossBatch) -> TokenLoss:
        """The shared policy loss."""
        return policy_loss(logprobs, entropy, batch, self.options)

    def critic_loss(self, values: Tensor, batch: LossBatch) -> TokenLoss:
        """Clipped squared error against the returns: fp32 [n, S]; diagnostic `value_clip_fraction`."""
        mask = batch.mask
        returns = select(required(batch.returns, "returns"), mask)
        old_values = select(required(batch.old_values, "old_values"), mask)
        result = clipped_value_loss(select(values, mask), returns, old_values, self.options.value_clip)
        diagnostics = {"value": select(values.detach(), mask), "value_clip_fraction": result.clipped.float()}
        return select(result.loss, mask), {name: select(x, mask) for name, x in diagnostics.items()}


def _value_metrics(advantages: Tensor, returns: Tensor, mask: Tensor) -> dict[str, float]:
    """Mean and spread of unwhitened advantages and returns; how much of the returns the critic explained."""
    a, r = moments(advantages, mask), moments(returns, mask)
    if not a.count:
        return {}
    metrics = {"advantage_mean": a.mean, "advantage_std": a.var**0.5, "return_mean": r.mean}
    if r.var > 0.0:
        metrics["value_explained_variance"] = 1.0 - a.var / r.var
    return metrics
