"""Packed: one micro-batch as the engine sees it, rows end to end, each sample padded to a multiple of W.

The padding is the same on every layout, so a sample's rows, and the W token blocks in which norm weights add
their gradient, depend on the sample alone. Sequence parallelism gives rank r the blocks
[r * W / tp, (r + 1) * W / tp) of every sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from unirl_scale.kernels.spans import Spans

Integers = NDArray[np.int64]


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
        score_cells: int64 [R], places of the scored rows in a padded [n, S], row-major.
        own_rows: int64 [T / tp], packed rows of this rank's token blocks. None when they are all rows.
        own_lengths: those of each sample.
        gather_index: int64 [T]; rank-major gathered rows indexed by it are in packed order. None when they
            are already.
        scatter_index: its inverse.
    """

    ids: Tensor
    positions: Tensor
    spans: Spans
    score_rows: Tensor
    score_targets: Tensor
    score_spans: Spans
    score_cells: Tensor
    own_rows: Tensor | None
    own_lengths: tuple[int, ...]
    gather_index: Tensor | None
    scatter_index: Tensor | None


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
    prompt_lengths = np.array([len(p) for p in prompts], dtype=np.int64)
    scored = np.array([len(r) for r in responses], dtype=np.int64)
    padded = -(-(prompt_lengths + scored) // leaves) * leaves
    starts = np.cumsum(padded) - padded
    ids = np.full(int(padded.sum()), -1, dtype=np.int64)
    for start, prompt, response in zip(starts, prompts, responses):
        ids[start : start + len(prompt)] = prompt
        ids[start + len(prompt) : start + len(prompt) + len(response)] = response
    width = int(scored.max(initial=0))
    each, gather = padded // tp, _gather_index(padded, tp)
    return Packed(
        ids=_to(ids, device),
        positions=_to(_ranges(np.zeros_like(padded), padded), device),
        spans=Spans.of(padded.tolist(), device),
        score_rows=_to(_ranges(starts + prompt_lengths - 1, scored), device),
        score_targets=_to(ids[_ranges(starts + prompt_lengths, scored)], device),
        score_spans=Spans.of(scored.tolist(), device),
        score_cells=_to(_ranges(np.arange(len(scored)) * width, scored), device),
        own_rows=None if tp == 1 else _to(_ranges(starts + tp_rank * each, each), device),
        own_lengths=tuple(each.tolist()),
        gather_index=None if gather is None else _to(gather, device),
        scatter_index=None if gather is None else _to(np.argsort(gather), device),
    )


def _ranges(starts: Integers, lengths: Integers) -> Integers:
    """start, start + 1, ... of each range, end to end."""
    before = np.cumsum(lengths) - lengths
    return np.arange(int(lengths.sum()), dtype=np.int64) + np.repeat(starts - before, lengths)


def _gather_index(padded: Integers, tp: int) -> Integers | None:
    if tp == 1 or len(padded) == 1:
        return None
    each = padded // tp
    first = (np.cumsum(each) - each).reshape(-1, 1) + np.arange(tp) * int(each.sum())
    return _ranges(first.reshape(-1), np.repeat(each, tp))


def _to(values: Integers, device: torch.device) -> Tensor:
    return torch.from_numpy(values).to(device, non_blocking=True)
