"""One warm rank: import torch once, then run tasks from the pool of `run_ranks.py` until the socket
closes."""

from __future__ import annotations

import faulthandler
import importlib
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from tests.dist.run_ranks import Place
from unirl_scale.comm.groups import connect

COLLECTIVE_TIMEOUT = timedelta(seconds=300)  # the pool's deadline comes first


def run_task(task: bytes) -> tuple[bool, Any]:
    """(True, pickled value) or (False, traceback)."""
    try:
        place, connected, (module, name), args = pickle.loads(task)
        fn = getattr(importlib.import_module(module), name)
        torch.manual_seed(0)
        value = run_connected(place, fn, args) if connected else fn(place, *args)
        return True, pickle.dumps(value)
    except BaseException:  # SystemExit and pytest's Skipped too: the pool must hear of it
        return False, traceback.format_exc()


def run_connected(place: Place, fn: Callable[..., Any], args: Sequence[Any]) -> Any:
    """Call `fn` in a fresh gloo world."""
    n = place.world_size
    store = dist.FileStore(f"{place.folder}/rendezvous", n) if n > 1 else None
    with connect(place.rank, n, "gloo", store=store, timeout=COLLECTIVE_TIMEOUT) as groups:
        return fn(groups, *args)


def end_with_parent(parent: int) -> None:
    """Leave no orphan behind a test run that was killed."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


def main(descriptor: int, parent: int) -> None:
    """Serve tasks on an inherited socket."""
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    threading.Thread(target=end_with_parent, args=(parent,), daemon=True).start()
    connection = Connection(descriptor)
    connection.send_bytes(b"ready")
    while True:
        try:
            task = connection.recv_bytes()
        except EOFError:
            return
        connection.send_bytes(pickle.dumps(run_task(task)))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
