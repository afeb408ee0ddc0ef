"""What a process knows of the job, and how its control thread works."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from unirl_scale.train.elastic.directory import Directory
from unirl_scale.train.elastic.hub import Rules
from unirl_scale.train.elastic.view import View


@dataclass(slots=True)
class Seen:
    """What this process knows of the job.

    Attributes:
        view: the newest view that it is part of.
        stopped: why that view ended, "" while it stands.
        regroup: why its members are asked to leave it together.
        halted: why this process must end.
        over: training is complete.
        stopped_s, formed_s: when the last view ended and the newest one came; monotonic clock.
    """

    view: View | None = None
    stopped: str = ""
    regroup: str = ""
    halted: str = ""
    over: bool = False
    stopped_s: float = 0.0
    formed_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlSettings:
    """How a control thread works.

    Attributes:
        run: id of the job; strangers with another one are turned away.
        founder: this process founds the job when nobody is there.
        rules: of the hub, should this process become it.
        on_stop: called from a thread of its own when the view ends; must free the training thread from
            whatever collective it waits in.
    """

    run: str
    founder: bool
    rules: Rules
    directory: Directory
    interval_s: float
    timeout_s: float
    stall_timeout_s: float
    on_stop: Callable[[str], None]
