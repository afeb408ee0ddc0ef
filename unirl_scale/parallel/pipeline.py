"""Runs a pipeline schedule on one rank: receive, compute, send, step by step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from unirl_scale.comm.groups import Group, Pending
from unirl_scale.parallel.chunk import Chunk, ChunkSaved
from unirl_scale.parallel.gradients import Gradients
from unirl_scale.parallel.packing import Packed
from unirl_scale.parallel.schedule import Message, Step, incoming, needed, sent

# Scores of a micro-batch on the last chunk -> the gradient of the loss with respect to them.
Objective = Callable[[int, Any], Any]


class Mailbox:
    """Messages from the other pipeline ranks, received in the order their senders send them.

    NCCL matches sends and receives on a communicator by order alone, so a message that is wanted later but
    was sent earlier is received first and kept.
    """

    def __init__(
        self, chunks: Sequence[Chunk], schedule: list[list[Step]], micros: Sequence[Packed], rank: int
    ) -> None:
        self.ctx = chunks[0].ctx
        self.rank, self.pp, self.micros = rank, len(schedule), micros
        self.total = self.pp * len(chunks)
        self.hidden = chunks[0].model.hidden_size
        self.queues = {s: incoming(schedule, s, rank, self.total) for s in range(self.pp) if s != rank}
        self.kept: dict[Message, Tensor] = {}
        self.sending: list[Pending] = []

    def _channel(self, source: int, target: int) -> Group:
        return self.ctx.pp_up if source < target else self.ctx.pp_down

    def receive(self, message: Message) -> Tensor:
        source = (message.chunk + (1 if message.kind == "backward" else -1)) % self.pp
        while message not in self.kept:
            following = self.queues[source].pop(0)
            packed = self.micros[following.micro]
            rows = sum(packed.own_lengths) if self.ctx.sequence_parallel else packed.spans.total
            buffer = torch.empty(rows, self.hidden, dtype=self.ctx.dtype, device=self.ctx.device)
            self.kept[following] = self._channel(source, self.rank).irecv(buffer, source).wait()
        return self.kept.pop(message)

    def send(self, message: Message, x: Tensor) -> None:
        target = message.chunk % self.pp
        self.sending.append(self._channel(self.rank, target).isend(x.contiguous(), target))

    def close(self) -> None:
        for pending in self.sending:
            pending.wait()
        self.sending.clear()


def run_schedule(
    schedule: list[list[Step]],
    chunks: Sequence[Chunk],
    micros: Sequence[Packed],
    objective: Objective,
    gradients: Sequence[Gradients] | None = None,
    slot_ends: Sequence[int] = (),
) -> None:
    """Run this rank's steps.

    Args:
        chunks: this rank's model chunks; chunks[i] is global chunk i * pp + rank.
        objective: called on the last chunk with (micro number, scores); its result starts the backward.
        gradients: one a chunk; None when only scoring.
        slot_ends: for each local data slot, how many micro-batches precede its end; a slot closes on
            each chunk as soon as that many backwards ran there (at once for empty slots).
    """
    rank, progress = chunks[0].ctx.at.pp, chunks[0].ctx.tp.progress
    pp = len(schedule)
    total = pp * len(chunks)
    mailbox = Mailbox(chunks, schedule, micros, rank)
    saved: dict[tuple[int, int], ChunkSaved] = {}
    starts: dict[int, Any] = {}
    closers = [SlotCloser(g, slot_ends) for g in gradients or ()]
    for step in schedule[rank]:
        part = step.chunk // pp
        chunk, packed = chunks[part], micros[step.micro]
        need, message = needed(step, total), sent(step, total)
        if gradients is not None:
            progress.enter(step.kind)
        given = mailbox.receive(need) if need is not None else None
        if step.kind == "forward":
            out, kept = chunk.forward(given, packed)
            if gradients is not None:
                saved[step.chunk, step.micro] = kept
            if step.chunk == total - 1:
                starts[step.micro] = objective(step.micro, out)
        else:
            assert gradients is not None
            dy = starts.pop(step.micro) if step.chunk == total - 1 else given
            out = chunk.backward(dy, saved.pop((step.chunk, step.micro)), packed, gradients[part].views())
            closers[part].after(step.micro + 1)
        if message is not None:
            mailbox.send(message, out)
    mailbox.close()
    for closer in closers:
        closer.after(len(micros))


class SlotCloser:
    """Closes data slots of one chunk's gradients as their micro-batches complete."""

    def __init__(self, gradients: Gradients, ends: Sequence[int]) -> None:
        self.gradients, self.ends = gradients, list(ends)
        self.after(0)

    def after(self, micros: int) -> None:
        while self.ends and self.ends[0] <= micros:
            self.gradients.close_slot()
            self.ends.pop(0)
