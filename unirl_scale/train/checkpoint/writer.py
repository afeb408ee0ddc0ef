"""The thread that makes one rank's part of a save durable, and on rank 0 the save as a whole.

    every rank    write its files, fsync, read them back from the device, compare, then leave its record
    rank 0        wait for all records, check that they tile the state, manifest by rename,
                  `latest`, retention

Ranks meet through files alone, so that a save needs no collective while training runs. A rank that fails
leaves `.failed`, a rank that dies leaves nothing, and rank 0 stops waiting at the deadline. A failed save is
renamed away and removed; a save's directory is made once, by rank 0, and never again.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from torch import Tensor

from unirl_scale.core.errors import CheckpointError
from unirl_scale.train.checkpoint.checksum import chunk_sum
from unirl_scale.train.checkpoint.manifest import Head, Manifest, manifest_bytes, merged, read_manifest
from unirl_scale.train.checkpoint.names import MANIFEST, SaveName
from unirl_scale.train.checkpoint.reading import ChunkFile
from unirl_scale.train.checkpoint.shard import Part
from unirl_scale.train.checkpoint.store import Store, fsync_folder, write_durably

# Called at labelled points of a save with the label; tests inject faults through it.
Probe = Callable[[str], None]
POINTS = (
    "before write",
    "mid write",
    "before fsync",
    "before record",
    "before manifest",
    "after manifest",
    "before retention",
)
# ENOENT: rank 0 has removed the save. EEXIST: the save was written before.
_PERMANENT = {
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EROFS,
    errno.EACCES,
    errno.EPERM,
    errno.ENAMETOOLONG,
    errno.ENOENT,
    errno.EEXIST,
}
_ATTEMPTS, _FIRST_PAUSE_S, _LONGEST_PAUSE_S = 8, 0.05, 2.0


def no_probe(label: str) -> None:
    """Nothing happens at any point."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileJob:
    """One file of a save.

    Attributes:
        part: its record, under its name in the save.
        data: its bytes, uint8; they stay as they are until the job has ended.
        same_as: a durable file with these bytes already, to link to instead of writing them again.
    """

    part: Part
    data: Tensor
    same_as: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveJob:
    """One rank's part of a save.

    Attributes:
        head: of the save.
        rank: of `head.writers`; rank 0 commits.
        deadline_s: from now, for all of it.
        keep: durable saves to keep.
    """

    head: Head
    files: Sequence[FileJob]
    rank: int
    deadline_s: float
    keep: int

    @property
    def name(self) -> SaveName:
        return SaveName(self.head.step, self.head.incarnation)


class GivenUpError(CheckpointError):
    """The deadline passed, or the job was cancelled."""


class SaveThread:
    """Runs one job; never raises into the training loop. Calls `release` once it reads no more of its data.

    Attributes:
        error: why it failed, "" while it has not.
        written: this rank's files are on the device and verified.
        durable: on rank 0, the save is committed; nothing that fails afterwards takes it back.
        noted: free for the owner of the thread.
    """

    def __init__(
        self, store: Store, job: SaveJob, probe: Probe = no_probe, release: Callable[[], None] = lambda: None
    ) -> None:
        self.store, self.job, self.error = store, job, ""
        self.written = self.durable = False
        self.seconds = 0.0
        self.noted = False
        self._probe, self._release = probe, release
        self._cancelled = threading.Event()
        self._started = time.monotonic()
        # A daemon: a disk that never answers must not keep the process alive.
        self._thread = threading.Thread(target=self._run, name=f"save {job.name}", daemon=True)
        self._thread.start()

    @property
    def running(self) -> bool:
        return self._thread.is_alive()

    @property
    def left_s(self) -> float:
        """Seconds until the deadline."""
        return self._started + self.job.deadline_s - time.monotonic()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Whether it ended within the timeout (None: within its deadline)."""
        self._thread.join(max(0.0, self.left_s if timeout_s is None else timeout_s))
        return not self.running

    def cancel(self) -> None:
        """Give up: nothing of it is committed from now on; the thread cleans up when its disk answers."""
        self._cancelled.set()

    # ---- the thread -----------------------------------------------------------------------------------
    def _run(self) -> None:
        try:
            try:
                self._write()
            finally:
                self._release()
            self.written = True
            if self.job.rank == 0:
                self._commit()
        except Exception as error:  # a bug here must not end the training, nor look like a save
            self.error = _words(error)
            if not self.durable:
                self._clean_up()
        self.seconds = time.monotonic() - self._started

    def _write(self) -> None:
        folder = self.store.folder(self.job.name)
        if self.job.rank == 0:
            self._retrying(lambda: folder.mkdir(parents=True))
        else:
            self._wait_for_folder(folder)
        self._probe("before write")
        for file in self.job.files:
            self._retrying(partial(self._place, folder / file.part.file, file))
        fsync_folder(folder)
        self._probe("before record")
        self._check()
        record = Manifest(head=self.job.head, parts=tuple(f.part for f in self.job.files))
        self._retrying(lambda: write_durably(folder / record_name(self.job.rank), manifest_bytes(record)))

    def _wait_for_folder(self, folder: Path) -> None:
        """Rank 0 alone makes the folder, so that nobody makes it again once rank 0 removed it."""
        pause = _FIRST_PAUSE_S
        while not folder.exists():
            if (reason := self.store.failure(self.job.name)) is not None:
                raise GivenUpError(f"rank 0: {reason}")
            self._check()
            self._cancelled.wait(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)
        if (folder / MANIFEST).exists():
            raise CheckpointError(f"{folder}: is durable already; a save is never written twice")

    def _retrying(self, action: Callable[[], None]) -> None:
        """Try again after an error that may pass, with growing pauses, within the deadline."""
        pause = _FIRST_PAUSE_S
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                return action()
            except OSError as error:
                hopeless = error.errno in _PERMANENT or self.left_s < pause or self._cancelled.is_set()
                if hopeless or attempt == _ATTEMPTS:
                    raise
            self._cancelled.wait(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)
        return None

    def _place(self, path: Path, file: FileJob) -> None:
        if file.same_as is not None:
            with suppress(OSError):  # a file system without links, or the other save is gone: write it
                path.unlink(missing_ok=True)
                path.hardlink_to(file.same_as)
                return
        self._write_file(path, file.part, file.data)

    def _write_file(self, path: Path, part: Part, data: Tensor) -> None:
        with path.open("wb", buffering=0) as file:
            view = memoryview(data.numpy())
            for start in range(0, part.num_bytes, part.chunk_bytes):
                self._check()
                _write_all(file.fileno(), view[start : min(start + part.chunk_bytes, part.num_bytes)])
                self._probe("mid write")
            self._probe("before fsync")
            os.fsync(file.fileno())
            # Out of the page cache, so that the check reads what the device has, where the file system obeys.
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        with ChunkFile(path, part, mapped=False) as written:
            for chunk, expected in enumerate(part.sums):
                self._check()
                if chunk_sum(written.chunk(chunk)) != expected:
                    raise OSError(errno.EIO, f"chunk {chunk} reads back other than it was written", str(path))

    def _check(self) -> None:
        if self._cancelled.is_set():
            raise GivenUpError("cancelled")
        if self.left_s < 0:
            raise GivenUpError(f"not done within {self.job.deadline_s:g} s")

    def _clean_up(self) -> None:
        """Free the space at once; rank 0 removes the whole save, another rank its files."""
        name, folder = self.job.name, self.store.folder(self.job.name)
        # Best effort on a disk that just failed: rank 0's deadline, and the next start, cover the rest.
        with suppress(OSError):
            if (folder / MANIFEST).exists():
                return
            if self.job.rank == 0:
                self.store.remove(name)
                self.store.mark_failed(name, self.error)
                return
            for path in folder.glob(f"{rank_name(self.job.rank)}.*"):
                path.unlink(missing_ok=True)
            (folder / failed_name(self.job.rank)).write_text(self.error)

    # ---- rank 0 ---------------------------------------------------------------------------------------
    def _commit(self) -> None:
        name, head = self.job.name, self.job.head
        folder = self.store.folder(name)
        manifest = merged(self._records(folder))
        self._probe("before manifest")
        self._check()
        self.store.require_owner(head.incarnation)
        self._retrying(lambda: self.store.publish(name, manifest))
        self.durable = True
        self._probe("after manifest")
        self._retrying(lambda: self.store.point_latest(name))
        for rank in range(head.writers):
            (folder / record_name(rank)).unlink(missing_ok=True)
        self._probe("before retention")
        self.store.prune(self.job.keep, head.incarnation)

    def _records(self, folder: Path) -> list[Manifest]:
        """All ranks' records, once they are there.

        Raises:
            CheckpointError: a rank failed, or some are missing at the deadline; names them.
        """
        missing, found, pause = set(range(self.job.head.writers)), {}, _FIRST_PAUSE_S
        while missing:
            for rank in sorted(missing):
                path = folder / record_name(rank)
                if path.exists():
                    found[rank] = read_manifest(path.read_bytes(), str(path))
                elif (failed := folder / failed_name(rank)).exists():
                    raise CheckpointError(f"rank {rank}: {failed.read_text()}")
            missing -= found.keys()
            if missing:
                if self.left_s < 0:
                    raise GivenUpError(
                        f"ranks {sorted(missing)[:8]} not done within {self.job.deadline_s:g} s"
                    )
                self._check()
                self._cancelled.wait(pause)
                pause = min(2 * pause, _LONGEST_PAUSE_S)
        return [found[rank] for rank in sorted(found)]


def rank_name(rank: int) -> str:
    return f"rank-{rank:05d}"


def record_name(rank: int) -> str:
    return f"{rank_name(rank)}.json"


def failed_name(rank: int) -> str:
    return f"{rank_name(rank)}.failed"


def shard_name(rank: int, group: str) -> str:
    return f"{rank_name(rank)}.{group}.safetensors"


def _write_all(descriptor: int, view: memoryview) -> None:
    while view:
        view = view[os.write(descriptor, view) :]


def _words(error: Exception) -> str:
    if isinstance(error, OSError):
        where = f" ({error.filename})" if error.filename else ""
        return f"{(error.strerror or type(error).__name__).lower()}{where}"
    return str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
