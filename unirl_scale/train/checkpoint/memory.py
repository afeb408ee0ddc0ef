"""Snapshots in memory that outlives the trainer: files on a memory file system, two buffers or more a rank.

    MEMORY_DIR/unirl-scale-UID-KEY/NODE/
        own-00003.0002.0             bytes of a shard: rank 3, incarnation 2, buffer 0
        own-00003.0002.0.json        its sealed record: there only while the bytes are whole
        own-00003.0002.stage-1       frozen weights, written once a version
        replica-00001.0002.0         the same of a rank of another node

A buffer's record is removed before its bytes change and put back when they are whole again, so what a killed
trainer leaves behind is never half a snapshot. The bytes are those of a safetensors shard on disk.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from unirl_scale.core.errors import CheckpointError
from unirl_scale.train.checkpoint.manifest import Manifest, manifest_bytes, read_manifest

_FILE = re.compile(r"(?:own|replica)-\d+\.(\d+)\.")
_RECORD = re.compile(r"(?:own|replica)-(\d+)\.(?:\d+)\.\d+\.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryRecord:
    """A whole buffer: one rank's part of a snapshot.

    Attributes:
        rank: whose state it is.
        manifest: its parts name files of `folder`.
    """

    folder: Path
    rank: int
    manifest: Manifest


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryFolder:
    """Where a run's snapshots lie on this host.

    Attributes:
        root: of the run, all nodes of this host (more than one only where a test says so).
        node: this node's name.
    """

    root: Path
    node: str

    @classmethod
    def of(cls, memory_dir: str, checkpoints: Path, node: str) -> MemoryFolder:
        """The folder of the run whose checkpoints are there."""
        key = hashlib.sha256(str(checkpoints.resolve()).encode()).hexdigest()[:12]
        return cls(root=Path(memory_dir) / f"unirl-scale-{os.getuid()}-{key}", node=node)

    @property
    def path(self) -> Path:
        return self.root / self.node

    def make(self) -> None:
        self.path.mkdir(parents=True, exist_ok=True, mode=0o700)

    def file(self, owner: str, rank: int, incarnation: int, slot: str) -> Path:
        """A buffer's path; `owner` is "own" or "replica"."""
        return self.path / f"{owner}-{rank:05d}.{incarnation:04d}.{slot}"

    def records(self, run: str) -> Iterator[MemoryRecord]:
        """Every whole buffer of the run on this host. Damaged records are passed over: without one, nobody
        can check the bytes."""
        for file in sorted(self.root.glob("*/*.json")):
            match = _RECORD.fullmatch(file.name)
            try:
                record = read_manifest(file.read_bytes(), str(file))
            except (CheckpointError, OSError):
                continue
            if match is not None and record.head.run == run:
                yield MemoryRecord(folder=file.parent, rank=int(match[1]), manifest=record)

    def clear_older(self, incarnation: int, but: tuple[int, int] | None = None) -> None:
        """Remove what earlier incarnations left on this host.

        Args:
            but: (step, incarnation) of a snapshot that stays.
        """
        for file in self.root.glob("*/*"):
            match = _FILE.match(file.name)
            if match is None or int(match[1]) >= incarnation:
                continue
            if but is None or int(match[1]) != but[1] or self._is_other(file, but):
                file.unlink(missing_ok=True)

    def _is_other(self, file: Path, but: tuple[int, int]) -> bool:
        """Whether a buffer or its record belongs to another snapshot; frozen weights belong to them all."""
        record = file if file.suffix == ".json" else file.with_name(file.name + ".json")
        if not _RECORD.fullmatch(record.name):
            return False
        try:
            return read_manifest(record.read_bytes(), str(record)).head.when != but
        except (CheckpointError, OSError):
            return True

    def clear(self) -> None:
        """Remove the run's buffers from this host; those in use live on for who has them mapped."""
        shutil.rmtree(self.root, ignore_errors=True)


class Buffer:
    """Host memory of fixed size that snapshots are copied to.

    Args:
        path: file on the memory file system; None for private memory, which dies with the process.
        pinned: page-locked, so that a GPU can copy to it by itself.

    Raises:
        CheckpointError: the memory file system has no room. Pages are reserved here: a write without room
            would kill the process later.
    """

    def __init__(self, path: Path | None, num_bytes: int, *, pinned: bool = False) -> None:
        self.path, self.num_bytes = path, num_bytes
        size = max(num_bytes, 1)
        if path is None:
            self.data: Tensor = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
            return
        _reserve(path, size)
        self.data = torch.from_file(str(path), shared=True, size=size, dtype=torch.uint8)
        if pinned:
            status = torch.cuda.cudart().cudaHostRegister(self.data.data_ptr(), size, 0)  # type: ignore[attr-defined]
            if int(status) != 0:
                raise CheckpointError(f"{path}: cannot be page-locked (CUDA error {int(status)})")

    def remove(self) -> None:
        """Unlink the file; the bytes live until nobody maps them."""
        if self.path is not None:
            self.path.unlink(missing_ok=True)


def _reserve(path: Path, size: int) -> None:
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_CREAT | os.O_RDWR, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, size)
    except OSError as error:
        path.unlink(missing_ok=True)
        free = shutil.disk_usage(path.parent).free
        reason = (error.strerror or type(error).__name__).lower()
        raise CheckpointError(
            f"checkpoint.memory_dir: got {path.parent} with {free} bytes free; a snapshot buffer needs "
            f"{size} ({reason}); hint: checkpoint.snapshot_every=0, or a larger tmpfs"
        ) from None
    finally:
        os.close(descriptor)


def write_record(path: Path, record: Manifest) -> None:
    """Put a record in place at once. Memory needs no fsync."""
    partial = path.with_name(path.name + ".part")
    partial.write_bytes(manifest_bytes(record))
    partial.replace(path)


def record_path(buffer: Buffer) -> Path:
    """Where a buffer's record lies."""
    assert buffer.path is not None, "private memory has no record"
    return buffer.path.with_name(buffer.path.name + ".json")
