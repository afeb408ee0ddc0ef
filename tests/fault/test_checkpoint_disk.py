"""A disk that is full, read-only, stopped or shared with another start: training goes on, loudly, and what
was durable stays so. One rank in this process, with a real Checkpointer; the disks are small file systems.
"""

from __future__ import annotations

import gc
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.dist.checkpoint_ranks import Plan
from unirl_scale.comm.groups import Group, GroupFactory, connect
from unirl_scale.core.config import MeshConfig
from unirl_scale.core.errors import CheckpointError
from unirl_scale.core.ranks import RankInfo
from unirl_scale.kernels.reference import ReferenceOps
from unirl_scale.train.checkpoint.names import SaveName
from unirl_scale.train.checkpoint.resume import restore
from unirl_scale.train.checkpoint.saving import Checkpointer
from unirl_scale.train.checkpoint.session import Session, open_session
from unirl_scale.train.checkpoint.sizes import save_bytes
from unirl_scale.train.checkpoint.store import Store
from unirl_scale.train.checkpoint.writer import Probe, no_probe
from unirl_scale.train.roles import Roles
from unirl_scale.train.state import TrainState

ONE = {"actor": MeshConfig(), "critic": MeshConfig(), "reference": MeshConfig()}


class Run:
    """One start of a run whose steps add 1 to the first weight."""

    def __init__(self, path: Path, probe: Probe = no_probe, **options: object) -> None:
        cfg = Plan(path=str(path), stop=0, options={"memory_dir": str(path), **options}, **ONE).config()
        self.cfg, self.state = cfg, TrainState()
        with connect(0, 1) as factory:
            self.factory: GroupFactory = factory
        self.roles = Roles(cfg, self.factory, ReferenceOps(), torch.device("cpu"))
        self.session: Session = open_session(cfg, Group.single(), RankInfo())
        restored = restore(cfg, self.session, self.roles, Group.single(), "data")
        if restored is None:
            self.roles.prepare(critic=True, reference=True)
        else:
            self.state = restored.state
        self.checkpointer = Checkpointer(
            cfg, self.session, self.roles, self.factory, "data", restored=restored, probe=probe
        )

    @property
    def weight(self) -> float:
        assert self.roles.actor.engine is not None
        return float(self.roles.actor.engine.optimizers[0].shard.master[0])

    def step(self) -> None:
        self.checkpointer.fence()
        assert self.roles.actor.engine is not None
        self.roles.actor.engine.optimizers[0].shard.master[0] += 1
        self.state = replace(self.state, step=self.state.step + 1)
        self.checkpointer.after_step(self.state)

    def warnings(self) -> str:
        return " | ".join(self.checkpointer.take_warnings())


@pytest.fixture(autouse=True)
def _no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[int], Path]]:
    """Mounts a file system of so many bytes."""
    mounted: list[Path] = []

    def mount(size: int) -> Path:
        path = tmp_path / "disk"
        path.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(path)]
        if (
            shutil.which("mount") is None
            or subprocess.run(command, capture_output=True, check=False).returncode
        ):
            pytest.skip("this user may not mount file systems")
        mounted.append(path)
        return path

    yield mount
    gc.collect()
    for path in mounted:
        subprocess.run(["umount", "-l", str(path)], check=True)


def one_save() -> int:
    cfg = Plan(path="", stop=0, **ONE).config()
    return save_bytes(cfg, critic=True, reference=True)


def test_a_disk_that_fills_up_keeps_training_and_the_last_checkpoint(tmp_path, small_disk) -> None:
    disk = small_disk(int(3.6 * one_save()))
    run = Run(tmp_path, dir=str(disk), every=1, keep=1, background=False)
    run.step()
    assert run.checkpointer.metrics()["checkpoint/durable_step"] == 1
    (disk / "other").write_bytes(bytes(int(1.6 * one_save())))  # somebody else's data
    run.step()
    assert "checkpoint of step 2 FAILED, training goes on: no space left on device" in run.warnings()
    metrics = run.checkpointer.metrics()
    assert (metrics["checkpoint/requested_step"], metrics["checkpoint/durable_step"]) == (2, 1)
    assert metrics["checkpoint/failed_saves"] == 1
    assert Store(disk).names() == [SaveName(1, 1)], "the partial save is gone"
    again = Run(tmp_path, dir=str(disk), every=1, keep=1, background=False)
    assert (again.state.step, again.weight) == (1, run.weight - 1)
    (disk / "other").unlink()
    again.step()
    assert again.warnings() == ""
    assert again.checkpointer.metrics()["checkpoint/durable_step"] == 2


def test_a_disk_that_turns_read_only_keeps_training_and_the_last_checkpoint(tmp_path, small_disk) -> None:
    disk = small_disk(16 << 20)
    run = Run(tmp_path, dir=str(disk), every=1, background=False)
    run.step()
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    run.step()
    assert "read-only file system" in run.warnings()
    subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=True)
    run.step()
    assert run.warnings() == ""
    assert Store(disk).names() == [SaveName(3, 1), SaveName(1, 1)]


def test_a_full_memory_file_system_is_told_before_it_can_kill(tmp_path, small_disk) -> None:
    memory = small_disk(int(0.5 * one_save()))
    run = Run(tmp_path, keep=0, snapshot_every=1, memory_dir=str(memory))
    with pytest.raises(CheckpointError, match="bytes free; a snapshot buffer needs"):
        run.step()


def test_a_last_checkpoint_that_fails_fails_the_run_and_keeps_the_memory(tmp_path, small_disk) -> None:
    disk = small_disk(int(1.5 * one_save()))
    run = Run(tmp_path, dir=str(disk), keep=1, snapshot_every=1)
    run.step()
    (disk / "other").write_bytes(bytes(one_save()))
    with pytest.raises(CheckpointError, match=r"the last checkpoint is not durable: .* no space left"):
        run.checkpointer.finish(run.state)
    (disk / "other").unlink()
    again = Run(tmp_path, dir=str(disk), keep=1, snapshot_every=1)
    assert (again.state.step, again.weight) == (1, run.weight)


# ---- a disk that does not answer ----------------------------------------------------------------------
class Gate:
    """A disk that stops at the first chunk of a save until it is opened."""

    def __init__(self) -> None:
        self.stopped, self.opened = threading.Event(), threading.Event()

    def __call__(self, label: str) -> None:
        if label == "mid write" and not self.opened.is_set():
            self.stopped.set()
            self.opened.wait(60)


def test_training_goes_on_beside_a_stopped_disk_and_gives_the_save_up(tmp_path: Path) -> None:
    gate = Gate()
    run = Run(tmp_path, gate, every=2, deadline_s=0.3, snapshot_every=1)
    for _ in range(2):
        run.step()
    assert gate.stopped.wait(10)
    said = ""
    while "checkpoint of step 2 FAILED, training goes on: not done within 0.3 s" not in said:
        run.step()
        said += run.warnings()
    for _ in range(4):
        run.step()
    assert "skipped: ranks [0] still write that of step 2" in run.warnings()
    gate.opened.set()
    run.checkpointer.fence()
    run.checkpointer.saves.wait(10)
    while run.checkpointer.metrics()["checkpoint/durable_step"] < 0:
        run.step()
    assert {name.incarnation for name in Store(tmp_path / "checkpoints").names()} == {1}
    assert SaveName(2, 1) not in Store(tmp_path / "checkpoints").names(), "what was given up is not committed"


def test_asked_to_stop_in_a_save_that_does_not_end_memory_has_the_newest_step(tmp_path: Path) -> None:
    gate = Gate()
    run = Run(tmp_path, gate, every=2, snapshot_every=1)
    for _ in range(3):
        run.step()
    assert gate.stopped.wait(10)
    assert run.checkpointer.save_newest(0.3) is False, "the disk is stopped, and the grace is over"
    again = Run(tmp_path, snapshot_every=1)
    assert (again.state.step, again.weight) == (3, run.weight)
    gate.opened.set()
    run.checkpointer.saves.wait(10)


def test_asked_to_stop_in_a_save_the_newer_step_is_made_durable_too(tmp_path: Path) -> None:
    gate = Gate()
    run = Run(tmp_path, gate, every=2, snapshot_every=1)
    for _ in range(3):
        run.step()
    assert gate.stopped.wait(10)
    threading.Timer(0.2, gate.opened.set).start()
    assert run.checkpointer.save_newest(10.0)
    store = Store(tmp_path / "checkpoints")
    assert store.names() == [SaveName(3, 1), SaveName(2, 1)]
    assert [store.read(name).head.step for name in store.names()] == [3, 2]


@pytest.mark.parametrize("told", [True, False], ids=["abandoned", "fenced off"])
def test_a_save_of_an_earlier_start_that_ends_late_is_ignored(tmp_path: Path, told: bool) -> None:
    gate = Gate()
    first = Run(tmp_path, gate, every=1)
    first.step()
    assert gate.stopped.wait(10)
    if told:
        first.checkpointer.abandon()
    second = Run(tmp_path, every=1, background=False, resume="never")
    gate.opened.set()
    assert first.checkpointer.saves.wait(10) is False
    assert ("cancelled" if told else "incarnation 1 is fenced off by 2") in first.warnings()
    assert Store(tmp_path / "checkpoints").names() == []
    second.step()
    assert Store(tmp_path / "checkpoints").names() == [SaveName(1, 2)]


def test_a_save_of_an_earlier_start_cannot_end_in_a_folder_that_is_gone(tmp_path: Path) -> None:
    gate = Gate()
    first = Run(tmp_path, gate, every=1)
    first.step()
    assert gate.stopped.wait(10)
    second = Run(tmp_path, every=1, background=False, resume="never")
    second.step()  # and removes what it takes for half a save of a dead start
    gate.opened.set()
    assert first.checkpointer.saves.wait(10) is False
    assert "FAILED" in first.warnings()
    assert Store(tmp_path / "checkpoints").names() == [SaveName(1, 2)]
    assert Run(tmp_path).weight == second.weight


# ---- bounded ------------------------------------------------------------------------------------------
def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


def test_two_hundred_saves_take_no_more_memory_and_files_than_twenty(tmp_path: Path) -> None:
    run = Run(tmp_path, every=1, keep=2, snapshot_every=1, background=False)
    sizes, files = [], []
    for step in range(1, 201):
        run.step()
        if step in (20, 200):
            gc.collect()
            sizes.append(resident_bytes())
            files.append(sorted(p.name for p in tmp_path.rglob("*") if "step-" not in p.name))
    assert sizes[1] - sizes[0] < 4 * one_save(), sizes
    assert len(files[0]) == len(files[1])
    assert len([n for n in files[1] if n.startswith("own-") and not n.endswith("json")]) <= 4
    assert len(Store(tmp_path / "checkpoints").names()) == 2
