"""Recorder: what rank 0 writes to the run directory and tells the user."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from unirl_scale.core.config import RunConfig, StageConfig
from unirl_scale.train.metrics import MetricsWriter, Reporter
from unirl_scale.train.rundir import RunDir, write_versions
from unirl_scale.train.state import TrainState


class Recorder:
    """Rank 0's files and words."""

    def __init__(self, cfg: RunConfig, reporter: Reporter, versions: Mapping[str, str]) -> None:
        run_dir = RunDir(Path(cfg.run_dir))
        write_versions(run_dir, versions)
        self.writer, self.reporter = MetricsWriter(run_dir), reporter
        self.evaluations: list[tuple[str, int, dict[str, float]]] = []

    def step(
        self,
        state: TrainState,
        stage: StageConfig,
        metrics: Mapping[str, float],
        digests: Mapping[int, Mapping[str, str]],
        warnings: Sequence[str],
    ) -> None:
        """A step is complete."""
        self.writer.metrics(state.step, stage.name, metrics)
        for number, tensors in digests.items():
            self.writer.digests(number, tensors)
        self.reporter.step(state.step, stage.name, metrics)
        self.warn(state, warnings)

    def warn(self, state: TrainState, warnings: Sequence[str]) -> None:
        """Lines worth acting on."""
        for text in warnings:
            self.reporter.warn(f"step {state.step}: {text}")

    def evaluation(self, state: TrainState, stage: StageConfig, result: dict[str, float]) -> None:
        """An evaluation; the one before the first step has no step to be logged with."""
        self.evaluations.append((stage.name, state.step, result))
        if state.step == 0:
            self.writer.metrics(0, stage.name, result)

    def finish(self) -> None:
        """The table of evaluations; the files are closed."""
        if self.evaluations:
            rows = [["held-out after", "step", "accuracy", "reward"]]
            for i, (stage, step, r) in enumerate(self.evaluations):
                name = "initial weights" if i == 0 and step == 0 else stage
                rows.append([name, str(step), f"{r['eval/accuracy']:.1%}", f"{r['eval/reward']:.3f}"])
            self.reporter.table(rows)
        self.writer.close()
