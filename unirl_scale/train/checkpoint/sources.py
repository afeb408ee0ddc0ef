"""Where a run can continue from: snapshots in the memory of its nodes, and durable checkpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from unirl_scale.comm.groups import Group
from unirl_scale.core.errors import CheckpointError
from unirl_scale.train.checkpoint.manifest import (
    Manifest,
    manifest_bytes,
    merged,
    read_manifest,
    require_whole,
)
from unirl_scale.train.checkpoint.session import Session
from unirl_scale.train.checkpoint.store import Store, read_save
from unirl_scale.train.checkpoint.writer import shard_name
from unirl_scale.train.state import TrainState

When = tuple[int, int]  # step, incarnation


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """Where a file of a save lies. `node` is the only one that can open it; "" = every rank can."""

    node: str
    path: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A whole save and where its files are.

    Attributes:
        what: for people, e.g. "snapshot of step 7 in memory".
        sites: file name in the manifest -> places; a node's own one and a replica, say.
    """

    what: str
    manifest: Manifest
    sites: Mapping[str, tuple[Site, ...]]

    @property
    def when(self) -> When:
        return self.manifest.head.when


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """What a run continues from.

    Attributes:
        when: step and incarnation of the save.
        durable: it is a durable checkpoint, not a snapshot in memory.
        source: for people.
        near_bytes, far_bytes: this rank read from its node or shared storage, and from other nodes.
        notes: saves that were passed over and why; settings that changed.
    """

    state: TrainState
    when: When
    durable: bool
    source: str
    seconds: float
    near_bytes: int
    far_bytes: int
    notes: tuple[str, ...]


# ---- disk ---------------------------------------------------------------------------------------------
def disk_source(folder: Path) -> Source:
    """A durable checkpoint, after every check that reads no tensor.

    Raises:
        CheckpointError: half-written, damaged or incomplete; names the file.
    """
    return _of_folder(folder, read_save(folder))


def _of_folder(folder: Path, manifest: Manifest) -> Source:
    return Source(
        what=f"checkpoint {folder}",
        manifest=manifest,
        sites={p.file: (Site(node="", path=folder / p.file),) for p in manifest.parts},
    )


def newest_on_disk(store: Store, below: When | None = None) -> tuple[Source | None, list[str]]:
    """The newest sound checkpoint, and what is wrong with those that are newer.

    Args:
        below: only older ones than this.
    """
    skipped = []
    for name in store.names():
        if below is not None and (name.step, name.incarnation) >= below:
            continue
        try:
            return disk_source(store.folder(name)), skipped
        except CheckpointError as error:
            skipped.append(str(error))
    return None, skipped


def shared_disk_source(world: Group, source: Source | None) -> Source | None:
    """Rank 0's choice on every rank, by the bytes of its manifest: no rank trusts what it sees by itself."""
    head = None
    if world.index == 0 and source is not None:
        site = next(iter(source.sites.values()))[0]
        head = (str(site.path.parent), manifest_bytes(source.manifest))
    said = world.all_gather_object(head)[0]
    if said is None:
        return None
    folder, text = said
    return source if world.index == 0 else _of_folder(Path(folder), read_manifest(text, folder))


# ---- memory -------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """One rank's part of a snapshot, as a node found it."""

    when: When
    writers: int
    rank: int
    node: str
    folder: str
    record: bytes


@dataclass(slots=True)
class _Pile:
    """What all nodes have of one snapshot."""

    writers: int
    found: list[_Found] = field(default_factory=list)


def memory_sources(session: Session, world: Group) -> tuple[list[Source], list[str]]:
    """Snapshots that the nodes' memories hold, newest first, and what is wrong with others. Collective, equal
    on every rank. One that lacks a rank's part is no snapshot and not worth a word: a start leaves such ones.
    """
    node = session.nodes[session.rank]
    mine: list[_Found] = []
    if session.speaks_for_node:
        for r in session.memory.records(session.run):
            head = r.manifest.head
            mine.append(
                _Found(
                    when=head.when,
                    writers=head.writers,
                    rank=r.rank,
                    node=node,
                    folder=str(r.folder),
                    record=manifest_bytes(r.manifest),
                )
            )
    piles: dict[When, _Pile] = {}
    for f in (f for held in world.all_gather_object(mine) for f in held):
        piles.setdefault(f.when, _Pile(writers=f.writers)).found.append(f)
    sources, wrong = [], []
    for when, pile in sorted(piles.items(), reverse=True):
        if {f.rank for f in pile.found} == set(range(pile.writers)):
            try:
                sources.append(_assembled(pile))
            except CheckpointError as error:
                wrong.append(f"snapshot of step {when[0]}, incarnation {when[1]}, in memory: {error}")
    return sources, wrong


def _assembled(pile: _Pile) -> Source:
    """A snapshot whose parts are all there.

    Raises:
        CheckpointError: they do not belong together.
    """
    sites: dict[str, list[Site]] = {}
    by_rank: dict[int, Manifest] = {}
    for f in pile.found:
        record = read_manifest(f.record, f.folder)
        parts = []
        for part in record.parts:
            name = shard_name(f.rank, "frozen" if part.version else "train")
            sites.setdefault(name, []).append(Site(node=f.node, path=Path(f.folder) / part.file))
            parts.append(replace(part, file=name))
        by_rank.setdefault(f.rank, replace(record, parts=tuple(parts)))
    manifest = merged(by_rank.values())
    require_whole(manifest)
    step, incarnation = manifest.head.when
    return Source(
        what=f"snapshot of step {step}, incarnation {incarnation}, in memory",
        manifest=manifest,
        sites={name: tuple(places) for name, places in sites.items()},
    )


def without(source: Source, bad: Sequence[tuple[str, Site]]) -> Source:
    """The source without places that turned out damaged."""
    return replace(
        source,
        sites={name: tuple(s for s in sites if (name, s) not in bad) for name, sites in source.sites.items()},
    )
