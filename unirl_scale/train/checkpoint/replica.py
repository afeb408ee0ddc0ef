"""A copy of every snapshot on another node: who keeps whose, and the bytes on their way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from unirl_scale.comm.groups import Group
from unirl_scale.train.checkpoint.manifest import Manifest, manifest_bytes, read_manifest
from unirl_scale.train.checkpoint.shard import Part

BUCKET_BYTES = 64 << 20


def replica_keepers(nodes: Sequence[str], racks: Mapping[str, str] | None = None) -> list[int | None]:
    """For each rank, who keeps its replica: always another node, in another rack where there is one.

    Nodes stand in a circle in which neighbours change racks as often as they can; a rank's replica goes to
    the rank of the same local index on the first node ahead that is of another rack.

    Args:
        nodes: node of each rank.
        racks: rack of each node, as far as known.

    Returns:
        A rank each; None everywhere when there is one node.
    """
    members: dict[str, list[int]] = {}
    for rank, node in enumerate(nodes):
        members.setdefault(node, []).append(rank)
    if len(members) == 1:
        return [None] * len(nodes)
    circle = _circle(list(members), racks or {})
    keepers: list[int | None] = [None] * len(nodes)
    for place, node in enumerate(circle):
        ahead = circle[place + 1 :] + circle[:place]
        rack = (racks or {}).get(node)
        elsewhere = [n for n in ahead if rack is not None and (racks or {}).get(n) not in (rack, None)]
        target = members[(elsewhere or ahead)[0]]
        for index, rank in enumerate(members[node]):
            keepers[rank] = target[index % len(target)]
    return keepers


def _circle(nodes: list[str], racks: Mapping[str, str]) -> list[str]:
    """Round robin over racks; nodes of unknown rack count as one rack."""
    by_rack: dict[str, list[str]] = {}
    for node in nodes:
        by_rack.setdefault(racks.get(node, ""), []).append(node)
    rows = [(place, rack, node) for rack, held in by_rack.items() for place, node in enumerate(held)]
    return [node for _, _, node in sorted(rows)]


def keeper_groups(keepers: Sequence[int | None]) -> list[tuple[int, ...]]:
    """Rank lists inside which all replicas travel: the connected components of "keeps for"."""
    root = list(range(len(keepers)))

    def find(rank: int) -> int:
        while root[rank] != rank:
            rank = root[rank]
        return rank

    for rank, keeper in enumerate(keepers):
        if keeper is not None:
            root[find(keeper)] = find(rank)
    groups: dict[int, list[int]] = {}
    for rank in range(len(keepers)):
        groups.setdefault(find(rank), []).append(rank)
    return sorted(tuple(ranks) for ranks in groups.values() if len(ranks) > 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outgoing:
    """What this rank sends: its record and the bytes of those parts that the keeper lacks."""

    record: Manifest
    bodies: Sequence[tuple[Part, Tensor]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Announced:
    """What a rank is about to send."""

    rank: int
    record: Manifest
    files: tuple[str, ...]

    @property
    def sizes(self) -> list[int]:
        by_file = {part.file: part.num_bytes for part in self.record.parts}
        return [by_file[file] for file in self.files]


class ReplicaLink:
    """Sends this rank's snapshots to its keeper and receives those of the ranks it keeps for.

    All members of the group call `announce` and `exchange` in turn, once a snapshot, from one thread each.

    Args:
        group: of host memory, used for nothing else.
        keepers: from `replica_keepers`, of all ranks of the job.
    """

    def __init__(self, group: Group, keepers: Sequence[int | None]) -> None:
        self.group = group
        me = group.ranks[group.index]
        keeper = keepers[me]
        assert keeper is not None
        self.keeper = keeper
        self.wards = tuple(rank for rank, other in enumerate(keepers) if other == me)

    def announce(self, outgoing: Outgoing) -> list[Announced]:
        """Tell the keeper what comes; learn what the wards will send."""
        files = "\n".join(part.file for part, _ in outgoing.bodies)
        text = files.encode() + b"\0" + manifest_bytes(outgoing.record)
        mine = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        keeper, wards = self._index(self.keeper), [self._index(w) for w in self.wards]
        size = torch.tensor([mine.numel()])
        sizes = self.group.exchange([(size, keeper)], [(torch.zeros_like(size), w) for w in wards])
        blanks = [(torch.empty(int(n), dtype=torch.uint8), w) for n, w in zip(sizes, wards, strict=True)]
        texts = self.group.exchange([(mine, keeper)], blanks)
        out = []
        for ward, received in zip(self.wards, texts, strict=True):
            names, _, record = received.numpy().tobytes().partition(b"\0")
            manifest = read_manifest(record, f"replica of rank {ward}")
            out.append(
                Announced(rank=ward, record=manifest, files=tuple(f for f in names.decode().split("\n") if f))
            )
        return out

    def exchange(self, outgoing: Outgoing, into: Sequence[Sequence[Tensor]]) -> int:
        """Move the bytes, a bucket of each at a time.

        Args:
            into: for each ward, one uint8 tensor a file it announced.

        Returns:
            Bytes sent.
        """
        sends = _buckets([data[: part.num_bytes] for part, data in outgoing.bodies])
        receives = [_buckets(targets) for targets in into]
        keeper, wards = self._index(self.keeper), [self._index(w) for w in self.wards]
        for turn in range(max([len(sends), *map(len, receives)])):
            out = [(sends[turn], keeper)] if turn < len(sends) else []
            arriving = [(r[turn], ward) for r, ward in zip(receives, wards, strict=True) if turn < len(r)]
            self.group.exchange(out, arriving)
        return sum(t.numel() for t in sends)

    def _index(self, rank: int) -> int:
        return self.group.ranks.index(rank)


def _buckets(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [t[i : i + BUCKET_BYTES] for t in tensors for i in range(0, t.numel(), BUCKET_BYTES)]
