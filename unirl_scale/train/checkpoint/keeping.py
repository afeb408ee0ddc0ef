"""The other end of a replica: buffers for the snapshots of ranks on other nodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from unirl_scale.core.errors import CheckpointError
from unirl_scale.train.checkpoint.checksum import chunk_sums
from unirl_scale.train.checkpoint.manifest import Manifest
from unirl_scale.train.checkpoint.memory import Buffer, MemoryFolder, record_path, write_record
from unirl_scale.train.checkpoint.replica import Announced, Outgoing, ReplicaLink
from unirl_scale.train.checkpoint.shard import Part

_SLOTS = 2  # one is written while the other is whole


@dataclass(slots=True)
class _Ward:
    """Buffers for one rank's replicas; `frozen` by version."""

    slots: list[Buffer | None] = field(default_factory=lambda: [None] * _SLOTS)
    frozen: dict[str, Buffer] = field(default_factory=dict)
    turn: int = 0


class Keeping:
    """Sends this rank's snapshots to its keeper and keeps those of its wards."""

    def __init__(self, link: ReplicaLink, folder: MemoryFolder, incarnation: int) -> None:
        self._link, self._folder, self._incarnation = link, folder, incarnation
        self._wards = {rank: _Ward() for rank in link.wards}
        self._sent_version = ""

    @property
    def keeper(self) -> int:
        """Rank that keeps this one's replicas."""
        return self._link.keeper

    def replicate(self, record: Manifest, data: Sequence[Tensor]) -> int:
        """One exchange with the keeper and the wards, which all take the same snapshot; returns bytes sent.

        Raises:
            CommError: a rank at either end is gone.
            CheckpointError: what arrived is not what its sender summed.
        """
        bodies = [
            (part, tensor)
            for part, tensor in zip(record.parts, data, strict=True)
            if not part.version or part.version != self._sent_version
        ]
        outgoing = Outgoing(record=record, bodies=bodies)
        announced = self._link.announce(outgoing)
        places = [self._places(a) for a in announced]
        sent = self._link.exchange(outgoing, [[data for _, data in row] for row in places])
        self._sent_version = next((p.version for p, _ in bodies if p.version), self._sent_version)
        for a, row in zip(announced, places, strict=True):
            self._accept(a, row)
        return sent

    def _places(self, announced: Announced) -> list[tuple[Part, Tensor]]:
        """Where each announced file goes; the replica that was there is forgotten first."""
        ward = self._wards[announced.rank]
        by_file = {part.file: part for part in announced.record.parts}
        out = []
        for file in announced.files:
            part = by_file[file]
            buffer = (
                self._frozen_buffer(ward, announced.rank, part)
                if part.version
                else self._slot(ward, announced.rank, part)
            )
            out.append((part, buffer.data[: part.num_bytes]))
        return out

    def _slot(self, ward: _Ward, rank: int, part: Part) -> Buffer:
        ward.turn = (ward.turn + 1) % _SLOTS
        buffer = ward.slots[ward.turn]
        if buffer is not None:
            record_path(buffer).unlink(missing_ok=True)
        if buffer is None or buffer.num_bytes != part.num_bytes:
            buffer = self._allocate(rank, str(ward.turn), part.num_bytes)
            ward.slots[ward.turn] = buffer
        return buffer

    def _frozen_buffer(self, ward: _Ward, rank: int, part: Part) -> Buffer:
        for version in list(ward.frozen)[:-1]:  # the last one belongs to the replica that is whole
            ward.frozen.pop(version).remove()
        buffer = self._allocate(rank, part.version, part.num_bytes)
        ward.frozen[part.version] = buffer
        return buffer

    def _allocate(self, rank: int, slot: str, num_bytes: int) -> Buffer:
        return Buffer(self._folder.file("replica", rank, self._incarnation, slot), num_bytes)

    def _accept(self, announced: Announced, row: Sequence[tuple[Part, Tensor]]) -> None:
        for part, data in row:
            if tuple(chunk_sums(data)) != part.sums:
                raise CheckpointError(f"replica of rank {announced.rank}: {part.file} arrived damaged")
        ward = self._wards[announced.rank]
        buffer = ward.slots[ward.turn]
        assert buffer is not None and buffer.path is not None
        parts = tuple(
            replace(p, file=_name(ward.frozen[p.version]) if p.version else buffer.path.name)
            for p in announced.record.parts
        )
        write_record(record_path(buffer), replace(announced.record, parts=parts))


def _name(buffer: Buffer) -> str:
    assert buffer.path is not None
    return buffer.path.name
