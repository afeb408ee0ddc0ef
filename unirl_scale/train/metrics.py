"""What a run records and says: metrics.jsonl, digests.jsonl, and the reporter the loop talks to."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Protocol

from unirl_scale.train.rundir import RunDir

# Names that the progress line and the plot look for; the loop logs under them.
REWARD = "reward_mean"
ACCURACY = "eval/accuracy"
KL = "kl_ref"
ACTOR_LOSS = "actor/loss"
GRAD_NORM = "actor/grad_norm"
ROLLOUT_DIFF = "rollout/logprob_max_abs_diff"


class Reporter(Protocol):
    """What rank 0 tells the user while it trains. Other ranks hold a SilentReporter."""

    def begin(self, total_steps: int, first_step: int = 0) -> None:
        """Training starts: steps of all stages together, and steps done before (a resume)."""
        ...

    def step(self, step: int, stage: str, metrics: Mapping[str, float]) -> None:
        """A step is complete; `step` counts from 1 over all stages."""
        ...

    def note(self, text: str) -> None:
        """A line worth reading, e.g. a stage's start."""
        ...

    def warn(self, text: str) -> None:
        """A line worth acting on."""
        ...

    def table(self, rows: Sequence[Sequence[str]]) -> None:
        """A small table, its header first, e.g. accuracy before and after."""
        ...

    def end(self) -> None:
        """No more steps; a live bar is taken away."""
        ...


class SilentReporter:
    """Reporter of every rank but 0."""

    def begin(self, total_steps: int, first_step: int = 0) -> None: ...

    def step(self, step: int, stage: str, metrics: Mapping[str, float]) -> None: ...

    def note(self, text: str) -> None: ...

    def warn(self, text: str) -> None: ...

    def table(self, rows: Sequence[Sequence[str]]) -> None: ...

    def end(self) -> None: ...


class MetricsWriter:
    """Appends to metrics.jsonl and digests.jsonl of a run directory; every line is flushed once written.

    A last line that a killed run left unfinished is cut off first, so that appending cannot corrupt it.
    """

    def __init__(self, run_dir: RunDir) -> None:
        self._metrics = _open_append(run_dir.metrics)
        self._digests = _open_append(run_dir.digests)

    def metrics(self, step: int, stage: str, values: Mapping[str, float]) -> None:
        """One line a step: `{"step", "stage", ...values}`. NaN and infinities become the texts "NaN",
        "Infinity", "-Infinity", because JSON has no such numbers."""
        _write(
            self._metrics, {"step": step, "stage": stage, **{k: _json_number(v) for k, v in values.items()}}
        )

    def digests(self, step: int, tensors: Mapping[str, str]) -> None:
        """One line an optimizer step (or one a role): `{"step", "tensors": {name: sha256 hex}}`, where names
        are logical parameters, e.g. `actor/grad/embed.weight`."""
        _write(self._digests, {"step": step, "tensors": dict(tensors)})

    def close(self) -> None:
        self._metrics.close()
        self._digests.close()

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read_metrics(run_dir: RunDir) -> list[dict[str, Any]]:
    """The complete lines of metrics.jsonl; empty when the run has none."""
    if not run_dir.metrics.exists():
        return []
    lines = run_dir.metrics.read_text(encoding="utf-8").splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


def cut_after(run_dir: RunDir, step: int, optimizer_step: int) -> None:
    """Forget what a run logged past the step that it now continues from: it will log that again.

    Args:
        step: last step that stays in metrics.jsonl.
        optimizer_step: last one that stays in digests.jsonl.
    """
    for path, last in ((run_dir.metrics, step), (run_dir.digests, optimizer_step)):
        if not path.exists():
            continue
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        kept = [line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= last]
        if len(kept) < len(lines):
            partial = path.with_name(path.name + ".part")
            partial.write_text("".join(kept), encoding="utf-8")
            partial.replace(path)


def _json_number(value: float) -> float | str:
    if isinstance(value, int) or math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")


def _write(file: IO[str], record: Mapping[str, object]) -> None:
    file.write(json.dumps(record, allow_nan=False) + "\n")
    file.flush()


def _open_append(path: Path) -> IO[str]:
    if path.exists():
        whole = path.read_bytes().rpartition(b"\n")
        if whole[2]:
            with path.open("r+b") as file:
                file.truncate(len(whole[0]) + len(whole[1]))
    return path.open("a", encoding="utf-8")
