"""Supervised fine-tuning: teacher-forced cross-entropy, e.g. as a warm-up before PPO."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from unirl_scale.rl.aggregate import Aggregation, token_weights
from unirl_scale.rl.interface import LossBatch, Needs, Scored, Targets, TokenLoss, Weights
from unirl_scale.rl.kl_controller import KlController
from unirl_scale.rl.policy import raise_if_any
from unirl_scale.rl.reduce import select


@dataclass(frozen=True, slots=True, kw_only=True)
class SftOptions:
    """How token losses are averaged."""

    aggregation: Aggregation = "token-mean"
    aggregation_length: int = 0  # L_max of seq-mean-token-sum-norm, tokens


class Sft:
    """The response is the task's own target; nothing is sampled and no other model is needed."""

    options_type: ClassVar[type[SftOptions]] = SftOptions

    def __init__(self, options: SftOptions) -> None:
        if options.aggregation == "seq-mean-token-sum-norm" and options.aggregation_length < 1:
            raise_if_any(
                [
                    f"aggregation_length: got {options.aggregation_length}, aggregation divides by it\n"
                    "hint: rollout.max_response_tokens is the usual value"
                ]
            )
        self.options = options

    @property
    def needs(self) -> Needs:
        return Needs(rollout=False)

    @property
    def initial_kl(self) -> KlController:
        return KlController(coef=0.0)

    def advantages(self, batch: Scored) -> Targets:
        """All zero: a target needs no judging. `old_logprobs` and `rewards` are not read."""
        zeros = torch.zeros(batch.mask.shape, dtype=torch.float32, device=batch.mask.device)
        rows = float(batch.mask.any(dim=1).sum())
        metrics = {"response_tokens_mean": int(batch.mask.sum()) / rows} if rows else {}
        return Targets(mask=batch.mask, advantages=zeros, returns=None, metrics=metrics)

    def weights(self, mask: Tensor) -> Weights:
        """Weights of the actor; see `interface.Algorithm`."""
        return Weights(
            actor=token_weights(mask, self.options.aggregation, self.options.aggregation_length),
            critic=None,
            num_rows=int(mask.any(dim=1).sum()),
            num_tokens=int(mask.sum()),
        )

    def actor_loss(self, logprobs: Tensor, entropy: Tensor, batch: LossBatch) -> TokenLoss:
        """-log p of the target token: fp32 [n, S], nats; diagnostic `entropy`."""
        mask = batch.mask
        return -select(logprobs, mask) + 0.0, {"entropy": select(entropy.detach(), mask)}
