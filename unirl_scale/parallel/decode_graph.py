"""The decode step as CUDA graphs: one launch in place of a few hundred.

A graph has a fixed number of rows and fixed addresses. Fewer rows are padded with ones that belong to nobody:
they read and write the scratch page only, and rows do not depend on each other, so padding changes no bit.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from unirl_scale.parallel.decode_step import HEAD_COLUMNS, NOBODY, DecodeStep
from unirl_scale.parallel.kv_cache import SCRATCH
from unirl_scale.parallel.sampling import SamplingOptions

_SMALL = (1, 8, 16, 32, 64)  # beyond the last, multiples of it
_WARM_UPS = 2  # compile and load every kernel, and fill what ops keep, before the capture


def graph_rows(rows: int) -> int:
    """Rows of the graph that runs this many."""
    return next((size for size in _SMALL if rows <= size), -(-rows // _SMALL[-1]) * _SMALL[-1])


def padded_rows(
    rows: NDArray[np.int32], uniforms: NDArray[np.float64], size: int, width: int
) -> tuple[NDArray[np.int32], NDArray[np.float64]]:
    """A step's rows [B, HEAD_COLUMNS + N] and uniforms [B] -> [size, HEAD_COLUMNS + width] and [size]."""
    all_rows = np.full((size, HEAD_COLUMNS + width), SCRATCH, dtype=np.int32)
    all_rows[:, 0], all_rows[:, 1] = NOBODY, 1
    all_rows[: len(rows), : rows.shape[1]] = rows
    all_uniforms = np.zeros(size)
    all_uniforms[: len(uniforms)] = uniforms
    return all_rows, all_uniforms


@dataclass(frozen=True, slots=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    sampled: Tensor


class DecodeGraphs:
    """`DecodeStep.advance`, captured once for each number of rows and sampler.

    Holds for as long as the step's cache and the chunk's weights stay where they are. With several tp ranks,
    all capture at the same step, since they plan alike.

    Args:
        max_rows: most rows of a step.
        width: pages of the longest sequence.
    """

    def __init__(self, step: DecodeStep, max_rows: int, width: int) -> None:
        self.step, self.max_rows, self.width = step, max_rows, width
        device, size = step.ctx.device, graph_rows(max_rows)
        self._rows = torch.zeros(size, HEAD_COLUMNS + width, dtype=torch.int32, device=device)
        self._uniforms = torch.zeros(size, dtype=torch.float64, device=device)
        self._captured: dict[tuple[int, SamplingOptions], _Captured] = {}
        self.copy, self.prefill, self.start = step.copy, step.prefill, step.start

    def fits(self, pages: int, requests: int, rows: int) -> bool:
        """Whether a call of this size runs in the memory at hand."""
        step = self.step
        return pages <= step.cache.pages and requests <= step.requests and rows <= self.max_rows

    def feed(
        self, rows: NDArray[np.int32], uniforms: NDArray[np.float64], options: SamplingOptions
    ) -> Tensor:
        """As `DecodeStep.feed`. The next call overwrites the result."""
        size = graph_rows(len(rows))
        captured = self._captured.get((size, options))
        if captured is None:
            captured = self._captured[size, options] = self._capture(size, options)
        self._fill(*padded_rows(rows, uniforms, size, self.width))
        captured.graph.replay()
        return captured.sampled[:, : len(rows)]

    def _fill(self, rows: NDArray[np.int32], uniforms: NDArray[np.float64]) -> None:
        for source, target in ((rows, self._rows), (uniforms, self._uniforms)):
            target[: len(source)].copy_(torch.from_numpy(source).pin_memory(), non_blocking=True)

    def _capture(self, size: int, options: SamplingOptions) -> _Captured:
        nobody = np.zeros((0, HEAD_COLUMNS + self.width), dtype=np.int32)
        self._fill(*padded_rows(nobody, np.zeros(0), size, self.width))
        arguments = (self._rows[:size], self._uniforms[:size], options)
        current, aside = torch.cuda.current_stream(), torch.cuda.Stream()
        aside.wait_stream(current)
        with torch.cuda.stream(aside):
            for _ in range(_WARM_UPS):
                self.step.advance(*arguments)
        current.wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        others = next(iter(self._captured.values()), None)
        # Graphs run one after another, so they may share memory. Other threads (snapshots, NCCL's watchdog)
        # may call CUDA meanwhile: only this thread's calls must be capturable.
        pool = others.graph.pool() if others else None
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            sampled = self.step.advance(*arguments)
        return _Captured(graph, sampled)
