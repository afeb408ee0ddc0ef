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
    spans = packed.score_spans
    out = torch.zeros(len(spans) * spans.max_length, device=values.device)
    out[packed.score_cells] = values.detach().float()
    return out.view(len(spans), spans.max_length)


def unpad_scored(values: Tensor, packed: Packed) -> Tensor:
    """[n, S] -> [R]."""
    return values.reshape(-1)[packed.score_cells]
