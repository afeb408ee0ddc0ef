"""Pipeline schedules as data: what each pipeline rank runs, in order, and which messages that sends.

1F1B (Narayanan et al. 2019) and interleaved 1F1B (Narayanan et al. 2021): global chunk c lives on rank c mod
pp. Backward visits the micro-batches of a chunk in the order of forward, which the serial accumulation of
gradients needs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["forward", "backward"]


@dataclass(frozen=True, slots=True)
class Step:
    """Run one micro-batch through one global chunk."""

    kind: Kind
    chunk: int
    micro: int


@dataclass(frozen=True, slots=True)
class Message:
    """Activations (forward) or their gradient (backward) of a micro-batch, into global chunk `chunk`."""

    kind: Kind
    chunk: int
    micro: int


def _orders(pp: int, vpp: int, micros: int) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """(part, micro) in forward and in backward order: groups of pp micro-batches, part by part."""
    forward: list[tuple[int, int]] = []
    backward: list[tuple[int, int]] = []
    for first in range(0, micros, pp):
        group = range(first, min(first + pp, micros))
        forward += [(part, m) for part in range(vpp) for m in group]
        backward += [(part, m) for part in reversed(range(vpp)) for m in group]
    return forward, backward


def _rank_steps(rank: int, pp: int, vpp: int, micros: int) -> list[Step]:
    forward, backward = _orders(pp, vpp, micros)
    f = [Step("forward", part * pp + rank, m) for part, m in forward]
    b = [Step("backward", part * pp + rank, m) for part, m in backward]
    warmup = pp - rank - 1 if vpp == 1 else 2 * (pp - rank - 1) + (vpp - 1) * pp
    warmup = min(warmup, len(f))
    steps = f[:warmup]
    for i in range(len(f) - warmup):
        steps += [f[warmup + i], b[i]]
    return steps + b[len(f) - warmup :]


def one_f_one_b(pp: int, vpp: int, micros: int) -> list[list[Step]]:
    """Steps of every pipeline rank.

    The warm-up of rank r is pp - r - 1 forwards, or 2 (pp - r - 1) + (vpp - 1) pp when interleaved; that
    plus one bounds the micro-batches in flight. If the last group of an interleaved schedule is not full, it
    is scheduled as if it were and the missing steps are left out: what remains keeps an order that cannot
    stall.
    """
    full = micros if vpp == 1 else -(-micros // pp) * pp
    schedule = [_rank_steps(rank, pp, vpp, full) for rank in range(pp)]
    return [[step for step in steps if step.micro < micros] for steps in schedule]


def forward_only(pp: int, vpp: int, micros: int) -> list[list[Step]]:
    """Steps of every pipeline rank for scoring."""
    forward, _ = _orders(pp, vpp, micros)
    return [[Step("forward", part * pp + rank, m) for part, m in forward] for rank in range(pp)]


def sent(step: Step, chunks: int) -> Message | None:
    """The message a step sends on, if any."""
    if step.kind == "forward":
        return Message("forward", step.chunk + 1, step.micro) if step.chunk + 1 < chunks else None
    return Message("backward", step.chunk - 1, step.micro) if step.chunk > 0 else None


def needed(step: Step, chunks: int) -> Message | None:
    """The message a step waits for, if any."""
    if step.kind == "forward":
        return Message("forward", step.chunk, step.micro) if step.chunk > 0 else None
    return Message("backward", step.chunk, step.micro) if step.chunk + 1 < chunks else None


def incoming(schedule: list[list[Step]], source: int, target: int, chunks: int) -> list[Message]:
    """Messages `source` sends to `target`, in the order it sends them."""
    out = []
    for step in schedule[source]:
        message = sent(step, chunks)
        if message is not None and message.chunk % len(schedule) == target:
            out.append(message)
    return out
