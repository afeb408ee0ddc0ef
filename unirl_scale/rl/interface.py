"""What an algorithm is to the trainer: needs, batch statistics, and two per-token losses.

Every tensor is [B, S]: B samples in sample-id order, S response tokens (or denoising steps), padded, with a
bool mask that may have gaps. Before `advantages` the batch is replicated on every rank, so statistics never
need a collective; the losses see any rows of it and are elementwise, so a row's loss and gradient have the
same bits whatever micro-batch it sits in. Weights turn per-token losses into *the* loss:
`loss = sum(weights * token_loss)`, whatever the split.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor

from unirl_scale.rl.kl_controller import KlController


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """What the trainer has to build. A model that is not needed is never built."""

    critic: bool = False
    reference: bool = False
    rollout: bool = True  # False: teacher-forced targets instead of sampled responses
    min_group_size: int = 1  # samples a prompt below which every advantage would be 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """A whole step's batch, replicated, in sample-id order.

    Attributes:
        mask: bool [B, S], tokens of the response that the policy chose.
        old_logprobs: fp32 [B, S], of the actor before the step's first update.
        values: fp32 [B, S] from the critic, or None without one.
        ref_logprobs: fp32 [B, S] of the reference model, or None without one.
        rewards: float64 [B]; what stands in an invalid row is not read.
        valid_rows: bool [B], False where the reward was invalid.
        group_ids: int64 [B], equal for the samples of one prompt.
        truncated: bool [B], the response was cut at the maximum length.
        kl_coef: coefficient of the KL penalty in the reward, from the run's KlController.
    """

    mask: Tensor
    old_logprobs: Tensor
    values: Tensor | None = None
    ref_logprobs: Tensor | None = None
    rewards: Tensor
    valid_rows: Tensor
    group_ids: Tensor
    truncated: Tensor
    kl_coef: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Targets:
    """What the optimizer steps of one training step aim at.

    Attributes:
        mask: bool [B, S], tokens that train: Scored.mask without rows that were dropped (invalid reward,
            filtered group, ...). A dropped row is thereby the same as an empty response.
        advantages: fp32 [B, S], +0 in masked slots.
        returns: fp32 [B, S], +0 in masked slots; None without a critic.
        metrics: floats for the log; a metric that cannot be formed is absent.
    """

    mask: Tensor
    advantages: Tensor
    returns: Tensor | None
    metrics: dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class LossBatch:
    """Any rows of a step's batch, as the losses see them; shapes [n, S], fp32 and bool (`mask`)."""

    mask: Tensor  # Targets.mask
    old_logprobs: Tensor
    advantages: Tensor
    returns: Tensor | None = None
    old_values: Tensor | None = None
    ref_logprobs: Tensor | None = None
    rollout_logprobs: Tensor | None = None  # only when the rollout engine is not ours

    def rows(self, index: slice | Tensor, width: int | None = None) -> LossBatch:
        """The same batch cut down to these rows, and to its first `width` tokens."""
        cut: dict[str, Any] = {}
        for field in fields(self):
            tensor = getattr(self, field.name)
            cut[field.name] = None if tensor is None else tensor[index][:, :width]
        return LossBatch(**cut)

    def to(self, device: torch.device) -> LossBatch:
        """The same batch on another device."""
        return LossBatch(
            **{f.name: None if (t := getattr(self, f.name)) is None else t.to(device) for f in fields(self)}
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """fp32 [n, S] factors of the per-token losses of one minibatch, and the counts behind them.

    With `num_tokens == 0` the loss is exactly 0 and the optimizer step is to be skipped and counted.
    """

    actor: Tensor
    critic: Tensor | None
    num_rows: int  # rows with at least one kept token
    num_tokens: int


TokenLoss = tuple[Tensor, dict[str, Tensor]]
"""Unweighted per-token loss [n, S] and detached fp32 [n, S] diagnostics, both +0 in masked slots."""


class Algorithm(Protocol):
    """A plug-in: one file, one line in `algorithms.ALGORITHMS`, constructed as `cls(options)`.

    Raises (at construction): ConfigError listing every option that breaks a rule.
    """

    options_type: ClassVar[type[Any]]  # frozen dataclass that the loader fills from the YAML mapping

    @property
    def needs(self) -> Needs:
        """What the trainer has to build for these options."""
        ...

    @property
    def initial_kl(self) -> KlController:
        """The KL controller that a new run starts with."""
        ...

    def advantages(self, batch: Scored) -> Targets:
        """Statistics of the whole batch, float64 inside, rounded once to fp32."""
        ...

    def weights(self, mask: Tensor) -> Weights:
        """Weights of one *whole* minibatch from Targets.mask [n, S]: counts are global, so cut rows after."""
        ...

    def actor_loss(self, logprobs: Tensor, entropy: Tensor, batch: LossBatch) -> TokenLoss:
        """logprobs, entropy: fp32 [n, S] with gradient. The loss does not depend on `entropy` when its
        coefficient is 0, so ask autograd with allow_unused=True."""
        ...


@runtime_checkable
class ActorCritic(Algorithm, Protocol):
    """An algorithm whose `needs.critic` is True."""

    def critic_loss(self, values: Tensor, batch: LossBatch) -> TokenLoss:
        """values: fp32 [n, S] with gradient."""
        ...
