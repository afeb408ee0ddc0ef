"""What a save costs the training thread, and how fast each tier gives it back.

    python -m benchmarks.checkpoint --ranks 2                     # CPU, gloo
    python -m benchmarks.checkpoint --vendor cuda --ranks 1       # device memory -> pinned host memory

Every rank is a node of its own, so that replicas travel. Blocking: a snapshot that the training thread waits
for. Exposed: how much longer a step of arithmetic takes with a snapshot beside it (replica included). Disk:
written, fsynced and read back. Restores are checked against the state that was
saved. The stock rows are torch's DCP on the same tensors: the blocking part of its asynchronous save, and
its load, which checks nothing.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp

from unirl_scale.comm.groups import GroupFactory, connect
from unirl_scale.core.config import (
    CheckpointConfig,
    InvarianceConfig,
    MeshConfig,
    MeshesConfig,
    ModelConfig,
    ModelsConfig,
    RunConfig,
    StageConfig,
)
from unirl_scale.core.load import resolve
from unirl_scale.core.ranks import RankInfo
from unirl_scale.kernels.reference import ReferenceOps
from unirl_scale.train.checkpoint.memory import MemoryFolder
from unirl_scale.train.checkpoint.resume import restore
from unirl_scale.train.checkpoint.saving import Checkpointer, rank_slabs
from unirl_scale.train.checkpoint.session import Session, open_session
from unirl_scale.train.checkpoint.sources import Restored
from unirl_scale.train.roles import Roles
from unirl_scale.train.state import TrainState

GIB = float(1 << 30)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The command line."""

    vendor: str
    ranks: int
    hidden: int
    layers: int
    rounds: int
    disk: str
    memory: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One measurement of the slowest rank."""

    what: str
    value: float
    unit: str
    goal: str = ""


class Bench:
    """One rank."""

    def __init__(self, options: Options, factory: GroupFactory, rank: int) -> None:
        self.options, self.factory, self.world, self.rank = options, factory, factory.world, rank
        self.device = torch.device("cpu" if options.vendor == "cpu" else f"cuda:{rank}")
        self.cfg = config(options)
        self.roles = self.fresh_roles()
        self.roles.prepare(critic=False, reference=False)
        self.gib = sum(s.tensor.nbytes for s in rank_slabs(self.roles) if s.written) / GIB
        self.rows: list[Row] = []

    def fresh_roles(self) -> Roles:
        return Roles(self.cfg, self.factory, ReferenceOps(), self.device)

    def session(self) -> Session:
        info = RankInfo(rank=self.rank, world_size=self.world.size, node_rank=self.rank)
        session = open_session(self.cfg, self.world, info)
        root = Path(self.options.memory) / f"benchmark-node-{self.rank}"
        return replace(session, memory=MemoryFolder(root=root, node=session.memory.node))

    def slowest(self, value: float) -> float:
        return max(self.world.all_gather_object(value))

    def add(self, what: str, value: float, unit: str, goal: str = "") -> None:
        self.rows.append(Row(what=what, value=value, unit=unit, goal=goal))

    @contextmanager
    def checkpointer(self, session: Session, **options: object):
        cfg = replace(self.cfg, checkpoint=replace(self.cfg.checkpoint, **options))
        checkpointer = Checkpointer(cfg, session, self.roles, self.factory, "data")
        yield checkpointer
        checkpointer.fence()

    # ---- saving ---------------------------------------------------------------------------------------
    def snapshots(self, session: Session) -> None:
        with self.checkpointer(session, snapshot_every=1, keep=0) as checkpointer:
            # Later steps than the durable ones: the newest save is the one that is restored.
            state, blocking, copies, replicas = TrainState(step=1000), [], [], []
            for _ in range(self.options.rounds + 2):  # the first ones allocate
                state = replace(state, step=state.step + 1)
                blocking.append(timed(lambda s=state: (checkpointer.after_step(s), checkpointer.fence())))
                metrics = checkpointer.metrics()
                copies.append(metrics["snapshot/copy_s"])
                replicas.append(metrics.get("snapshot/replica_s", 0.0))
            plain, beside, starts = self.overlapped(checkpointer, state, 3 * statistics.median(blocking))
        copy_s = self.slowest(statistics.median(copies[2:]))
        self.add("snapshot, blocking copy", 1e3 * copy_s / self.gib, "ms/GiB", "<= 300")
        self.add("snapshot, start on the training thread", 1e3 * self.slowest(starts), "ms")
        exposed = self.slowest(beside - plain)
        self.add("snapshot and replica, exposed", 1e3 * exposed / self.gib, "ms/GiB", "<= 100")
        if any(replicas):
            replica_s = self.slowest(statistics.median(replicas[2:]))
            self.add("replica to another node", self.gib / replica_s, "GiB/s")

    def overlapped(
        self, checkpointer: Checkpointer, state: TrainState, step_s: float
    ) -> tuple[float, float, float]:
        """Seconds of a step of arithmetic without and with a snapshot beside it, and of starting one."""
        work = Work(self.device, self.slowest(step_s))
        plain, beside, starts = [], [], []
        for i in range(2 * self.options.rounds):
            state = replace(state, step=state.step + 1)
            self.world.barrier()
            began = time.perf_counter()
            if i % 2:
                checkpointer.after_step(state)
                starts.append(time.perf_counter() - began)
            work.run()
            checkpointer.fence()
            (beside if i % 2 else plain).append(time.perf_counter() - began)
        return statistics.median(plain), statistics.median(beside), statistics.median(starts)

    def durable(self, session: Session) -> None:
        times = []
        with self.checkpointer(session, every=1, keep=1, background=False) as checkpointer:
            for step in range(1, self.options.rounds + 1):
                state = TrainState(step=step)
                times.append(timed(lambda s=state: checkpointer.after_step(s)))
        seconds = self.slowest(statistics.median(times))
        self.add("durable: write, fsync, read back, commit", self.gib / seconds, "GiB/s")

    # ---- restoring ------------------------------------------------------------------------------------
    def restores(self) -> None:
        expected = [s.tensor.clone() for s in rank_slabs(self.roles)]
        self.restore("restore: own memory, verified", "in memory", expected, ">= 3")
        if self.world.size > 1:
            # Own buffers are gone, the replica on the other node is not.
            root = self.session().memory.root
            for file in root.glob("*/own-*"):
                file.unlink()
            self.world.barrier()
            self.restore("restore: peer's replica, verified", "in memory", expected, ">= .8")
        shutil.rmtree(self.session().memory.root, ignore_errors=True)
        self.world.barrier()
        self.restore("restore: disk, verified", "checkpoint", expected, ">= 1.0")

    def restore(self, what: str, kind: str, expected: list[torch.Tensor], goal: str) -> None:
        times = []
        for _ in range(self.options.rounds):
            roles = self.fresh_roles()
            restored: list[Restored | None] = []
            self.world.barrier()
            times.append(self.restore_once(roles, restored))
            assert restored[0] is not None and kind in restored[0].source, restored
            found = [s.tensor for s in rank_slabs(roles)]
            assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
        need = sum(t.nbytes for t in expected) / GIB
        self.add(what, need / self.slowest(statistics.median(times)), "GiB/s", goal)

    def restore_once(self, roles: Roles, restored: list[Restored | None]) -> float:
        session = self.session()
        return timed(lambda: restored.append(restore(self.cfg, session, roles, self.world, "data")))

    # ---- stock ----------------------------------------------------------------------------------------
    def stock(self) -> None:
        own = {f"{self.rank}.{i}": s.tensor for i, s in enumerate(rank_slabs(self.roles)) if s.written}
        path = Path(self.options.disk) / "dcp"
        group = dist.new_group(backend="gloo") if self.world.size > 1 else None
        blocking = []
        for i in range(3):
            future = None

            def save(folder: Path = path / str(i)) -> None:
                nonlocal future
                future = dcp.async_save(own, checkpoint_id=folder, process_group=group)

            blocking.append(timed(save))
            assert future is not None
            future.result()
        target = {name: torch.zeros_like(t) for name, t in own.items()}
        load_s = timed(lambda: dcp.load(target, checkpoint_id=path / "2", process_group=group))
        self.add("stock DCP: async_save, blocking", 1e3 * self.slowest(blocking[-1]) / self.gib, "ms/GiB")
        self.add("stock DCP: load, unverified", self.gib / self.slowest(load_s), "GiB/s")


class Work:
    """Matrix products for about so many seconds."""

    def __init__(self, device: torch.device, seconds: float) -> None:
        self.a = torch.randn(512, 512, device=device)
        one = min(timed(lambda: self.product(device)) for _ in range(20))
        self.count, self.device = max(1, int(seconds / one)), device

    def product(self, device: torch.device) -> None:
        self.a @ self.a
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    def run(self) -> None:
        for _ in range(self.count):
            self.product(self.device)


def timed(action: Callable[[], object]) -> float:
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def config(options: Options) -> RunConfig:
    heads = 8
    model = ModelConfig(
        hidden_size=options.hidden,
        num_layers=options.layers,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=options.hidden // heads,
        ffn_size=3 * options.hidden,
        vocab_size=8192,
    )
    return resolve(
        RunConfig(
            run_dir=options.disk,
            model=ModelsConfig(actor=model),
            invariance=InvarianceConfig(model_leaves=8, data_slots=8),
            mesh=MeshesConfig(actor=MeshConfig(dp=options.ranks), rollout=MeshConfig()),
            stages=(StageConfig(num_steps=1 << 20),),
            checkpoint=CheckpointConfig(),
        )
    )


def _rank(rank: int, options: Options, rendezvous: str, result: str) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(rendezvous, options.ranks) if options.ranks > 1 else None
    backend, device = ("gloo", "cpu") if options.vendor == "cpu" else ("nccl", f"cuda:{rank}")
    if device != "cpu":
        torch.cuda.set_device(rank)
    long = timedelta(minutes=10)
    with (
        connect(rank, options.ranks, backend, store=store, timeout=long, device=device) as factory,
        torch.no_grad(),
    ):
        bench = Bench(options, factory, rank)
        session = bench.session()
        try:
            bench.durable(session)
            bench.snapshots(bench.session())
            bench.restores()
            bench.stock()
        finally:
            shutil.rmtree(session.memory.root, ignore_errors=True)
        if rank == 0:
            rows = [Row(what="state of a rank", value=bench.gib, unit="GiB"), *bench.rows]
            Path(result).write_text(json.dumps([asdict(row) for row in rows]))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--vendor", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--disk", default="", help="for durable checkpoints (default: temporary)")
    parser.add_argument("--memory", default="/dev/shm")
    parser.add_argument("--json", default="", help="also write the rows here")
    args = vars(parser.parse_args())
    out = args.pop("json")
    with tempfile.TemporaryDirectory() as folder:
        options = Options(**{**args, "disk": args["disk"] or f"{folder}/run"})
        mp.spawn(_rank, (options, f"{folder}/store", f"{folder}/rows.json"), nprocs=options.ranks)
        rows = json.loads(Path(f"{folder}/rows.json").read_text())
    for row in rows:
        print(f"{row['what']:48} {row['value']:9.2f} {row['unit']:7} {row['goal']}")
    if out:
        Path(out).write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
