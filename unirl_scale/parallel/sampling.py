"""Choosing the next token from logits, exactly: the choice depends on the logits' bits and one uniform
number.

Probabilities become integers, so that sums are exact in any order and no scan algorithm, batch size or device
can move a choice.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from unirl_scale.kernels.table import SAMPLE_SCALE, OpTable


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingOptions:
    """temperature 0 = greedy; top_k 0 and top_p 1 = off."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0


def choose(ops: OpTable, logits: Tensor, uniforms: Tensor, options: SamplingOptions) -> Tensor:
    """One token a row.

    Args:
        logits: fp32 [B, V] over the whole vocabulary, already divided by the temperature; padding -inf.
        uniforms: fp64 [B] in [0, 1); unused when greedy.

    Returns:
        int64 [B]. Greedy takes the first of equal maxima. top-k keeps every token tied with the k-th.
    """
    if options.temperature == 0:
        return logits.argmax(dim=-1)
    if options.top_k and options.top_k < logits.shape[1]:
        kth = logits.topk(options.top_k, dim=-1).values[:, -1:]
        logits = torch.where(logits >= kth, logits, torch.full_like(logits, -torch.inf))
    if options.top_p < 1.0:
        logits = _nucleus(logits, options.top_p)
    return ops.sample(logits, uniforms)


def _nucleus(logits: Tensor, top_p: float) -> Tensor:
    """Exclude all but the smallest set of likeliest tokens of mass top_p (Holtzman et al. 2020)."""
    # Relative to the maximum, not to the sum: no floating-point reduction that could depend on the batch.
    likely = torch.exp(logits - logits.amax(dim=-1, keepdim=True))
    ordered, index = (likely * SAMPLE_SCALE).to(torch.int64).sort(dim=-1, descending=True, stable=True)
    before = ordered.cumsum(dim=-1) - ordered
    limit = (before[:, -1:] + ordered[:, -1:]).double() * top_p
    kept = torch.zeros_like(logits, dtype=torch.bool).scatter(1, index, before.double() < limit)
    return torch.where(kept, logits, torch.full_like(logits, -torch.inf))
