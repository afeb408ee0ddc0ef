"""The durable saves of one rank: at most one at a time, and what became of each."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from unirl_scale.comm.groups import Group
from unirl_scale.core.config import CheckpointConfig
from unirl_scale.train.checkpoint.session import Session
from unirl_scale.train.checkpoint.snapshot import Snapshot
from unirl_scale.train.checkpoint.store import Store, write_durably
from unirl_scale.train.checkpoint.writer import FileJob, Probe, SaveJob, SaveThread, shard_name

_GROUPS = ("train", "frozen")
_POLL_S = 0.02


class Saves:
    """Starts saves, waits for them and counts them.

    Attributes:
        requested_step: of the newest save that was asked for; -1 = none.
        durable_step: of the newest one that is committed, known to rank 0.
        failed: saves that were skipped or given up.
        warnings: for the user, until someone takes them.
    """

    def __init__(self, cfg: CheckpointConfig, session: Session, probe: Probe) -> None:
        self.requested_step = self.durable_step = -1
        self.failed = 0
        self.warnings: list[str] = []
        self._cfg, self._session, self._probe = cfg, session, probe
        self._thread: SaveThread | None = None
        self._frozen_files: dict[str, Path] = {}

    def start(self, snapshot: Snapshot, deadline_s: float | None = None) -> None:
        """Make a snapshot durable in the background; it is released when nothing reads from it any more."""
        files = []
        for part, data, group in zip(snapshot.record.parts, snapshot.data, _GROUPS):
            named = replace(part, file=shard_name(self._session.rank, group))
            files.append(FileJob(part=named, data=data, same_as=self._frozen_files.get(part.version)))
        job = SaveJob(
            head=snapshot.record.head,
            files=files,
            rank=self._session.rank,
            deadline_s=self._cfg.deadline_s if deadline_s is None else deadline_s,
            keep=self._cfg.keep,
        )
        self._thread = SaveThread(self._session.store, job, self._probe, release=snapshot.release)

    def all_free(self, world: Group, step: int) -> bool:
        """Whether every rank can start a save; if not, it is skipped, loudly. Collective."""
        busy = self._thread is not None and self._thread.running
        mine = self._thread.job.head.step if busy and self._thread is not None else -1
        at_work = world.all_gather_object(mine)
        slow = [rank for rank, other in enumerate(at_work) if other >= 0]
        if slow:
            self.failed += 1
            older = at_work[slow[0]]
            self.warnings.append(
                f"checkpoint of step {step} skipped: ranks {slow[:8]} still write that of step {older}"
            )
        self.note_ended()
        return not slow

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for the save in flight, at most until its deadline, when it is given up.

        Returns:
            Whether it was written here, and on rank 0 committed; True when there is none.
        """
        thread = self._thread
        if thread is not None and not thread.wait(timeout_s):
            thread.cancel()
        self.note_ended()
        if thread is None:
            return True
        return thread.durable if self._session.rank == 0 else thread.written

    def cancel(self) -> None:
        """Commit nothing more."""
        if self._thread is not None:
            self._thread.cancel()

    def note_ended(self) -> None:
        """Take notice of a save that ended, or that ran past its deadline."""
        thread = self._thread
        if thread is None or thread.noted or (thread.running and thread.left_s > 0):
            return
        thread.noted = True
        job = thread.job
        if thread.written:
            folder = self._session.store.folder(job.name)
            self._frozen_files = {f.part.version: folder / f.part.file for f in job.files if f.part.version}
        if thread.durable:
            self.durable_step = job.head.step
        error = thread.error or (f"not done within {job.deadline_s:g} s" if thread.running else "")
        if error:
            thread.cancel()
            self.failed += not thread.durable
            what = "durable, but" if thread.durable else "FAILED, training goes on:"
            self.warnings.append(f"checkpoint of step {job.head.step} {what} {error}")


# ---- leaving ------------------------------------------------------------------------------------------
def agree_by_files(
    store: Store, incarnation: int, rank: int, writers: int, steps: Sequence[int], deadline_s: float
) -> int | None:
    """The newest step that every rank has, told through files: ranks that must go make no collectives.

    Args:
        steps: that this rank has whole snapshots of.

    Returns:
        None when some ranks did not answer in time, or there is no common step.
    """
    folder = store.path / f"leaving.{incarnation:04d}"
    folder.mkdir(parents=True, exist_ok=True)
    write_durably(folder / f"rank-{rank:05d}", " ".join(map(str, steps)).encode())
    end = time.monotonic() + deadline_s
    common, missing = set(steps), set(range(writers)) - {rank}
    while missing and time.monotonic() < end:
        for other in sorted(missing):
            with suppress(FileNotFoundError):
                common &= {int(s) for s in (folder / f"rank-{other:05d}").read_text().split()}
                missing.remove(other)
        if missing:
            time.sleep(_POLL_S)
    return max(common) if common and not missing else None
