"""Progress: what a rank is doing now. Written by its training thread, read by whoever watches the rank."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass(slots=True)
class Progress:
    """The step, the phase and the collective that a rank is in.

    Fields are plain values that one thread writes, so another thread reads each of them whole; two fields
    read together may belong to neighbouring moments, which is good enough to name an operation.

    Attributes:
        step: training step in progress, counting from 1; 0 before the first.
        phase: part of the step, e.g. "rollout" or "reduce".
        operation: the collective in progress with its ranks, "" between collectives.
        operations: collectives begun in this phase.
        since_s: monotonic clock when the current phase or collective began, or the last collective ended.
        waited_s: seconds spent in collectives so far, waiting for peers included.
        observers: called before each phase and each collective; one that raises keeps it from starting.
    """

    step: int = 0
    phase: str = "start"
    operation: str = ""
    operations: int = 0
    since_s: float = field(default_factory=time.monotonic)
    waited_s: float = 0.0
    observers: tuple[Callable[[Progress], None], ...] = ()

    def enter(self, phase: str, step: int | None = None) -> None:
        """A phase begins, of the same step unless another one is given."""
        self.phase, self.operation, self.operations = phase, "", 0
        self.step = self.step if step is None else step
        self.since_s = time.monotonic()
        for observer in self.observers:
            observer(self)

    @contextmanager
    def communicating(self, kind: str, ranks: Sequence[int] = ()) -> Iterator[None]:
        """A collective, for as long as the calling thread is inside it."""
        self.operations += 1
        self.operation = f"{kind} over ranks {_listed(ranks)}" if ranks else kind
        for observer in self.observers:
            observer(self)
        began = self.since_s = time.monotonic()
        try:
            yield
        finally:
            self.operation = ""
            self.since_s = time.monotonic()
            self.waited_s += self.since_s - began

    def describe(self) -> str:
        """E.g. `step 7, reduce, all_to_all over ranks 0, 1`."""
        return ", ".join([f"step {self.step}", self.phase, *([self.operation] if self.operation else [])])


def _listed(ranks: Sequence[int], most: int = 8) -> str:
    shown = ", ".join(map(str, ranks[:most]))
    return shown if len(ranks) <= most else f"{shown}, ... ({len(ranks)} in all)"
