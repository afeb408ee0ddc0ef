"""Byte ranges of a save -> tensors of any layout.

Each rank looks up only what it holds, reads only the chunks that hold it, and checks every chunk before it
copies from it. Memory beyond the state itself is one chunk.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from unirl_scale.core.errors import CheckpointError
from unirl_scale.train.checkpoint.checksum import chunk_sum
from unirl_scale.train.checkpoint.entries import Entry, Slab
from unirl_scale.train.checkpoint.manifest import Manifest, stored_by_leaf
from unirl_scale.train.checkpoint.shard import DTYPE_NAMES, ITEM_BYTES, Part, Stored


@dataclass(frozen=True, slots=True)
class Copy:
    """Bytes offset .. offset + len(target) of a part go to `target`, uint8."""

    part: Part
    offset: int
    target: Tensor


@dataclass(frozen=True, slots=True)
class ChunkRead:
    """One chunk of a part, and what of it goes where: (first byte in the chunk, target)."""

    part: Part
    chunk: int
    copies: tuple[tuple[int, Tensor], ...]

    @property
    def start(self) -> int:
        return self.chunk * self.part.chunk_bytes

    @property
    def num_bytes(self) -> int:
        return min(self.part.chunk_bytes, self.part.num_bytes - self.start)


# What `stored_by_leaf` gives.
Index = Mapping[tuple[str, str, str, int], Sequence[tuple[Stored, Part]]]


class DamagedError(CheckpointError):
    """Bytes that do not match their checksum, or are not there; `part` is the file."""

    def __init__(self, part: str, message: str) -> None:
        super().__init__(message)
        self.part = part


# ---- plan ---------------------------------------------------------------------------------------------
def plan_copies(manifest: Manifest, slabs: Iterable[Slab]) -> list[Copy]:
    """What to read for these slabs, whatever layout the save has.

    Raises:
        CheckpointError: the save lacks a needed range or holds it in another dtype.
    """
    return copies_from(stored_by_leaf(manifest), slabs)


def copies_from(index: Index, slabs: Iterable[Slab]) -> list[Copy]:
    """`plan_copies` for a caller that asks often."""
    copies: list[Copy] = []
    for slab in slabs:
        target = slab.tensor.view(torch.uint8)
        item, position, fresh = ITEM_BYTES[DTYPE_NAMES[slab.tensor.dtype]], 0, len(copies)
        for entry in slab.entries:
            for stored, part, first, count in _sources(index, entry, DTYPE_NAMES[slab.tensor.dtype]):
                offset = stored.offset + first * item
                piece = Copy(part, offset, target[position : position + count * item])
                _append(copies, piece, fresh, target, position)
                position += count * item
    return copies


def _sources(index: Index, entry: Entry, dtype: str) -> Iterator[tuple[Stored, Part, int, int]]:
    """(where, file, first element inside it, elements) that make up an entry, in order."""
    span, position = entry.span, entry.span.start
    for stored, part in index.get((entry.role, entry.kind, span.name, span.leaf), []):
        held = stored.entry.span
        start, stop = max(held.start, position), min(held.stop, span.stop)
        if start >= stop:
            continue
        if stored.dtype != dtype:
            raise CheckpointError(
                f"{entry.key}: got {stored.dtype} in the save; needs {dtype}; hint: the saved run's precision"
            )
        if start > position:
            break
        yield stored, part, start - held.start, stop - start
        position = stop
    if position < span.stop:
        raise CheckpointError(f"{entry.key}: the save has no elements {position}..{span.stop - 1}")


def _append(copies: list[Copy], piece: Copy, fresh: int, target: Tensor, position: int) -> None:
    """Join a copy to the one before when both its ends continue that one."""
    if len(copies) > fresh:
        last = copies[-1]
        if last.part is piece.part and last.offset + last.target.numel() == piece.offset:
            start = position - last.target.numel()
            copies[-1] = Copy(last.part, last.offset, target[start : position + piece.target.numel()])
            return
    copies.append(piece)


def chunk_reads(copies: Sequence[Copy]) -> list[ChunkRead]:
    """The copies cut at chunk borders, one read a chunk, in file order."""
    found: dict[tuple[str, int], tuple[Part, list[tuple[int, Tensor]]]] = {}
    for copy in copies:
        size, done = copy.part.chunk_bytes, 0
        while done < copy.target.numel():
            chunk, within = divmod(copy.offset + done, size)
            count = min(size - within, copy.target.numel() - done)
            row = found.setdefault((copy.part.file, chunk), (copy.part, []))
            row[1].append((within, copy.target[done : done + count]))
            done += count
    return [
        ChunkRead(part, chunk, tuple(rows)) for (_, chunk), (part, rows) in sorted(found.items(), key=_order)
    ]


def _order(item: tuple[tuple[str, int], object]) -> tuple[str, int]:
    return item[0]


def deliver(read: ChunkRead, data: Tensor, where: str) -> None:
    """Check a chunk's bytes and copy from them.

    Raises:
        DamagedError: they are not what was saved; `where` names the file.
    """
    if data.numel() != read.num_bytes or chunk_sum(data) != read.part.sums[read.chunk]:
        raise DamagedError(
            read.part.file,
            f"{where}: damaged in bytes {read.start}..{read.start + read.num_bytes - 1} (checksum differs)",
        )
    for first, target in read.copies:
        target.copy_(data[first : first + target.numel()])


# ---- files --------------------------------------------------------------------------------------------
class ChunkFile:
    """Reads chunks of one file; use as a context manager.

    Args:
        mapped: map the file (memory file systems, whose pages need no second copy) instead of reading it.
    """

    def __init__(self, path: Path, part: Part, *, mapped: bool) -> None:
        self.path, self._part = path, part
        try:
            self._descriptor = os.open(path, os.O_RDONLY)
            size = os.fstat(self._descriptor).st_size
        except OSError as error:
            raise DamagedError(part.file, f"{path}: {_reason(error)}") from None
        if size < part.num_bytes:
            os.close(self._descriptor)
            raise DamagedError(part.file, f"{path}: truncated, {size} of {part.num_bytes} bytes")
        length = part.num_bytes if mapped else min(part.chunk_bytes, part.num_bytes)
        self._mapped = mapped
        if mapped:
            self._bytes = torch.from_file(str(path), shared=False, size=length, dtype=torch.uint8)
        else:
            self._bytes = torch.empty(length, dtype=torch.uint8)

    def __enter__(self) -> ChunkFile:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)

    def chunk(self, number: int) -> Tensor:
        """uint8 bytes of a chunk, valid until the next call.

        Raises:
            DamagedError: the file cannot be read there.
        """
        start = number * self._part.chunk_bytes
        count = min(self._part.chunk_bytes, self._part.num_bytes - start)
        if self._mapped:
            return self._bytes[start : start + count]
        try:
            got = read_fully(self._descriptor, memoryview(self._bytes.numpy())[:count], start)
        except OSError as error:
            raise DamagedError(self._part.file, f"{self.path}: {_reason(error)}") from None
        return self._bytes[:got]


def _reason(error: OSError) -> str:
    return (error.strerror or type(error).__name__).lower()


def read_fully(descriptor: int, into: memoryview, offset: int) -> int:
    """Fill `into` from a file; fewer bytes only at its end."""
    done = 0
    while done < len(into):
        count = os.preadv(descriptor, [into[done:]], offset + done)
        if count == 0:
            break
        done += count
    return done


def read_files(reads: Sequence[ChunkRead], path_of: Callable[[Part], Path], *, mapped: bool) -> int:
    """Carry out reads of files this rank can open; returns the bytes read.

    Raises:
        DamagedError: the first file that is not what was saved.
    """
    total, position = 0, 0
    while position < len(reads):
        part = reads[position].part
        with ChunkFile(path_of(part), part, mapped=mapped) as file:
            while position < len(reads) and reads[position].part is part:
                deliver(reads[position], file.chunk(reads[position].chunk), str(file.path))
                total += reads[position].num_bytes
                position += 1
    return total


def check_file(path: Path, part: Part) -> None:
    """Read a whole file and compare every chunk with its checksum.

    Raises:
        DamagedError: the first chunk that differs.
    """
    with ChunkFile(path, part, mapped=False) as file:
        for chunk in range(len(part.sums)):
            deliver(ChunkRead(part, chunk, ()), file.chunk(chunk), str(path))
