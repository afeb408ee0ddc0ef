"""Medians of GPU work timed by events, competitors taking turns in one run."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
import triton

HEAD_START_CYCLES = 20_000_000  # the GPU spins while the host queues the launches to be timed


def interleaved_us(functions: Sequence[Callable[[], object]], repeats: int = 8) -> list[float]:
    """Median time of each function in microseconds, A B C A B C ..., launch gaps hidden by a head start."""
    for function in functions:
        function()
    torch.cuda.synchronize()
    events = [[_pair() for _ in range(repeats)] for _ in functions]
    torch.cuda._sleep(HEAD_START_CYCLES)
    for turn in range(repeats):
        for function, pairs in zip(functions, events):
            pairs[turn][0].record()
            function()
            pairs[turn][1].record()
    torch.cuda.synchronize()
    return [median(a.elapsed_time(b) for a, b in pairs) * 1e3 for pairs in events]


def _pair() -> tuple[torch.cuda.Event, torch.cuda.Event]:
    return torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)


def graph_of(function: Callable[[], object]) -> Callable[[], None]:
    """The function's launches as one CUDA graph, for work of a few microseconds."""
    function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    return graph.replay


def versions() -> dict[str, Any]:
    """What the numbers were measured on."""
    properties = torch.cuda.get_device_properties(0)
    return {
        "device": properties.name,
        "multiprocessors": properties.multi_processor_count,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cudnn": torch.backends.cudnn.version(),
    }


def report(rows: Sequence[dict[str, Any]], path: Path | None) -> None:
    """Print rows of equal keys as a table; write them as JSON with the versions when a path is given."""
    print(" ".join(f"{k}={v}" for k, v in versions().items()))
    if rows:
        columns = list(rows[0])
        cells = [[_cell(row[c]) for c in columns] for row in rows]
        widths = [max(len(c), *(len(row[i]) for row in cells)) for i, c in enumerate(columns)]
        for line in (columns, *cells):
            print("  ".join(text.rjust(width) for text, width in zip(line, widths)))
    if path is not None:
        path.write_text(json.dumps({"versions": versions(), "rows": list(rows)}, indent=1))


def _cell(value: Any) -> str:
    return (
        f"{value:.3g}"
        if isinstance(value, float) and value < 10
        else f"{value:.0f}"
        if isinstance(value, float)
        else str(value)
    )


def geomean(values: Sequence[float]) -> float:
    return float(torch.tensor(values, dtype=torch.float64).log().mean().exp())
