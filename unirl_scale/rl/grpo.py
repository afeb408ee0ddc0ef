"""Critic-free, group-relative algorithms: one class, the advantage estimator is an option.

Published recipes as options (all else default):
    GRPO         estimator: grpo
    Dr.GRPO      estimator: dr_grpo, aggregation_length: L
    DAPO         estimator: grpo, clip_high: 0.28, aggregation: token-mean, filter_groups: true,
                 overlong_length: L, overlong_cache: Lc
    RLOO         estimator: rloo
    REINFORCE++  estimator: reinforce++ (or reinforce++-baseline)
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from torch import Tensor

from unirl_scale.rl import groups
from unirl_scale.rl.advantages import discounted_returns, whiten
from unirl_scale.rl.aggregate import Aggregation, token_weights
from unirl_scale.rl.interface import LossBatch, Needs, Scored, Targets, TokenLoss, Weights
from unirl_scale.rl.kl_controller import KlController
from unirl_scale.rl.policy import (
    PolicyOptions,
    batch_metrics,
    initial_kl,
    policy_loss,
    policy_option_errors,
    raise_if_any,
    reward_kl,
    training_mask,
    uses_reference,
)
from unirl_scale.rl.reduce import row_sums, select
from unirl_scale.rl.rewards import on_last_token, subtract_kl

Estimator = Literal["grpo", "dr_grpo", "rloo", "reinforce++", "reinforce++-baseline"]

_OWN_AGGREGATION: dict[Estimator, Aggregation] = {
    "grpo": "seq-mean-token-mean",
    "dr_grpo": "seq-mean-token-sum-norm",
    "rloo": "seq-mean-token-sum",
    "reinforce++": "token-mean",
    "reinforce++-baseline": "token-mean",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class GrpoOptions(PolicyOptions):
    """Options of the group-relative family on top of the shared ones."""

    estimator: Estimator = "grpo"
    normalize_rloo: bool = False  # divide RLOO's advantage by the group's std
    aggregation: Aggregation | Literal["paper"] = "paper"  # paper = what the estimator's paper uses
    filter_groups: bool = False  # groups of zero variance do not train (DAPO)
    overlong_length: int = 0  # L, tokens; 0 = no overlong penalty
    overlong_cache: int = 0  # Lc, tokens


class Grpo:
    """No critic: a response is judged against the other responses to its prompt."""

    options_type: ClassVar[type[GrpoOptions]] = GrpoOptions

    def __init__(self, options: GrpoOptions) -> None:
        paper = options.aggregation == "paper"
        self.aggregation: Aggregation = (
            _OWN_AGGREGATION[options.estimator] if options.aggregation == "paper" else options.aggregation
        )
        errors = policy_option_errors(options)
        if self.aggregation == "seq-mean-token-sum-norm" and options.aggregation_length < 1:
            whose = f"estimator {options.estimator}" if paper else f"aggregation {self.aggregation}"
            errors.append(
                f"aggregation_length: got {options.aggregation_length}, {whose} divides by it\n"
                "hint: rollout.max_response_tokens is the usual value"
            )
        length, cache = options.overlong_length, options.overlong_cache
        if length < 0 or (length > 0 and not 0 < cache <= length) or (length == 0 and cache != 0):
            errors.append(
                f"overlong_cache: got {cache} with overlong_length {length}, must lie in [1, {length}]\n"
                f"hint: overlong_cache: {max(1, length // 5)}, or both 0 for no penalty"
            )
        raise_if_any(errors)
        self.options = options

    @property
    def needs(self) -> Needs:
        group = 1 if self.options.estimator == "reinforce++" else 2
        return Needs(reference=uses_reference(self.options), min_group_size=group)

    @property
    def initial_kl(self) -> KlController:
        return initial_kl(self.options)

    def advantages(self, batch: Scored) -> Targets:
        """Advantages by the estimator; returns is None; see `interface.Algorithm`."""
        options = self.options
        mask = training_mask(batch, options)
        metrics: dict[str, float] = {}
        if options.filter_groups:
            informative = groups.informative_rows(batch.rewards, mask.any(dim=1), batch.group_ids)
            metrics["filtered_rows"] = float((mask.any(dim=1) & ~informative).sum())
            mask = mask & informative[:, None]
        kl = reward_kl(batch, mask, options)
        metrics |= batch_metrics(batch, mask, kl)
        if options.overlong_length:
            lengths = batch.mask.sum(dim=1)
            penalty = groups.overlong_penalty(lengths, options.overlong_length, options.overlong_cache)
            batch = replace(batch, rewards=batch.rewards + penalty)
            metrics["overlong_rows"] = float((penalty < 0.0).sum())
        advantages, counts = self._estimate(batch, mask, kl)
        return Targets(mask=mask, advantages=advantages.float(), returns=None, metrics=metrics | counts)

    def _estimate(self, batch: Scored, mask: Tensor, kl: Tensor) -> tuple[Tensor, dict[str, float]]:
        """float64 [B, S] advantages, +0 where masked, and the counts of groups that could say nothing."""
        estimator, rows = self.options.estimator, mask.any(dim=1)
        if estimator == "reinforce++":
            return self._whitened_returns(batch.rewards, kl, batch.kl_coef, mask), {}
        if estimator == "reinforce++-baseline":
            result = groups.group_mean_baseline(batch.rewards, rows, batch.group_ids)
            advantages = self._whitened_returns(result.advantages, kl, batch.kl_coef, mask)
        else:
            rewards = batch.rewards
            if batch.kl_coef:
                rewards = rewards - row_sums(kl, mask) * batch.kl_coef
            result = self._judge(rewards, rows, batch.group_ids)
            advantages = select(result.advantages[:, None], mask)
        return advantages, {
            "singleton_groups": float(result.singleton_groups),
            "zero_variance_groups": float(result.zero_variance_groups),
        }

    def _judge(self, rewards: Tensor, rows: Tensor, group_ids: Tensor) -> groups.GroupAdvantages:
        if self.options.estimator == "grpo":
            return groups.grpo(rewards, rows, group_ids)
        if self.options.estimator == "dr_grpo":
            return groups.group_mean_baseline(rewards, rows, group_ids)
        return groups.rloo(rewards, rows, group_ids, normalize=self.options.normalize_rloo)

    def _whitened_returns(self, rewards: Tensor, kl: Tensor, kl_coef: float, mask: Tensor) -> Tensor:
        """REINFORCE++ (Hu et al. 2025, section 3): discounted token returns, whitened over the batch."""
        token_rewards = subtract_kl(on_last_token(rewards, mask), kl, kl_coef, mask)
        return whiten(discounted_returns(token_rewards, mask, self.options.gamma), mask)

    def weights(self, mask: Tensor) -> Weights:
        """Weights of the actor; see `interface.Algorithm`."""
        return Weights(
            actor=token_weights(mask, self.aggregation, self.options.aggregation_length),
            critic=None,
            num_rows=int(mask.any(dim=1).sum()),
            num_tokens=int(mask.sum()),
        )

    def actor_loss(self, logprobs: Tensor, entropy: Tensor, batch: LossBatch) -> TokenLoss:
        """The shared policy loss."""
        return policy_loss(logprobs, entropy, batch, self.options)
