"""Packed: one micro-batch as the engine sees it, rows end to end, each sample padded to a multiple of W.

The padding is the same on every layout, so a sample's rows, and the W token blocks in which norm weights add
their gradient, depend on the sample alone. Sequence parallelism gives rank r the blocks
[r * W / tp, (r + 1) * W / tp) of every sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from unirl_scale.kernels.spans import Spans


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed:
    """A micro-batch.

    Attributes:
        ids: int64 [T], padding rows hold -1.
        positions: int64 [T].
        spans: padded rows of each sample.
        score_rows: int64 [R], packed rows whose next token is scored (a response token).
        score_targets: int64 [R], those next tokens.
        score_spans: scored rows of each sample.
        own_rows: int64 [T / tp], packed rows of this rank's token blocks.
        gather_index: int64 [T]; rank-major gathered rows indexed by it are in packed order. None when they
            are already.
    """

    ids: Tensor
    positions: Tensor
    spans: Spans
    score_rows: Tensor
    score_targets: Tensor
    score_spans: Spans
    own_rows: Tensor
    gather_index: Tensor | None

    @property
    def own_lengths(self) -> list[int]:
        """Rows of each sample in `own_rows`."""
        return [n * self.own_rows.numel() // max(self.spans.total, 1) for n in self.spans.lengths]


def pack(
    prompts: Sequence[Sequence[int]],
    responses: Sequence[Sequence[int]],
    *,
    leaves: int,
    tp: int,
    tp_rank: int,
    device: torch.device,
) -> Packed:
    """Lay samples end to end. Every prompt has at least one token; a response may be empty."""
    ids: list[int] = []
    positions: list[int] = []
    lengths, rows, targets, scored, own = [], [], [], [], []
    for prompt, response in zip(prompts, responses):
        tokens = [*prompt, *response]
        start, padded = len(ids), -(-len(tokens) // leaves) * leaves
        ids += tokens + [-1] * (padded - len(tokens))
        positions += range(padded)
        lengths.append(padded)
        rows += range(start + len(prompt) - 1, start + len(tokens) - 1)
        targets += response
        scored.append(len(response))
        each = padded // tp
        own += range(start + tp_rank * each, start + (tp_rank + 1) * each)

    def tensor(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    return Packed(
        ids=tensor(ids),
        positions=tensor(positions),
        spans=Spans.of(lengths, device),
        score_rows=tensor(rows),
        score_targets=tensor(targets),
        score_spans=Spans.of(scored, device),
        own_rows=tensor(own),
        gather_index=_gather_index(lengths, tp, device),
    )


def _gather_index(lengths: list[int], tp: int, device: torch.device) -> Tensor | None:
    if tp == 1 or len(lengths) == 1:
        return None
    total = sum(lengths)
    index, offset = [], 0
    for n in lengths:
        each = n // tp
        for rank in range(tp):
            first = rank * (total // tp) + offset // tp
            index.append(torch.arange(first, first + each))
        offset += n
    return torch.cat(index).to(device)
