"""Ends every transfer of a world from another thread, so that the thread that waits in one gets an error.

A rank that waits for a peer that hangs, or for a peer that itself waits for a dead one, would wait for its
backend's timeout. NCCL and HCCL can abort a communicator. Gloo cannot, but its pairs are plain sockets:
shutting them down makes every pending and later transfer of this rank fail at once, and, since the peers see
their ends close, theirs too. Meeting in a store is a wait as well; its connection is shut down the same way.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from unirl_scale.core.errors import CommError

if TYPE_CHECKING:
    import torch.distributed as dist

_DESCRIPTORS = Path("/proc/self/fd")


class Breaker:
    """The connections of one world.

    One thread connects and makes groups, any thread may call `break_now`.

    Args:
        store_port: TCP port of the store in which the ranks meet.

    Attributes:
        broken: why the world was broken, "" while it is whole.
    """

    def __init__(self, store_port: int | None = None) -> None:
        self.broken = ""
        self._store_port = store_port
        self._loops: set[int] = set()
        self._handles: list[dist.ProcessGroup] = []
        self._lock = threading.Lock()

    @contextmanager
    def connecting(self) -> Iterator[None]:
        """Around whatever opens connections: a world's start, a group's creation.

        Gloo runs one epoll loop a group and registers every socket of the group there; the loops that appear
        in this block are remembered. No other thread may create an epoll instance meanwhile.

        Raises:
            CommError: the world was broken before or during the block.
        """
        self.require_whole()
        before = _epoll_instances()
        try:
            yield
        finally:
            with self._lock:
                self._loops |= _epoll_instances() - before
        self.require_whole()

    def add(self, handle: dist.ProcessGroup | None) -> None:
        """A group that the backend may be able to abort; None is none."""
        if handle is not None:
            with self._lock:
                self._handles.append(handle)

    def release(self) -> None:
        """The world is gone: its descriptors may belong to others from now on."""
        with self._lock:
            self._loops.clear()
            self._handles.clear()
            self._store_port = None

    def require_whole(self) -> None:
        """Raises:
        CommError: the world was broken.
        """
        if self.broken:
            raise CommError(f"the connections of this world were cut: {self.broken}")

    def break_now(self, reason: str) -> None:
        """Fail every transfer in flight and every later one. Calling it again is harmless."""
        self.broken = self.broken or reason
        with self._lock:
            for handle in self._handles:
                handle.abort()  # does nothing for gloo
            for loop in self._loops:
                for descriptor in _watched(loop):
                    _shut_down(descriptor)
            if self._store_port is not None:
                for descriptor in _descriptors():
                    _shut_down(descriptor, peer_port=self._store_port)


def _descriptors() -> list[int]:
    try:
        return [int(name) for name in os.listdir(_DESCRIPTORS)]
    except OSError:  # not Linux: gloo's transfers end with their timeout
        return []


def _epoll_instances() -> set[int]:
    found = set()
    for descriptor in _descriptors():
        try:
            if os.readlink(_DESCRIPTORS / str(descriptor)) == "anon_inode:[eventpoll]":
                found.add(descriptor)
        except OSError:
            continue  # closed meanwhile
    return found


def _watched(loop: int) -> list[int]:
    """Descriptors registered in an epoll instance (proc(5), fdinfo)."""
    try:
        lines = (_DESCRIPTORS.parent / "fdinfo" / str(loop)).read_text().splitlines()
    except OSError:
        return []  # the group is gone
    return [int(line.split()[1]) for line in lines if line.startswith("tfd:")]


def _shut_down(descriptor: int, peer_port: int | None = None) -> None:
    """Shut a connected socket down; leaves other descriptors, and sockets of other peers, alone."""
    try:
        connection = socket.socket(fileno=os.dup(descriptor))
    except OSError:
        return  # not a socket
    with connection:
        try:
            peer = connection.getpeername()
            if peer_port is None or (isinstance(peer, tuple) and peer[1] == peer_port):
                connection.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # a listener, or closed by the peer already
