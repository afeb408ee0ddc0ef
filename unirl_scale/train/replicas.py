"""Silent data corruption: state that several ranks hold must be the same bytes on all of them.

Compute weights are equal over the data-parallel ranks of a place, replicated parameters and their moments
over its tensor-parallel ranks as well, and what a rank publishes of its own master weights equals them. A
copy that differs was changed by a faulty memory, link or core, because every rank computes it from the same
bytes in the same order. Adam moments of a rank's own shard have no copy to be held against; checksums of
snapshots cover them from there on.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from unirl_scale.core.errors import CommError, CorruptionError
from unirl_scale.core.suspects import Disagreement, listed, odd_copies
from unirl_scale.parallel.chunk import TIED
from unirl_scale.parallel.flat import FlatSpace
from unirl_scale.train.checkpoint.checksum import chunk_sums
from unirl_scale.train.checkpoint.saving import role_list
from unirl_scale.train.checkpoint.session import Session
from unirl_scale.train.roles import Role, Roles


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """Bytes on this rank that other ranks hold too.

    Attributes:
        name: the same on every rank that holds them.
        place: what the name leaves open, e.g. the pipeline rank.
        parts: parameter -> its part of them, end to end.
    """

    name: str
    place: str
    parts: Mapping[str, Tensor]

    @property
    def key(self) -> str:
        return f"{self.name} of {self.place}"

    def checksum(self) -> str:
        return hashlib.sha256("".join(map(_checksum, self.parts.values())).encode()).hexdigest()[:16]

    def checksums(self) -> dict[str, str]:
        """By parameter."""
        return {f"{self.name} {part} of {self.place}": _checksum(t) for part, t in self.parts.items()}


class ReplicaCheck:
    """Compares all copies, and says what to do about one that differs.

    Args:
        verified_step: the step whose state was made equal on all ranks: the restored one, or 0.
    """

    def __init__(
        self, roles: Roles, session: Session, on_mismatch: Literal["stop", "evict"], verified_step: int
    ) -> None:
        self._roles, self._session = roles, session
        self._evicts, self._verified_step = on_mismatch == "evict", verified_step

    def __call__(self, step: int) -> None:
        """Compare; collective over the world. Costs a pass over the weights and a gather of a few hundred
        bytes a rank; parameters are told apart only once something differs.

        Saves that this start of the run made since the last comparison that found nothing may hold the wrong
        bytes: they are marked, so that nobody continues from them.

        Args:
            step: steps completed. Snapshots of it have been fenced.

        Raises:
            CorruptionError: copies differ; on every rank, naming tensors, ranks and nodes. With `evict`, only
                on the ranks that are wrong.
            CommError: with `evict`, on the others: they go on without those.
        """
        copies = [c for role in role_list(self._roles) for c in role_copies(role)]
        unlike = [name for role in role_list(self._roles) for name in unpublished(role)]
        told = self._roles.world.all_gather_object(({c.key: c.checksum() for c in copies}, unlike))
        keys = {d.name for d in odd_copies([held for held, _ in told])}
        if not keys and not any(names for _, names in told):
            self._verified_step = step
            return
        mine = {name: checksum for c in copies if c.key in keys for name, checksum in c.checksums().items()}
        found = odd_copies(self._roles.world.all_gather_object(mine))
        found += [
            Disagreement(name=name, odd=(rank,), others=())
            for rank, (_, names) in enumerate(told)
            for name in names
        ]
        self._raise(found, step)

    def _raise(self, found: list[Disagreement], step: int) -> None:
        session = self._session
        if session.rank == 0 and session.run:
            session.store.distrust(session.incarnation, self._verified_step)
        wrong = tuple(sorted({rank for d in found for rank in d.odd}))
        lines = "\n  ".join(d.text(session.nodes) for d in found[:8])
        more = f"\n  ... ({len(found)} in all)" if len(found) > 8 else ""
        text = (
            f"silent data corruption, found in step {step + 1}: {lines}{more}\n"
            f"saves of this start after step {self._verified_step} may hold it and are passed over; "
            "hint: test the memory and the accelerators of these nodes before they are used again"
        )
        if self._evicts and wrong and session.rank not in wrong:
            raise CommError(f"{listed(wrong, session.nodes)} left: {text}")
        raise CorruptionError(text, wrong)


def role_copies(role: Role) -> Iterator[Copy]:
    """What this rank holds of a role that other ranks hold too."""
    engine = role.engine
    if engine is None:
        return
    at = engine.ctx.at
    for number, chunk in enumerate(engine.chunks):
        stage = f"pipeline rank {at.pp}" + (f", chunk {number}" if len(engine.chunks) > 1 else "")
        place = f"{stage}, tensor rank {at.tp}"
        yield Copy(name=f"{role.name} weights", place=place, parts=_parts(chunk.leafed, chunk.flat))
        kinds = {"weights": chunk.flat_replicated}
        if engine.optimizers:
            kinds |= engine.optimizers[number].replicated.tensors()
        for kind, flat in kinds.items():
            parts = _parts(chunk.replicated, flat)
            yield Copy(name=f"{role.name} {kind}", place=f"{stage}, replicated", parts=parts)
        if TIED in chunk.weights:
            tied = {TIED: chunk.weights[TIED]}
            yield Copy(name=f"{role.name} weights", place=f"the tied head, tensor rank {at.tp}", parts=tied)


def unpublished(role: Role) -> Iterator[str]:
    """Chunks whose compute weights are not what this rank's master weights say."""
    engine = role.engine
    for number, optimizer in enumerate(engine.optimizers if engine is not None else ()):
        chunk = optimizer.chunk
        pairs = (
            (optimizer.shard.master, optimizer.share.take(chunk.flat)),
            (optimizer.replicated.master, chunk.flat_replicated),
        )
        if any(_checksum(master.to(copy.dtype)) != _checksum(copy) for master, copy in pairs):
            yield f"{role.name} master weights of chunk {number}"


def _parts(space: FlatSpace, flat: Tensor) -> dict[str, Tensor]:
    """Parameter -> its elements, views."""
    names = list(space.offsets)
    ends = [*(space.offsets[name] for name in names[1:]), space.numel]
    return {name: flat[space.offsets[name] : end] for name, end in zip(names, ends, strict=True)}


def _checksum(t: Tensor) -> str:
    return "".join(chunk_sums(t.detach().contiguous().view(-1).view(torch.uint8)))
