"""From a scored trajectory to minibatches and the losses the engines differentiate."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from unirl_scale.core.config import StageConfig
from unirl_scale.core.trajectory import Trajectory
from unirl_scale.parallel.engine import TokenLoss
from unirl_scale.parallel.samples import Sample
from unirl_scale.rl.interface import Algorithm, LossBatch, Weights


@dataclass(frozen=True, slots=True, kw_only=True)
class Minibatch:
    """The samples of one optimizer step.

    Attributes:
        samples: token ids; the response is empty where the row does not train.
        batch: [n, S] tensors of the losses.
        weights: factors of the token losses over this minibatch.
    """

    samples: tuple[Sample, ...]
    batch: LossBatch
    weights: Weights

    def token_loss(
        self,
        loss: Callable[[tuple[Tensor, ...], LossBatch], tuple[Tensor, dict[str, Tensor]]],
        weights: Tensor,
    ) -> TokenLoss:
        """The engine's objective: rows of the minibatch, cut to the micro-batch's width, weighted."""

        def weighted(numbers: Sequence[int], scores: tuple[Tensor, ...]) -> tuple[Tensor, dict[str, Tensor]]:
            index, width = torch.tensor(list(numbers)), scores[0].shape[1]
            rows = self.batch.rows(index, width).to(scores[0].device)
            losses, diagnostics = loss(scores, rows)
            return losses * weights[index, :width].to(losses.device), diagnostics

        return weighted

    def actor_loss(self, algorithm: Algorithm) -> TokenLoss:
        return self.token_loss(
            lambda scores, rows: algorithm.actor_loss(scores[0], scores[1], rows), self.weights.actor
        )

    def critic_loss(self, algorithm: Algorithm) -> TokenLoss:
        assert self.weights.critic is not None
        return self.token_loss(
            lambda scores, rows: algorithm.critic_loss(scores[0], rows),  # type: ignore[attr-defined]
            self.weights.critic,
        )


def minibatches(
    trajectory: Trajectory,
    batch: LossBatch,
    algorithm: Algorithm,
    stage: StageConfig,
    seed: int,
    step: int,
) -> Iterator[Minibatch]:
    """Every epoch visits each sample once, whole groups together, in an order keyed by (seed, step,
    epoch)."""
    size = stage.minibatch_size or stage.batch_size
    trains = batch.mask.any(dim=1).tolist()
    for epoch in range(stage.epochs):
        order = _order(trajectory.size, stage.group_size, f"{seed}/{step}/{epoch}")
        if size == trajectory.size:
            order = list(range(trajectory.size))
        for start in range(0, len(order), size):
            numbers = order[start : start + size]
            rows = batch.rows(torch.tensor(numbers))
            yield Minibatch(
                samples=tuple(
                    Sample(trajectory.prompts[i], trajectory.responses[i] if trains[i] else ())
                    for i in numbers
                ),
                batch=rows,
                weights=algorithm.weights(rows.mask),
            )


def _order(samples: int, group: int, key: str) -> list[int]:
    words = np.frombuffer(hashlib.sha256(key.encode()).digest()[:16], dtype=np.uint64)
    shuffled = np.random.Generator(np.random.Philox(key=words)).permutation(samples // group)
    return [int(g) * group + j for g in shuffled for j in range(group)]


def pad(rows: Sequence[Tensor], width: int) -> Tensor:
    """[length] tensors -> fp32 [B, width], zero past each length."""
    out = torch.zeros(len(rows), width)
    for i, row in enumerate(rows):
        out[i, : row.numel()] = row
    return out
