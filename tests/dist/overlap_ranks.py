"""What the overlap tests run on ranks: engines whose transfers and layers say when they begin and end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.dist.engine_ranks import Case, Digests, build_role, minibatch, run_case, train_step
from tests.dist.run_ranks import Place
from unirl_scale.comm.breaker import Breaker
from unirl_scale.comm.groups import Group, GroupFactory, Pending, connect
from unirl_scale.comm.ordered import OrderedReducer
from unirl_scale.comm.tree import split_contiguous
from unirl_scale.core.errors import CommError
from unirl_scale.parallel.chunk import Chunk
from unirl_scale.parallel.engine import NativeEngine
from unirl_scale.parallel.optimizer import AdamStep

Events = list[str]
# On a busy machine gloo now and then misses that a peer has closed its end, and then waits this long.
GLOO_MISSES_S = timedelta(seconds=20)
ADAM = AdamStep(lr=1e-3, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.0, count=1)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RecordingGroup(Group):
    """Tells what it starts, and the end of each wait."""

    events: Events = field(default_factory=list)

    def start_all_to_all(self, t: Tensor, send_sizes: Sequence[int], recv_sizes: Sequence[int]) -> Pending:
        return self._recorded("reduce", Group.start_all_to_all(self, t, send_sizes, recv_sizes))

    def start_all_gather(self, t: Tensor) -> Pending:
        return self._recorded("gather", Group.start_all_gather(self, t))

    def irecv(self, t: Tensor, src_index: int) -> Pending:
        return self._recorded("receive", Group.irecv(self, t, src_index))

    def _recorded(self, kind: str, pending: Pending) -> Pending:
        number = sum(event.startswith(f"start {kind}") for event in self.events)
        self.events.append(f"start {kind} {number}")
        return RecordedPending(pending, f"end {kind} {number}", self.events)  # type: ignore[return-value]


@dataclass(slots=True)
class RecordedPending:
    """Tells that it was waited for."""

    pending: Pending
    name: str
    events: Events

    def wait(self) -> Tensor:
        result = self.pending.wait()
        self.events.append(self.name)
        return result


def recording(group: Group, events: Events) -> RecordingGroup:
    return RecordingGroup(**{f.name: getattr(group, f.name) for f in fields(Group)}, events=events)


def watched(role_engine: NativeEngine, events: Events) -> NativeEngine:
    """An engine like this one on the same ranks, whose transfers and layers are recorded."""
    context = role_engine.ctx
    dp = recording(context.dp, events)
    context = replace(
        context,
        dp=dp,
        dp_reducer=OrderedReducer(dp, split_contiguous(context.slots, dp.size)),
        pp_up=recording(context.pp_up, events),
        pp_down=recording(context.pp_down, events),
    )
    engine = NativeEngine(role_engine.model, role_engine.mesh, context, role_engine.head, max_tokens=48)
    engine.initialise(7)
    for chunk in engine.chunks:
        _watch_layers(chunk, events)
    return engine


def _watch_layers(chunk: Chunk, events: Events) -> None:
    for layer, block in enumerate(chunk.blocks, chunk.layers.start):
        block.forward = _told(block.forward, f"forward {layer}", events)  # type: ignore[method-assign]
        block.backward = _told(block.backward, f"backward {layer}", events)  # type: ignore[method-assign]
    for name, end in (("embedding", chunk.embedding), ("head", chunk.head)):
        if end is not None:
            end.forward = _told(end.forward, f"forward {name}", events)  # type: ignore[method-assign]
            end.backward = _told(end.backward, f"backward {name}", events)  # type: ignore[method-assign]


def _told(function: Callable[..., Any], name: str, events: Events) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        events.append(name)
        return function(*args)

    return call


def recorded_step(groups: GroupFactory, case: Case) -> dict[str, Events]:
    """Events of the parts of a step, and of the forward after it."""
    role, events = build_role(groups, case), []
    assert role.engine is not None
    role = replace(role, engine=watched(role.engine, events))
    parts: dict[str, Events] = {}

    def cut(name: str) -> None:
        parts[name] = list(events)
        events.clear()

    samples = minibatch(case, 0).samples
    with torch.no_grad():
        role.engine.chunks[0].settle()
        cut("before")
        role.engine.accumulate(samples, lambda numbers, scores: (scores[0] * 0.01, {}))
        cut("accumulate")
        sumsq = role.engine.reduce()
        cut("reduce")
        role.engine.step(lambda count: replace(ADAM, count=count), 1.0, sumsq)
        cut("step")
        role.engine.score(samples)
        cut("score")
    return parts


# ---- a rank that fails between buckets --------------------------------------------------------------
class BetweenBucketsError(RuntimeError):
    """Raised by the failing rank."""


def fail_between_buckets(place: Place, case: Case, survivors: Case) -> tuple[str, Digests]:
    """The last rank fails inside its last backward, when some buckets are on the wire; the others train on
    without it. Returns (how the first world ended here, digests of the second)."""
    error, breaker, events = "", Breaker(), []
    first = {"store": _store(place, "first", place.world_size), "breaker": breaker, "timeout": GLOO_MISSES_S}
    try:
        with connect(place.rank, place.world_size, **first) as groups:  # type: ignore[arg-type]
            role = build_role(groups, case)
            assert role.engine is not None
            role = replace(role, engine=watched(role.engine, events))
            try:
                train_step(role, case, 0)
                if place.rank == place.world_size - 1:
                    _break_last_backward(role.engine, events)
                train_step(role, case, 1)
            finally:
                breaker.break_now("a rank failed")  # as the control plane of each rank does
    except (CommError, BetweenBucketsError) as failure:
        started = sum(e.startswith("start reduce") for e in events)
        error = f"{type(failure).__name__} after {started} starts"
    if place.rank == place.world_size - 1:
        return error, []
    alive = place.world_size - 1
    with connect(place.rank, alive, store=_store(place, "second", alive)) as groups:
        return error, run_case(groups, survivors)


def _break_last_backward(engine: NativeEngine, events: Events) -> None:
    """Fail in layer 1 of the backward in which buckets start."""
    block = engine.chunks[0].blocks[1]
    backward, before = block.backward, sum(e.startswith("start reduce") for e in events)

    def fail(*args: Any) -> Tensor:
        if sum(e.startswith("start reduce") for e in events) > before:
            raise BetweenBucketsError("between two buckets")
        return backward(*args)

    block.backward = fail  # type: ignore[method-assign]


def _store(place: Place, name: str, ranks: int) -> dist.Store:
    return dist.FileStore(str(Path(place.folder) / name), ranks)
