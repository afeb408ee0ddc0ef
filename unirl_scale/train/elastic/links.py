"""Connections of the control plane: typed messages over TCP, every wait with a deadline.

A process that was stopped meanwhile finds its deadline over and what it waited for there: whoever judges by a
deadline looks twice, half the time each.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket

from unirl_scale.train.elastic.messages import Message, decode, encode

_LIMIT_BYTES = 64 << 20  # of one line: a view of a very large job
_LOOKS = 2


class Link:
    """One connection. Reading gives None once the other end is gone or talks nonsense."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        connection = writer.get_extra_info("socket")
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    @classmethod
    async def open(cls, address: str, timeout_s: float) -> Link | None:
        """Connect; None when nobody answers there."""
        host, _, port = address.rpartition(":")
        for _ in range(_LOOKS):
            try:
                async with asyncio.timeout(timeout_s / _LOOKS):
                    return cls(*await asyncio.open_connection(host, int(port), limit=_LIMIT_BYTES))
            except TimeoutError:
                continue
            except (OSError, ValueError):
                return None
        return None

    def send(self, message: Message) -> None:
        """Queue a message. A broken link swallows it: its reader will notice."""
        if not self._writer.is_closing():
            self._writer.write(encode(message))

    async def flush(self) -> None:
        """Wait until what was queued is with the kernel."""
        with contextlib.suppress(OSError):
            await self._writer.drain()

    async def receive(self, timeout_s: float | None = None) -> Message | None:
        """The next message; None at the end.

        Raises:
            TimeoutError: nothing came in time; the link is still good.
        """
        try:
            async with asyncio.timeout(timeout_s):
                line = await self._reader.readline()
        except TimeoutError:
            raise
        except (OSError, ValueError):  # broken, or a line without end
            return None
        return decode(line) if line.endswith(b"\n") else None

    def close(self) -> None:
        self._writer.close()


async def ask(address: str, question: Message, timeout_s: float) -> tuple[Link, Message] | None:
    """Connect, send one message, wait for its answer; None when there is none in time."""
    link = await Link.open(address, timeout_s)
    if link is None:
        return None
    link.send(question)
    for _ in range(_LOOKS):
        try:
            answer = await link.receive(timeout_s / _LOOKS)
        except TimeoutError:
            continue
        if answer is not None:
            return link, answer
        break
    link.close()
    return None


def own_address(towards: str) -> str:
    """The address of this host on the way to another one.

    Args:
        towards: host name or address, e.g. that of rank 0.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((towards, 9))  # sends nothing
            address: str = probe.getsockname()[0]
        except OSError:
            return "127.0.0.1"
    return address
