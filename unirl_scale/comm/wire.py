"""What crosses the wire: tensors seen as bytes, transfers in flight, and the count of what was exchanged."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from unirl_scale.core.errors import CommError, UniRLError


@dataclass(slots=True)
class Volume:
    """Calls of one kind of collective and the bytes this rank exchanged with *other* ranks in them."""

    calls: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0


@dataclass(slots=True)
class Traffic:
    """Payload counter: kind -> Volume. One copy a destination, whatever route the backend takes; the padding
    that an uneven gather puts on the wire is counted, since it is sent."""

    by_kind: dict[str, Volume] = field(default_factory=dict)

    def add(self, kind: str, sent_bytes: int, received_bytes: int) -> None:
        """Count one call."""
        volume = self.by_kind.setdefault(kind, Volume())
        volume.calls += 1
        volume.sent_bytes += sent_bytes
        volume.received_bytes += received_bytes

    @property
    def sent_bytes(self) -> int:
        """Bytes sent to other ranks, over all kinds."""
        return sum(volume.sent_bytes for volume in self.by_kind.values())

    @property
    def received_bytes(self) -> int:
        """Bytes received from other ranks, over all kinds."""
        return sum(volume.received_bytes for volume in self.by_kind.values())


class Work(Protocol):
    """The part of torch's Work that is used here."""

    def wait(self) -> bool: ...


class Pending:
    """A transfer in flight. Holds every buffer it reads or writes until `wait` returns the result."""

    __slots__ = ("_kept", "_kind", "_result", "_staged", "_waiting", "_works")

    def __init__(
        self,
        kind: str,
        works: Sequence[Work],
        result: Tensor,
        *,
        kept: Tensor | None = None,
        staged: Tensor | None = None,
        waiting: Callable[[str], AbstractContextManager[None]] | None = None,
    ) -> None:
        self._kind = kind
        self._works = tuple(works)
        self._result = result
        self._kept = kept
        self._staged = staged
        self._waiting = waiting or failures_as_comm_errors

    def wait(self) -> Tensor:
        """Block until done (on a GPU: until the current stream may touch the result). May be called again.

        Returns:
            What the call that started the transfer promised.

        Raises:
            CommError: the transfer failed or a peer is gone.
        """
        if self._works:
            with self._waiting(self._kind):
                for work in self._works:
                    work.wait()
        if self._staged is not None:
            bytes_of(self._result).copy_(self._staged)
        self._works, self._kept, self._staged = (), None, None
        return self._result


def bytes_of(t: Tensor) -> Tensor:
    """The bytes of a contiguous tensor as flat uint8; shares its storage."""
    return t.detach().view(-1).view(torch.uint8)


@contextmanager
def failures_as_comm_errors(kind: str, ranks: Sequence[int] = ()) -> Iterator[None]:
    """Turn the backend's RuntimeError into a CommError that names the operation and its ranks."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, UniRLError):
            raise
        where = f" over ranks {tuple(ranks)}" if ranks else ""
        raise CommError(f"{kind}{where}: {error}") from error
