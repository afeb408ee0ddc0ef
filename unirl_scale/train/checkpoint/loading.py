"""A source -> the state of every rank, whatever the layouts; collective.

A rank opens what its node can open. The rest it asks for, by chunk: every rank derives from the requests who
serves whom, and bytes move in bounded rounds. A damaged place is dropped and the next one tried; when a file
has no place left, every rank raises, together.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from unirl_scale.comm.groups import Group
from unirl_scale.core.errors import CheckpointError
from unirl_scale.train.checkpoint.entries import Slab
from unirl_scale.train.checkpoint.reading import (
    ChunkFile,
    ChunkRead,
    DamagedError,
    chunk_reads,
    deliver,
    plan_copies,
    read_files,
)
from unirl_scale.train.checkpoint.session import Session
from unirl_scale.train.checkpoint.shard import Part
from unirl_scale.train.checkpoint.sources import Site, Source, without

_ROUND_CHUNKS = 16  # that one rank asks for in a round


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """Bytes this rank read: from its own node or shared storage, and from ranks of other nodes."""

    near_bytes: int
    far_bytes: int
    complaints: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Request:
    """A chunk that a rank wants from a rank that can open it."""

    file: str
    chunk: int
    num_bytes: int
    server: int
    site: Site


class Loader:
    """Loads slabs from one source.

    Args:
        world: all ranks of the job, each of which calls `load`.
        mapped: the files lie in memory.
    """

    def __init__(self, session: Session, world: Group, source: Source, *, mapped: bool) -> None:
        self.session, self.world, self.source, self.mapped = session, world, source, mapped
        self.node = session.nodes[session.rank]
        self.near_bytes = self.far_bytes = 0
        self.complaints: list[str] = []

    def load(self, slabs: Sequence[Slab]) -> Loaded:
        """Fill the slabs; collective.

        Raises:
            CheckpointError: on every rank, when some rank cannot have what it needs.
        """
        error, left = "", []
        try:
            left = chunk_reads(plan_copies(self.source.manifest, slabs))
        except CheckpointError as failure:
            error = str(failure)
        self._agree(error)
        while self._anyone(left):
            left, bad = self._near(left)
            self._drop(bad)
            left, bad = self._far(left)
            self._drop(bad)
            self._agree(self._hopeless(left))
        return Loaded(near_bytes=self.near_bytes, far_bytes=self.far_bytes, complaints=tuple(self.complaints))

    # ---- agreement ------------------------------------------------------------------------------------
    def _agree(self, error: str) -> None:
        errors = [(rank, e) for rank, e in enumerate(self.world.all_gather_object(error)) if e]
        if errors:
            rank, text = errors[0]
            raise CheckpointError(f"{self.source.what}: rank {rank}: {text}")

    def _anyone(self, left: Sequence[ChunkRead]) -> bool:
        return any(self.world.all_gather_object(len(left)))

    def _drop(self, bad: list[tuple[str, Site, str]]) -> None:
        """Everyone forgets the places that anyone found damaged."""
        for held in self.world.all_gather_object(bad):
            self.source = without(self.source, [(name, site) for name, site, _ in held])
            self.complaints += [text for _, _, text in held]

    def _hopeless(self, left: Sequence[ChunkRead]) -> str:
        for read in left:
            if not self.source.sites[read.part.file]:
                return self.complaints[-1] if self.complaints else f"{read.part.file} is nowhere"
        return ""

    # ---- what this node can open ----------------------------------------------------------------------
    def _near(self, reads: Sequence[ChunkRead]) -> tuple[list[ChunkRead], list[tuple[str, Site, str]]]:
        """Read files of this node or of shared storage; (what is left, damaged places)."""
        left: list[ChunkRead] = []
        bad: list[tuple[str, Site, str]] = []
        for part, group in _by_part(reads):
            site = self._openable(part)
            if site is None:
                left += group
                continue
            try:
                self.near_bytes += read_files(group, lambda _, at=site: at.path, mapped=self.mapped)
            except DamagedError as error:
                bad.append((part.file, site, str(error)))
                left += group
        return left, bad

    def _openable(self, part: Part) -> Site | None:
        return next((s for s in self.source.sites[part.file] if s.node in ("", self.node)), None)

    # ---- what other nodes hold ------------------------------------------------------------------------
    def _far(self, reads: Sequence[ChunkRead]) -> tuple[list[ChunkRead], list[tuple[str, Site, str]]]:
        """Ask the other nodes for the rest; (what is left, damaged places). Collective."""
        wanted = {
            (r.part.file, r.chunk): r
            for r in reads
            if self._openable(r.part) is None and self.source.sites[r.part.file]
        }
        asked = self.world.all_gather_object([self._request(r) for r in wanted.values()])
        bad: dict[tuple[str, Site], str] = {}
        done: set[tuple[str, int]] = set()
        for turn in range(0, max(len(a) for a in asked), _ROUND_CHUNKS):
            for request, data in self._round([a[turn : turn + _ROUND_CHUNKS] for a in asked]):
                try:
                    key = (request.file, request.chunk)
                    deliver(wanted[key], data, f"{request.site.path} on {request.site.node}")
                    self.far_bytes += data.numel()
                    done.add(key)
                except DamagedError as error:
                    bad[request.file, request.site] = str(error)
        left = [r for r in reads if (r.part.file, r.chunk) not in done]
        return left, [(file, site, text) for (file, site), text in bad.items()]

    def _request(self, read: ChunkRead) -> _Request:
        site = self.source.sites[read.part.file][0]
        there = [rank for rank, node in enumerate(self.session.nodes) if node == site.node]
        return _Request(
            file=read.part.file,
            chunk=read.chunk,
            num_bytes=read.num_bytes,
            server=there[read.chunk % len(there)],
            site=site,
        )

    def _round(self, asked: Sequence[Sequence[_Request]]) -> Iterator[tuple[_Request, Tensor]]:
        """Serve and be served once: each rank's requests -> (this rank's request, its bytes)."""
        me, ranks = self.session.rank, range(self.world.size)
        serve = [[q for q in asked[rank] if q.server == me] for rank in ranks]
        receive = [[q for q in asked[me] if q.server == rank] for rank in ranks]
        out = [self._bytes_of(q) for row in serve for q in row]
        arrived = self.world.all_to_all(
            torch.cat(out) if out else torch.empty(0, dtype=torch.uint8),
            [sum(q.num_bytes for q in row) for row in serve],
            [sum(q.num_bytes for q in row) for row in receive],
        )
        position = 0
        for request in (q for row in receive for q in row):
            yield request, arrived[position : position + request.num_bytes].clone()
            position += request.num_bytes

    def _bytes_of(self, request: _Request) -> Tensor:
        """The bytes of a request; zeros for those that are not there, which its checksum will tell."""
        part = next(p for p in self.source.manifest.parts if p.file == request.file)
        try:
            with ChunkFile(request.site.path, part, mapped=self.mapped) as file:
                data = file.chunk(request.chunk)
        except DamagedError:
            data = torch.empty(0, dtype=torch.uint8)
        missing = request.num_bytes - data.numel()
        return torch.cat([data, torch.zeros(missing, dtype=torch.uint8)]) if missing else data


def _by_part(reads: Sequence[ChunkRead]) -> Iterator[tuple[Part, list[ChunkRead]]]:
    """Reads of one file after the other."""
    groups: dict[str, list[ChunkRead]] = {}
    for read in reads:
        groups.setdefault(read.part.file, []).append(read)
    return ((group[0].part, group) for group in groups.values())
