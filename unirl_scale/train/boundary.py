"""The end of a step, where all ranks leave a mesh together or none does."""

from __future__ import annotations

import enum
import signal
from collections.abc import Callable
from functools import reduce
from operator import or_

import torch

from unirl_scale.comm.groups import Group
from unirl_scale.train.stopping import StopRequest


class Wish(enum.IntFlag):
    """What a rank wants at a step boundary."""

    NOTHING = 0
    REGROUP = 1
    STOP = 2


class Boundary:
    """What the ranks want at the end of each step.

    Args:
        regroup: why this rank is asked to leave the mesh for another one, "" when it is not.

    Attributes:
        step: steps completed.
    """

    def __init__(self, stop: StopRequest, regroup: Callable[[], str] = lambda: "") -> None:
        self.step = 0
        self._stop, self._regroup = stop, regroup

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
        wishes = world.all_gather(torch.tensor(int(mine), device=world.device)).tolist()
        return Wish(reduce(or_, wishes))
