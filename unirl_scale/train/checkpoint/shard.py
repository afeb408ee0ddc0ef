"""A shard: one safetensors file with one rank's entries, in memory and on disk alike.

The file is the safetensors format (8 bytes of header length, a JSON header, tensors end to end), so that any
tool opens it. What the format lacks, checksums, is kept beside it in a `Part`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from unirl_scale.core.errors import CheckpointError
from unirl_scale.train.checkpoint.checksum import CHUNK_BYTES
from unirl_scale.train.checkpoint.entries import Entry, Slab, Span

DTYPE_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}
ITEM_BYTES = {"F32": 4, "BF16": 2, "F16": 2}
_ALIGN = 4096  # of the first tensor: whole pages, so that direct I/O and page mapping stay possible


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """An entry and where its bytes lie in its file."""

    entry: Entry
    dtype: str
    offset: int

    @property
    def num_bytes(self) -> int:
        return self.entry.span.numel * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One file of a save.

    Attributes:
        file: name in the save's directory.
        num_bytes: its length.
        sums: checksum of each chunk_bytes of it.
        version: of a frozen part, which weights it holds; equal versions have equal bytes.
    """

    file: str
    num_bytes: int
    stored: tuple[Stored, ...]
    sums: tuple[str, ...]
    chunk_bytes: int = CHUNK_BYTES
    version: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardLayout:
    """Where a rank's slabs go in its file.

    Attributes:
        header: the first bytes.
        slabs: (slab, byte offset), in order.
        stored: every entry with its offset.
        num_bytes: length of the file.
    """

    header: bytes
    slabs: tuple[tuple[Slab, int], ...]
    stored: tuple[Stored, ...]
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardPlan:
    """The files of one rank.

    Attributes:
        train: what changes every step.
        frozen: what is fixed for a stage, or None where there is nothing.
        version: names the bits of the frozen part.
    """

    train: ShardLayout
    frozen: ShardLayout | None
    version: str


def plan_shards(slabs: Sequence[Slab], version: str) -> ShardPlan:
    """The files for the slabs that this rank writes."""
    written = [s for s in slabs if s.written]
    frozen = [s for s in written if s.group == "frozen"]
    return ShardPlan(
        train=layout_shard([s for s in written if s.group == "train"]),
        frozen=layout_shard(frozen) if frozen else None,
        version=version,
    )


def layout_shard(slabs: Sequence[Slab]) -> ShardLayout:
    """Lay the slabs end to end behind a safetensors header."""
    placed: list[tuple[Slab, int]] = []
    relative: list[Stored] = []
    position = 0
    for slab in slabs:
        placed.append((slab, position))
        name = DTYPE_NAMES[slab.tensor.dtype]
        for entry in slab.entries:
            relative.append(Stored(entry=entry, dtype=name, offset=position))
            position += relative[-1].num_bytes
    header = header_bytes(
        (s.entry.key, s.dtype, (s.entry.span.numel,), s.offset, s.offset + s.num_bytes) for s in relative
    )
    base = len(header)
    return ShardLayout(
        header=header,
        slabs=tuple((slab, base + at) for slab, at in placed),
        stored=tuple(Stored(entry=s.entry, dtype=s.dtype, offset=base + s.offset) for s in relative),
        num_bytes=base + position,
    )


def header_bytes(
    tensors: Iterator[tuple[str, str, tuple[int, ...], int, int]], metadata: Mapping[str, str] | None = None
) -> bytes:
    """A safetensors header for (name, dtype, shape, begin, end), offsets counted from its own end."""
    table: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    for name, dtype, shape, begin, end in tensors:
        table[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _ALIGN)  # the format allows trailing spaces
    return len(text).to_bytes(8, "little") + text


# ---- JSON -------------------------------------------------------------------------------------------
def part_to_plain(part: Part) -> dict[str, Any]:
    """Entries are grouped by role, kind and dtype, one short row each."""
    groups: dict[str, list[list[Any]]] = {}
    for s in part.stored:
        span = s.entry.span
        rows = groups.setdefault(f"{s.entry.role}/{s.entry.kind}/{s.dtype}", [])
        rows.append([span.name, span.leaf, span.start, span.stop, s.offset])
    return {
        "file": part.file,
        "bytes": part.num_bytes,
        "chunk_bytes": part.chunk_bytes,
        "version": part.version,
        "entries": groups,
        "sums": list(part.sums),
    }


def part_from_plain(plain: Mapping[str, Any]) -> Part:
    """The inverse of `part_to_plain`.

    Raises:
        CheckpointError: a field is missing or of the wrong type.
    """
    try:
        stored = []
        for group, rows in plain["entries"].items():
            role, kind, dtype = group.split("/")
            if dtype not in ITEM_BYTES:
                raise ValueError(f"dtype {dtype}")
            for name, leaf, start, stop, offset in rows:
                span = Span(name=name, leaf=leaf, start=start, stop=stop)
                stored.append(
                    Stored(entry=Entry(role=role, kind=kind, span=span), dtype=dtype, offset=offset)
                )
        return Part(
            file=plain["file"],
            num_bytes=plain["bytes"],
            stored=tuple(stored),
            sums=tuple(plain["sums"]),
            chunk_bytes=plain["chunk_bytes"],
            version=plain["version"],
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(
            f"part of a save: {type(error).__name__} {error}; its record is malformed"
        ) from None
