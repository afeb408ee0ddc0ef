"""What a save consists of: a head, equal on all ranks, and the parts its ranks wrote. Sealed JSON."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from unirl_scale.core.config import ModelConfig
from unirl_scale.core.errors import CheckpointError
from unirl_scale.core.typed import to_plain
from unirl_scale.rl.kl_controller import KlController
from unirl_scale.train.checkpoint.entries import TRAINED_KINDS, whole_spans
from unirl_scale.train.checkpoint.shard import Part, Stored, part_from_plain, part_to_plain
from unirl_scale.train.state import TrainState

FORMAT = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedRole:
    """A role in a save.

    Attributes:
        leaves: W of its stored parameters.
        adam_steps: optimizer updates applied.
        trained: False for frozen weights.
    """

    model: ModelConfig
    head: str
    leaves: int
    adam_steps: int
    trained: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """Everything about a save but its parts.

    Attributes:
        run: id of the run, drawn when it began.
        incarnation: which start of the run saved it; from 1.
        writers: how many ranks have parts in it.
        data: fingerprint of the training data.
        config: the resolved configuration, plain.
    """

    run: str
    step: int
    incarnation: int
    writers: int
    state: TrainState
    roles: Mapping[str, SavedRole]
    data: str
    config: Mapping[str, Any]
    versions: Mapping[str, str]

    @property
    def when(self) -> tuple[int, int]:
        """Order among saves of a run."""
        return self.step, self.incarnation


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """A save: complete when its parts cover every element of every role, see `require_whole`."""

    head: Head
    parts: tuple[Part, ...]

    @property
    def num_bytes(self) -> int:
        return sum(part.num_bytes for part in self.parts)


# ---- completeness -------------------------------------------------------------------------------------
def require_whole(manifest: Manifest) -> None:
    """Every element of every role's state is in exactly one entry.

    Raises:
        CheckpointError: naming the first gap or overlap.
    """
    found: dict[tuple[str, str, str, int], list[tuple[int, int]]] = {}
    for stored in (s for part in manifest.parts for s in part.stored):
        e = stored.entry
        found.setdefault((e.role, e.kind, e.span.name, e.span.leaf), []).append((e.span.start, e.span.stop))
    for role, saved in manifest.head.roles.items():
        kinds: Sequence[str] = TRAINED_KINDS if saved.trained else ("weight",)
        for (name, leaf), numel in whole_spans(saved.model, saved.head, saved.leaves).items():  # type: ignore[arg-type]
            for kind in kinds:
                _require_tiled(
                    f"{role} {kind} {name} leaf {leaf}", found.pop((role, kind, name, leaf), []), numel
                )
    if found:
        role, kind, name, leaf = next(iter(found))
        raise CheckpointError(f"save: got {role} {kind} {name} leaf {leaf}, which no role of it has")


def _require_tiled(what: str, ranges: list[tuple[int, int]], numel: int) -> None:
    position = 0
    for start, stop in sorted(ranges):
        if start != position:
            kind = "is missing" if start > position else "is there twice"
            raise CheckpointError(f"save: {what} {kind} at element {min(start, position)}")
        position = stop
    if position != numel:
        raise CheckpointError(f"save: {what} has {position} of {numel} elements")


def merged(manifests: Iterable[Manifest]) -> Manifest:
    """The parts of all ranks under their common head.

    Raises:
        CheckpointError: the heads differ.
    """
    several = list(manifests)
    head = several[0].head
    for other in several[1:]:
        if other.head != head:
            raise CheckpointError(
                f"save: ranks disagree about step {head.step}.{head.incarnation} and "
                f"{other.head.step}.{other.head.incarnation}"
            )
    return Manifest(head=head, parts=tuple(part for m in several for part in m.parts))


# ---- JSON -----------------------------------------------------------------------------------------------
def seal(plain: Mapping[str, Any]) -> bytes:
    """JSON text whose first line is the SHA-256 of the rest."""
    body = json.dumps(plain, separators=(",", ":"), allow_nan=True).encode()
    return hashlib.sha256(body).hexdigest().encode() + b"\n" + body + b"\n"


def unseal(data: bytes, what: str) -> dict[str, Any]:
    """The inverse of `seal`.

    Raises:
        CheckpointError: a byte is missing or wrong; `what` names the file.
    """
    digest, _, rest = data.partition(b"\n")
    body = rest.removesuffix(b"\n")
    if hashlib.sha256(body).hexdigest().encode() != digest:
        raise CheckpointError(f"{what}: damaged ({len(data)} bytes that do not match their checksum)")
    plain = json.loads(body)
    if not isinstance(plain, dict):
        raise CheckpointError(f"{what}: got {type(plain).__name__}; must be a mapping")
    return plain


def manifest_bytes(manifest: Manifest) -> bytes:
    """The sealed text of a manifest."""
    head = manifest.head
    return seal(
        {
            "format": FORMAT,
            **{name: getattr(head, name) for name in ("run", "step", "incarnation", "writers", "data")},
            "state": asdict(head.state),
            "roles": to_plain(head.roles),
            "config": to_plain(head.config),
            "versions": dict(head.versions),
            "parts": [part_to_plain(p) for p in manifest.parts],
        }
    )


def read_manifest(data: bytes, what: str) -> Manifest:
    """The inverse of `manifest_bytes`; does not judge completeness.

    Raises:
        CheckpointError: damaged, malformed, or of another format.
    """
    plain = unseal(data, what)
    if plain.get("format") != FORMAT:
        raise CheckpointError(f"{what}: got format {plain.get('format')}; this version reads format {FORMAT}")
    try:
        head = Head(
            run=plain["run"],
            step=plain["step"],
            incarnation=plain["incarnation"],
            writers=plain["writers"],
            state=_state(plain["state"]),
            roles={name: _role(role) for name, role in plain["roles"].items()},
            data=plain["data"],
            config=plain["config"],
            versions=plain["versions"],
        )
        parts = tuple(part_from_plain(p) for p in plain["parts"])
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{what}: {type(error).__name__} {error}; it is malformed") from None
    return Manifest(head=head, parts=parts)


def _state(plain: Mapping[str, Any]) -> TrainState:
    return TrainState(**{**plain, "kl": KlController(**plain["kl"])})


def _role(plain: Mapping[str, Any]) -> SavedRole:
    return SavedRole(**{**plain, "model": ModelConfig(**plain["model"])})


def stored_by_leaf(manifest: Manifest) -> dict[tuple[str, str, str, int], list[tuple[Stored, Part]]]:
    """(role, kind, name, leaf) -> its entries and their files, in order of elements."""
    found: dict[tuple[str, str, str, int], list[tuple[Stored, Part]]] = {}
    for part in manifest.parts:
        for s in part.stored:
            e = s.entry
            found.setdefault((e.role, e.kind, e.span.name, e.span.leaf), []).append((s, part))
    for rows in found.values():
        rows.sort(key=lambda row: row[0].entry.span.start)
    return found
