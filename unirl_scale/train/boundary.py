"""The end of a step, where all ranks leave a mesh together or none does."""

from __future__ import annotations

import enum
import signal
import time
from collections.abc import Callable
from functools import reduce
from operator import or_

import torch

from unirl_scale.comm.groups import Group
from unirl_scale.core.progress import Progress
from unirl_scale.train.stopping import StopRequest


class Wish(enum.IntFlag):
    """What a rank wants at a step boundary."""

    NOTHING = 0
    REGROUP = 1
    STOP = 2


PHASES = ("rollout", "score", "accumulate", "reduce", "update")


class PhaseClock:
    """How long a training thread computes in each phase of a step, collectives and waiting for peers left
    out; an observer of its progress.

    Times are the host's. Where an accelerator's queue runs ahead of the host, its time falls to the phase, or
    the collective, in which the host next waits for it.
    """

    def __init__(self) -> None:
        self._phase, self._since_s, self._waited_s = "", time.monotonic(), 0.0
        self._computed_s = dict.fromkeys(PHASES, 0.0)

    def observe(self, progress: Progress) -> None:
        """Called at each phase and each collective of the training thread."""
        now_s = time.monotonic()
        if self._phase in self._computed_s:
            self._computed_s[self._phase] += now_s - self._since_s - (progress.waited_s - self._waited_s)
        self._phase, self._since_s, self._waited_s = progress.phase, now_s, progress.waited_s

    def take_s(self) -> list[float]:
        """Seconds by PHASES since the last call."""
        taken, self._computed_s = self._computed_s, dict.fromkeys(PHASES, 0.0)
        return [taken[phase] for phase in PHASES]


class Boundary:
    """What the ranks want at the end of each step, and how long each of them took for it.

    Args:
        regroup: why this rank is asked to leave the mesh for another one, "" when it is not.

    Attributes:
        step: steps completed.
        computing_s: of the last step: phase -> seconds each rank computed, see `PhaseClock`.
    """

    def __init__(self, stop: StopRequest, regroup: Callable[[], str] = lambda: "") -> None:
        self.step = 0
        self.computing_s: dict[str, list[float]] = {}
        self._stop, self._regroup, self._clock = stop, regroup, PhaseClock()

    def watch(self, progress: Progress) -> None:
        """Time the phases of this rank's training thread; once is enough."""
        self.computing_s = {}
        self._clock.take_s()
        if self._clock.observe not in progress.observers:
            progress.observers = (self._clock.observe, *progress.observers)

    @property
    def signum(self) -> int:
        """The signal that ends the run; that of another rank is taken for SIGTERM."""
        return self._stop.signum or signal.SIGTERM

    def agree(self, world: Group, step: int) -> Wish:
        """What any rank wants, the same on every rank; collective."""
        self.step = step
        mine = Wish.STOP if self._stop.signum else Wish.NOTHING
        if self._regroup():
            mine |= Wish.REGROUP
        told = torch.tensor([float(mine), *self._clock.take_s()], dtype=torch.float64, device=world.device)
        wishes, *computing_s = world.all_gather(told).t().tolist()
        self.computing_s = dict(zip(PHASES, computing_s, strict=True))
        return Wish(reduce(or_, map(int, wishes)))
