"""Run one function on several ranks over gloo, in a warm pool of worker processes.

A test takes the session fixture `run_ranks` and calls `run_ranks(fn, world_size, *args)`. `fn(groups, *args)`
is a module-level function; each rank gets the GroupFactory of a fresh world and returns something picklable.
Importing torch costs seconds, so workers live for the whole session and only the process group is new on each
call.
"""

from __future__ import annotations

import importlib
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

MAX_RANKS = 6
WORKER_ENV = {
    "MKL_CBWR": "AVX2,STRICT",  # must be set before torch loads
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "PYTHONFAULTHANDLER": "1",
}
START_S = 120.0  # a worker that has not imported torch by then is broken, however busy the machine
GRACE_S = 5.0  # ranks still waiting for a failed peer get this long to notice
STACK_S = 0.5  # a hung rank gets this long to write its stack


class RanksFailed(AssertionError):  # noqa: N818 - what happened, in words
    """Some ranks raised, died or hung; the message shows each, the first to fail first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a function runs: its rank, and an empty folder that the ranks of one call share."""

    rank: int
    world_size: int
    folder: str


@dataclass(slots=True)
class Worker:
    """One warm process and the socket to it."""

    process: subprocess.Popen[bytes]
    connection: Connection
    log: Path
    ready: bool = False
    log_start: int = 0

    def log_tail(self) -> str:
        """What it wrote to stdout and stderr since its last task began."""
        text = self.log.read_bytes()[self.log_start :].decode(errors="replace").strip()
        return f"\n--- its output ---\n{text[-6000:]}" if text else ""

    def stop(self) -> None:
        """Kill this one process and reap it."""
        self.process.kill()
        self.process.wait()
        self.connection.close()


@dataclass(slots=True)
class RankPool:
    """Up to `max_ranks` warm workers; use as a context manager.

    Attributes:
        env: variables of the workers on top of this process's and WORKER_ENV.
        timeout_s: deadline of a call that names none.
    """

    max_ranks: int = MAX_RANKS
    env: Mapping[str, str] = field(default_factory=dict)
    timeout_s: float = 60.0
    workers: list[Worker] = field(default_factory=list)
    _calls: int = 0
    _folder: tempfile.TemporaryDirectory[str] | None = None

    def __enter__(self) -> RankPool:
        self._folder = tempfile.TemporaryDirectory(prefix="ranks-")
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self.workers:
            worker.stop()
        self.workers.clear()
        if self._folder is not None:
            self._folder.cleanup()

    def __call__(
        self,
        fn: Callable[..., Any],
        world_size: int,
        *args: Any,
        timeout_s: float | None = None,
        env: Mapping[str, str] | None = None,
        connected: bool = True,
    ) -> list[Any]:
        """Run `fn(groups, *args)` on `world_size` ranks and return each rank's value, by rank.

        Args:
            fn: module-level function, importable by name.
            world_size: 1..max_ranks.
            args: picklable, the same for all ranks.
            timeout_s: after which ranks without an answer are killed and replaced.
            env: run in processes of their own with these variables too, and end them afterwards.
            connected: False calls `fn(place, *args)` before any process group exists, with a Place.

        Raises:
            RanksFailed: any rank raised, died or missed the deadline.
        """
        __tracebackhide__ = True
        if env is not None:
            with RankPool(self.max_ranks, {**self.env, **env}, self.timeout_s) as isolated:
                return isolated(fn, world_size, *args, timeout_s=timeout_s, connected=connected)
        if not 1 <= world_size <= self.max_ranks:
            raise ValueError(f"world_size {world_size}: needs 1..{self.max_ranks}")
        name, folder = _name_of(fn), self._new_folder()
        tasks = [
            pickle.dumps((Place(rank=rank, world_size=world_size, folder=folder), connected, name, args))
            for rank in range(world_size)
        ]
        workers = self._warm(world_size)
        for worker, task in zip(workers, tasks, strict=True):
            worker.log_start = worker.log.stat().st_size
            worker.connection.send_bytes(task)
        return self._collect(workers, self.timeout_s if timeout_s is None else timeout_s)

    def _new_folder(self) -> str:
        assert self._folder is not None, "use the pool as a context manager"
        self._calls += 1
        folder = Path(self._folder.name) / f"call-{self._calls}"
        folder.mkdir()
        return str(folder)

    def _warm(self, count: int) -> list[Worker]:
        """The first `count` workers, each alive and done importing; the dead are replaced."""
        for worker in [w for w in self.workers if w.process.poll() is not None]:
            self._discard(worker)
        while len(self.workers) < count:
            self.workers.append(self._start())
        chosen = self.workers[:count]
        deadline = time.monotonic() + START_S
        for worker in [w for w in chosen if not w.ready]:
            started = worker.connection.poll(max(0.0, deadline - time.monotonic()))
            try:
                worker.ready = started and worker.connection.recv_bytes() == b"ready"
            except EOFError:
                worker.ready = False
            if not worker.ready:
                tail = worker.log_tail()
                self._discard(worker)
                raise RanksFailed(
                    f"a worker (pid {worker.process.pid}) did not start within {START_S} s{tail}"
                )
        return chosen

    def _start(self) -> Worker:
        assert self._folder is not None
        log = Path(self._folder.name) / f"worker-{time.monotonic_ns()}.log"
        ours, theirs = socket.socketpair()
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        env = {**os.environ, "PYTHONPATH": path, **WORKER_ENV, **self.env}
        command = [sys.executable, "-m", "tests.dist.rank_worker", str(theirs.fileno()), str(os.getpid())]
        with log.open("wb") as output, theirs:
            process = subprocess.Popen(
                command,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C reaches the test, which then stops its workers
            )
        return Worker(process, Connection(ours.detach()), log)

    def _discard(self, worker: Worker) -> None:
        self.workers.remove(worker)
        worker.stop()

    def _collect(self, workers: Sequence[Worker], timeout_s: float) -> list[Any]:
        """Wait for every rank; once one has failed the others have GRACE_S left."""
        __tracebackhide__ = True
        values: dict[int, Any] = {}
        failures: list[str] = []
        waiting = {worker.connection: rank for rank, worker in enumerate(workers)}
        deadline = time.monotonic() + timeout_s
        try:
            while waiting:
                arrived = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
                if not arrived:
                    break
                for connection in arrived:
                    assert isinstance(connection, Connection)
                    rank = waiting.pop(connection)
                    failure = self._receive(rank, workers[rank], values)
                    if failure:
                        failures.append(failure)
                        deadline = min(deadline, time.monotonic() + GRACE_S)
        finally:  # also on KeyboardInterrupt: a worker in the middle of a task is of no more use
            hung = self._kill_hung({rank: workers[rank] for rank in waiting.values()})
        if failures or hung:
            limit = f"{GRACE_S} s after that failure" if failures else f"{timeout_s} s"
            failures += [f"{what} had no answer within {limit} and was killed{where}" for what, where in hung]
            raise RanksFailed(f"{len(failures)} of {len(workers)} ranks failed\n\n" + "\n\n".join(failures))
        return [values[rank] for rank in range(len(workers))]

    def _receive(self, rank: int, worker: Worker, values: dict[int, Any]) -> str | None:
        """Take one rank's answer into `values`, or say how it failed."""
        try:
            ok, payload = pickle.loads(worker.connection.recv_bytes())
        except (EOFError, ConnectionResetError):
            worker.process.wait()
            tail = worker.log_tail()
            self._discard(worker)
            return (
                f"rank {rank} (pid {worker.process.pid}) died: exit status {worker.process.returncode}{tail}"
            )
        if not ok:
            return f"rank {rank} raised\n{payload}{worker.log_tail()}"
        values[rank] = pickle.loads(payload)
        return None

    def _kill_hung(self, hung: Mapping[int, Worker]) -> list[tuple[str, str]]:
        """Ask each for its stack, then kill it by pid and forget it. Returns (which rank, its output)
        each."""
        for worker in hung.values():
            worker.process.send_signal(signal.SIGUSR1)  # faulthandler writes every thread's stack to the log
        if hung:
            time.sleep(STACK_S)
        found = []
        for rank, worker in hung.items():
            found.append((f"rank {rank} (pid {worker.process.pid})", worker.log_tail()))
            self._discard(worker)
        return found


def _name_of(fn: Callable[..., Any]) -> tuple[str, str]:
    module, name = fn.__module__, fn.__qualname__
    if module == "__main__" or getattr(importlib.import_module(module), name, None) is not fn:
        raise ValueError(f"{module}.{name}: needs a function that ranks can import by name")
    return module, name
