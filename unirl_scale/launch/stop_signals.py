"""SIGTERM and SIGUSR1 in a rank: noted even while its training thread waits in a collective."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from unirl_scale.train.stopping import StopRequest

_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


@contextmanager
def stop_signals(stop: StopRequest) -> Iterator[None]:
    """Note the signals in `stop` inside the block; call from the main thread.

    Python runs handlers between the instructions of the main thread, which may wait in a collective for long.
    So the kernel's notice is read by a thread of its own from the interpreter's wake-up socket. The second
    signal ends the process at once: what is being saved is never committed then, the save before it stays.
    """
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    before = {signum: signal.signal(signum, _do_nothing) for signum in _SIGNALS}
    descriptor = signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
    thread = threading.Thread(target=_listen, args=(ours, stop), name="stop signals", daemon=True)
    thread.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(descriptor)
        for signum, handler in before.items():
            signal.signal(signum, handler)
        theirs.close()
        thread.join()
        ours.close()


def _listen(ours: socket.socket, stop: StopRequest) -> None:
    while data := ours.recv(64):
        for signum in data:
            if signum in _SIGNALS:
                if stop.signum:
                    os._exit(128 + signum)
                stop.note(signum)


def _do_nothing(signum: int, frame: FrameType | None) -> None:
    """A handler must be there for the wake-up to happen."""
