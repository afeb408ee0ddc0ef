"""Bytes that an optimizer step sends: counted while it runs, and held against what it was planned to send."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from unirl_scale.comm.ordered import OrderedReducer
from unirl_scale.core.config import InvarianceConfig
from unirl_scale.core.errors import PlanError
from unirl_scale.parallel.build import Reductions
from unirl_scale.parallel.engine import NativeEngine
from unirl_scale.parallel.samples import Sample
from unirl_scale.parallel.traffic import StepTraffic, Workload, step_traffic

AXES = {"tp": ("tp",), "dp": ("dp",), "pp": ("pp_up", "pp_down")}
"""Axis -> the groups that carry it."""


class Meter:
    """Adds up what this rank sends on the groups of an engine's mesh, in the parts of a step that count."""

    def __init__(self, engine: NativeEngine) -> None:
        ctx = engine.ctx
        self._groups = {"tp": ctx.tp, "dp": ctx.dp, "pp_up": ctx.pp_up, "pp_down": ctx.pp_down}
        self._sent = dict.fromkeys(self._groups, 0)

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Counts what is sent inside. A group may carry more outside: digests, scores, the whole world."""
        before = {name: group.traffic.sent_bytes for name, group in self._groups.items()}
        yield
        for name, group in self._groups.items():
            self._sent[name] += group.traffic.sent_bytes - before[name]

    @property
    def sent(self) -> StepTraffic:
        """Bytes so far."""
        return StepTraffic(**self._sent)


def is_ordered(engine: NativeEngine) -> bool:
    """Its sums over ranks are ours, so that what they send is known; mode `off` leaves them to the vendor."""
    return all(isinstance(r, OrderedReducer) for r in (engine.ctx.tp_reducer, engine.ctx.dp_reducer))


def planned_step(
    engine: NativeEngine, samples: Sequence[Sample], planned: Mapping[str, Reductions] | None
) -> StepTraffic:
    """Bytes that this rank is to send in an optimizer step over these samples.

    Args:
        planned: axis -> how its ordered sums run, as the engine's context was built with.
    """
    ctx = engine.ctx
    work = Workload(
        model=engine.model,
        mesh=engine.mesh,
        invariance=InvarianceConfig(model_leaves=ctx.leaves, data_slots=ctx.slots),
        head=engine.head,
        itemsize=ctx.dtype.itemsize,
        samples=[(len(s.prompt), len(s.response)) for s in samples],
        planned=planned,
    )
    return step_traffic(work, ctx.mesh.rank_at(tp=ctx.at.tp, dp=ctx.at.dp, pp=ctx.at.pp))


def require_sent(role: str, rank: int, planned: StepTraffic, sent: StepTraffic) -> None:
    """The step sent what it was planned to send, on every axis.

    Raises:
        PlanError: naming the first axis that did not.
    """
    for axis in AXES:
        expected, counted = axis_bytes(planned)[axis], axis_bytes(sent)[axis]
        if expected != counted:
            raise PlanError(
                f"comm.{axis}: got {counted} bytes sent by rank {rank} in an optimizer step of {role}; "
                f"planned were {expected}; must be the same; "
                "hint: ranks run different versions, or this is a defect to report with config.yaml"
            )


def axis_bytes(sent: StepTraffic) -> dict[str, int]:
    """Axis -> bytes; both directions of a pipeline together."""
    return {axis: sum(getattr(sent, group) for group in groups) for axis, groups in AXES.items()}
