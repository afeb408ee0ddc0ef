"""What the control threads say to each other: one JSON object a line."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from unirl_scale.core.typed import TypedReader, field_kinds, to_plain
from unirl_scale.train.elastic.view import Member, View


# ---- first words of a connection ----------------------------------------------------------------------
@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """I look for the hub; `incarnation` is the newest view I know, `lost` are processes that I found dead."""

    run: str
    member: Member
    incarnation: int
    lost: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Watch:
    """Send me your beats."""

    run: str
    uid: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Announce:
    """I am the hub now."""

    run: str
    hub: Member


# ---- answers to Hello ---------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True, kw_only=True)
class Welcome:
    """I am the hub; `incarnation` is the newest view I know. Tell me with Formed if you know a newer one."""

    hub: Member
    incarnation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Elsewhere:
    """I am not the hub; this one is, as far as I know."""

    hub: Member | None


# ---- to the hub ---------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """My training thread is outside any view and waits for the next one.

    Attributes:
        incarnation: the view it left, 0 for none.
        step: steps it completed.
        error: why it left, "" when it was asked to.
        watched, heard: the process that I watched there, and what it was last heard doing.
    """

    incarnation: int
    step: int
    error: str = ""
    watched: str = ""
    heard: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspect:
    """The process that I watch has failed."""

    uid: str
    reason: str
    doing: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Leave:
    """I go; nothing is wrong, and nobody need kill me. Also a hub's last word to all, and the answer of who
    leaves to Hello and Announce."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """My training is complete."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Alive:
    """Nothing new; sent while there is no view in which others watch me."""

    doing: str


# ---- from the hub -------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """The view is over: leave it at once."""

    incarnation: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Regroup:
    """Others wait to join: leave the view together, at the next step boundary."""

    incarnation: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Formed:
    """The next view."""

    view: View


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """This process of your host was evicted and may still run."""

    member: Member


@dataclass(frozen=True, slots=True, kw_only=True)
class Halt:
    """The job cannot go on, or not with you."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Over:
    """Training is complete; nobody needs you any more."""


# ---- to the watcher -----------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True, kw_only=True)
class Beat:
    """I am alive.

    Attributes:
        doing: step, phase and collective of my training thread.
        computing_s: seconds since it last was in a collective; 0 while it is in one.
    """

    doing: str
    computing_s: float


Message = (
    Hello
    | Watch
    | Announce
    | Welcome
    | Elsewhere
    | Ready
    | Suspect
    | Leave
    | Done
    | Alive
    | Stop
    | Regroup
    | Formed
    | Kill
    | Halt
    | Over
    | Beat
)
_KINDS: dict[str, type] = {kind.__name__: kind for kind in Message.__args__}
_FIELDS = {kind: field_kinds(kind) for kind in _KINDS.values()}


def encode(message: Message) -> bytes:
    """One line."""
    return json.dumps({"kind": type(message).__name__, **to_plain(message)}).encode() + b"\n"


def decode(line: bytes) -> Message | None:
    """The message of a line; None when it is none, e.g. from a stranger on the port."""
    try:
        record: Any = json.loads(line)
        kind = _KINDS[record.pop("kind")]
    except (ValueError, KeyError, AttributeError, TypeError):
        return None
    reader = TypedReader(kind, {})
    message = reader.read_dataclass(kind, record, "")
    return None if reader.problems else message
