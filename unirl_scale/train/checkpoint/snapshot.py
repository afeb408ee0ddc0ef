"""Snapshots of one rank: copied off the training thread, summed, replicated, kept where a crash leaves them.

`take` starts a copy and returns; the state must then stay as it is until `fence`, which the loop calls before
the first gradient reduction of the next step. A rank that comes out of that reduction therefore knows that
*all* ranks hold the snapshot of the step before, replicas included, and may overwrite the one before that:
two buffers suffice, and a rank that dies at any moment leaves a snapshot that every other rank has as well.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from unirl_scale.train.checkpoint.filling import DeviceCopy, fill
from unirl_scale.train.checkpoint.keeping import Keeping
from unirl_scale.train.checkpoint.manifest import Head, Manifest
from unirl_scale.train.checkpoint.memory import Buffer, MemoryFolder, record_path, write_record
from unirl_scale.train.checkpoint.shard import Part, ShardLayout, ShardPlan


@dataclass(slots=True)
class Slot:
    """A place for one snapshot.

    Attributes:
        readers: saves that read from it; it is not overwritten meanwhile.
    """

    number: int
    buffer: Buffer | None = None
    record: Manifest | None = None
    frozen: Buffer | None = None
    readers: int = 0


@dataclass(slots=True)
class Cost:
    """What the newest snapshot cost this rank.

    Attributes:
        start_s: training thread, to begin it.
        wait_s: training thread, at the fence.
        copy_s, replica_s: background, checksums included.
    """

    start_s: float = 0.0
    wait_s: float = 0.0
    copy_s: float = 0.0
    replica_s: float = 0.0
    num_bytes: int = 0
    replica_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """A whole snapshot of this rank; its bytes hold still until `release`."""

    record: Manifest
    data: tuple[Tensor, ...]
    release: Callable[[], None]


@dataclass(slots=True, kw_only=True)
class _Job:
    head: Head
    slot: Slot
    layouts: list[tuple[ShardLayout, Buffer]]  # train, and frozen when its version is new
    version: str
    then: Callable[[Snapshot], None] | None
    device_copy: DeviceCopy | None = None


@dataclass(frozen=True, slots=True)
class _Frozen:
    version: str
    buffer: Buffer
    part: Part


class Snapshots:
    """Buffers of one rank, and the thread that fills them.

    Args:
        folder: where buffers outlive the process; None for private memory, which only serves saves.
        slots: how many snapshots there is room for; with one, the newest is overwritten.
        keeping: where replicas go and come from, or None.
        device: of the training state.
    """

    def __init__(
        self,
        folder: MemoryFolder | None,
        rank: int,
        incarnation: int,
        *,
        slots: int,
        device: torch.device,
        keeping: Keeping | None = None,
    ) -> None:
        self.folder, self.rank, self.incarnation, self.keeping = folder, rank, incarnation, keeping
        self.cost, self.error = Cost(), ""
        self._slots = [Slot(number=n) for n in range(slots)]
        self._newest: Slot | None = None
        self._frozen: _Frozen | None = None
        self._frozen_buffers: list[Buffer] = []
        self._thread: threading.Thread | None = None
        self._job: _Job | None = None
        self._lock = threading.Lock()
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        if folder is not None:
            folder.make()

    # ---- the training thread --------------------------------------------------------------------------
    def take(
        self,
        head: Head,
        plan: ShardPlan,
        then: Callable[[Snapshot], None] | None = None,
    ) -> bool:
        """Start a snapshot; the one before must have been fenced.

        Args:
            plan: what this rank writes, and where in its files.
            then: called in the background with the finished snapshot, which it must release.

        Returns:
            False when saves that do not end hold every buffer.
        """
        started = time.perf_counter()
        assert self._job is None, "fence() comes before take()"
        slot = self._free_slot()
        if slot is None:
            return False
        self._forget(slot)
        self.cost = Cost()
        job = self._prepare(head, plan, slot, then)
        if self._stream is not None:
            job.device_copy = DeviceCopy(self._stream)
            job.device_copy.start([(layout, buffer.data) for layout, buffer in job.layouts])
        self._job = job
        self._thread = threading.Thread(target=self._run, args=(job,), name="snapshot", daemon=True)
        self._thread.start()
        self.cost.start_s = time.perf_counter() - started
        return True

    def fence(self, timeout_s: float | None = None) -> bool:
        """Wait until the running snapshot is whole here and at its keeper; the state may then change.

        Returns:
            False when it did not get there within the timeout.
        """
        if self._thread is None:
            return True
        started = time.perf_counter()
        self._thread.join(timeout_s)
        self.cost.wait_s += time.perf_counter() - started
        if self._thread.is_alive():
            return False
        self._thread, self._job = None, None
        return True

    @property
    def fenced(self) -> bool:
        return self._thread is None

    def whole(self) -> list[Snapshot]:
        """Every whole snapshot; the caller must release each."""
        with self._lock:
            return [self._snapshot(slot) for slot in self._slots if slot.record is not None]

    # ---- slots ----------------------------------------------------------------------------------------
    def _free_slot(self) -> Slot | None:
        with self._lock:
            free = [s for s in self._slots if s.readers == 0]
            older = [s for s in free if s is not self._newest]
            # The newest is spared as long as there is another place to write to.
            candidates = older or (free if len(self._slots) == 1 else [])
            return candidates[0] if candidates else None

    def _forget(self, slot: Slot) -> None:
        """Its bytes are about to change: take the record away first."""
        with self._lock:
            if self._newest is slot:
                self._newest = None
            slot.record = None
        if slot.buffer is not None and slot.buffer.path is not None:
            record_path(slot.buffer).unlink(missing_ok=True)

    def _snapshot(self, slot: Slot) -> Snapshot:
        """Call with the lock held."""
        assert slot.record is not None and slot.buffer is not None
        slot.readers += 1

        def release() -> None:
            with self._lock:
                slot.readers -= 1

        frozen = (slot.frozen.data,) if slot.frozen is not None else ()
        return Snapshot(record=slot.record, data=(slot.buffer.data, *frozen), release=release)

    def _prepare(
        self, head: Head, plan: ShardPlan, slot: Slot, then: Callable[[Snapshot], None] | None
    ) -> _Job:
        train, frozen = plan.train, plan.frozen
        if slot.buffer is None or slot.buffer.num_bytes != train.num_bytes:
            if slot.buffer is not None:
                slot.buffer.remove()
            slot.buffer = self._allocate(str(slot.number), train.num_bytes)
        layouts = [(train, slot.buffer)]
        if frozen is None:
            slot.frozen = None
        elif self._frozen is not None and self._frozen.version == plan.version:
            slot.frozen = self._frozen.buffer
        else:
            slot.frozen = self._allocate(plan.version, frozen.num_bytes)
            self._frozen_buffers.append(slot.frozen)
            layouts.append((frozen, slot.frozen))
        return _Job(head=head, slot=slot, layouts=layouts, version=plan.version, then=then)

    def _allocate(self, name: str, num_bytes: int) -> Buffer:
        path = self.folder.file("own", self.rank, self.incarnation, name) if self.folder else None
        return Buffer(path, num_bytes, pinned=self._stream is not None)

    # ---- the background thread ------------------------------------------------------------------------
    def _run(self, job: _Job) -> None:
        self.error = ""
        try:
            self._fill(job)
            self._drop_unused_frozen()
            if job.then is not None:
                with self._lock:
                    snapshot = self._snapshot(job.slot)
                job.then(snapshot)
            if self.keeping is not None:
                self._replicate(job)
        except Exception as error:  # training goes on without this snapshot, loudly
            self.error = f"snapshot of step {job.head.step}: {type(error).__name__}: {error}"

    def _fill(self, job: _Job) -> None:
        started = time.perf_counter()
        pairs = [(layout, buffer.data) for layout, buffer in job.layouts]
        if job.device_copy is not None:
            sums = job.device_copy.finish(pairs)
        else:
            sums = [fill(layout, data) for layout, data in pairs]
        parts = [
            Part(
                file=buffer.path.name if buffer.path else "",
                num_bytes=layout.num_bytes,
                stored=layout.stored,
                sums=tuple(s),
                version=version,
            )
            for (layout, buffer), s, version in zip(job.layouts, sums, ("", job.version))
        ]
        if len(parts) == 2:
            self._frozen = _Frozen(job.version, job.layouts[1][1], parts[1])
        elif job.slot.frozen is not None:
            assert self._frozen is not None
            parts.append(self._frozen.part)
        record = Manifest(head=job.head, parts=tuple(parts))
        assert job.slot.buffer is not None
        if job.slot.buffer.path is not None:
            write_record(record_path(job.slot.buffer), record)
        with self._lock:
            job.slot.record, self._newest = record, job.slot
        self.cost.copy_s = time.perf_counter() - started
        self.cost.num_bytes = sum(layout.num_bytes for layout, _ in job.layouts)

    def _drop_unused_frozen(self) -> None:
        """Frozen weights of a stage that no snapshot refers to any more."""
        used = [slot.frozen for slot in self._slots]
        for buffer in [b for b in self._frozen_buffers if not any(b is u for u in used)]:
            buffer.remove()
            self._frozen_buffers.remove(buffer)

    def _replicate(self, job: _Job) -> None:
        started = time.perf_counter()
        assert self.keeping is not None and job.slot.record is not None and job.slot.buffer is not None
        frozen = job.slot.frozen
        data = [job.slot.buffer.data, *([frozen.data] if frozen is not None else [])]
        self.cost.replica_bytes = self.keeping.replicate(job.slot.record, data)
        self.cost.replica_s = time.perf_counter() - started
