"""How the samples of a minibatch become data slots and micro-batches. Plain Python, the same on every
rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from unirl_scale.comm.tree import split_contiguous


@dataclass(frozen=True, slots=True)
class Sample:
    """Token ids of one sample."""

    prompt: tuple[int, ...]
    response: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotPlan:
    """What one data-parallel rank runs.

    Attributes:
        slots: absolute slots of the rank.
        micros: sample numbers of each micro-batch, in order; a micro-batch never crosses a slot.
        slot_ends: micro-batches before the end of each slot.
    """

    slots: range
    micros: tuple[tuple[int, ...], ...]
    slot_ends: tuple[int, ...]

    @property
    def completing_micro(self) -> int | None:
        """The micro-batch whose backward completes every gradient of the rank; None when its last slot has
        none, so that no backward does."""
        before_last = (0, *self.slot_ends)[-2] if self.slot_ends else 0
        return len(self.micros) - 1 if before_last < len(self.micros) else None

    @property
    def samples(self) -> list[int]:
        return [i for micro in self.micros for i in micro]


def plan_slots(samples: Sequence[Sample], slots: int, dp: int, dp_rank: int, micro_batch: int) -> SlotPlan:
    """Slot s of D holds the s-th contiguous part of the minibatch. A sample with an empty response has no
    loss: it keeps its place in its slot and is never run, so its absence changes no bit of the others."""
    parts = split_contiguous(len(samples), slots)
    mine = split_contiguous(slots, dp)[dp_rank]
    micros: list[tuple[int, ...]] = []
    ends = []
    for slot in mine:
        live = [i for i in parts[slot] if samples[i].response]
        micros += [tuple(live[i : i + micro_batch]) for i in range(0, len(live), micro_batch)]
        ends.append(len(micros))
    return SlotPlan(slots=mine, micros=tuple(micros), slot_ends=tuple(ends))
