"""Between packed scored rows [R] and padded response tokens [n, S]."""

from __future__ import annotations

import torch
from torch import Tensor

from unirl_scale.parallel.packing import Packed


def split_scored(values: Tensor, packed: Packed) -> tuple[Tensor, ...]:
    """[R] -> one tensor [response length] a sample."""
    return values.detach().split(list(packed.score_spans.lengths))


def pad_scored(values: Tensor, packed: Packed) -> Tensor:
    """[R] -> fp32 [n, S], zero past each response."""
    out = torch.zeros(len(packed.score_spans), packed.score_spans.max_length, device=values.device)
    for row, part in enumerate(split_scored(values, packed)):
        out[row, : part.numel()] = part
    return out


def unpad_scored(values: Tensor, packed: Packed) -> Tensor:
    """[n, S] -> [R]."""
    return torch.cat([values[row, :n] for row, n in enumerate(packed.score_spans.lengths)])
