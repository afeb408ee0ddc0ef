"""The picture of a run: reward, held-out accuracy and KL against the step, with the stages marked."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from unirl_scale.train.metrics import ACCURACY, KL, REWARD, Reporter, read_metrics
from unirl_scale.train.rundir import RunDir

_PANELS = ((REWARD, "mean reward"), (ACCURACY, "held-out accuracy"), (KL, "KL to reference"))
_COLORS = {REWARD: "#1f6f8b", ACCURACY: "#2e7d32", KL: "#b3541e"}


def plot_run(run_dir: RunDir, reporter: Reporter) -> Path | None:
    """Write plot.png from metrics.jsonl.

    Returns:
        The file, or None when there is nothing to draw or matplotlib is absent (the reporter warns of that).
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        reporter.warn("no plot.png: matplotlib is not installed; hint: pip install 'unirl-scale[plot]'")
        return None
    records = read_metrics(run_dir)
    panels = [(label, name, series) for name, label in _PANELS if (series := _series(records, name))]
    if not panels:
        return None
    figure = Figure(figsize=(8, 1 + 2.2 * len(panels)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = list(figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0])
    for axis, (label, name, series) in zip(axes, panels, strict=True):
        steps, values = zip(*series, strict=True)
        marker = "o" if len(steps) < 60 else None
        axis.plot(steps, values, color=_COLORS[name], linewidth=1.4, marker=marker, markersize=3)
        axis.set_ylabel(label)
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    _mark_stages(axes, records)
    axes[-1].set_xlabel("step")
    figure.suptitle(run_dir.path.name)
    figure.savefig(run_dir.plot, dpi=120)
    return run_dir.plot


def stage_starts(records: Sequence[dict[str, Any]]) -> list[tuple[int, str]]:
    """(first step, name) of each stage."""
    starts: list[tuple[int, str]] = []
    for record in records:
        if not starts or starts[-1][1] != record["stage"]:
            starts.append((record["step"], record["stage"]))
    return starts


def _series(records: Sequence[dict[str, Any]], name: str) -> list[tuple[int, float]]:
    points = [(record["step"], float(record[name])) for record in records if name in record]
    return [(step, value) for step, value in points if math.isfinite(value)]


def _mark_stages(axes: Sequence[Any], records: Sequence[dict[str, Any]]) -> None:
    starts = stage_starts(records)
    for number, (step, stage) in enumerate(starts):
        for axis in axes:
            if number:
                axis.axvline(step - 0.5, color="#888888", linestyle="--", linewidth=0.9)
        axes[0].annotate(
            stage, (step, 1.0), xycoords=("data", "axes fraction"), xytext=(2, 3), textcoords="offset points"
        )
