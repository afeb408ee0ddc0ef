"""Making a save durable: in which order, what failures leave behind, and when it is given up."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.checkpoint_state import head, rank_state, shard_bytes, whole_state
from unirl_scale.core.config import MeshConfig
from unirl_scale.core.errors import CheckpointError
from unirl_scale.core.mesh import Mesh
from unirl_scale.train.checkpoint.manifest import Head
from unirl_scale.train.checkpoint.names import SaveName
from unirl_scale.train.checkpoint.store import Store
from unirl_scale.train.checkpoint.writer import POINTS, FileJob, Probe, SaveJob, SaveThread, no_probe

WHOLE = whole_state(0)
LAYOUT = MeshConfig(tp=2, dp=2)
RANKS = range(Mesh.from_config(LAYOUT).size)
BYTES = [shard_bytes(rank_state(WHOLE, LAYOUT, rank), rank) for rank in RANKS]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    store = Store(tmp_path)
    assert store.claim_incarnation("test") == 1
    return store


def job(rank: int, step: int = 1, deadline_s: float = 20.0, keep: int = 2, of: Head | None = None) -> SaveJob:
    part, data = BYTES[rank]
    files = [FileJob(part=part, data=data)]
    return SaveJob(head=of or head(4, step), files=files, rank=rank, deadline_s=deadline_s, keep=keep)


def save(
    store: Store, step: int, probes: dict[int, Probe] | None = None, ranks: range = RANKS, **options: object
) -> list[SaveThread]:
    """A save by four ranks, each a thread; returns when all have ended."""
    probes = probes or {}
    threads = [SaveThread(store, job(r, step, **options), probes.get(r, no_probe)) for r in ranks]  # type: ignore[arg-type]
    assert all(t.wait(30) for t in threads)
    return threads


def fail(label: str, error: OSError, times: int = 10**9) -> Probe:
    """Raise at a labelled point, that many times."""
    left = [times]

    def probe(at: str) -> None:
        if at == label and left[0] > 0:
            left[0] -= 1
            raise error

    return probe


def full() -> OSError:
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def names(folder: Path) -> set[str]:
    return {p.name for p in folder.iterdir()}


def test_a_save_is_whole_and_leaves_no_other_files(store: Store) -> None:
    threads = save(store, 1)
    assert [(t.written, t.durable, t.error) for t in threads] == [(True, r == 0, "") for r in RANKS]
    folder = store.folder(SaveName(1, 1))
    assert names(folder) == {"manifest.json", *(part.file for part, _ in BYTES)}
    assert (store.path / "latest").read_text() == "step-0000000001.0001\n"
    assert store.read(SaveName(1, 1)).head.step == 1


def test_the_points_come_in_order(store: Store) -> None:
    seen: list[str] = []
    save(store, 1, {0: seen.append})
    assert [label for i, label in enumerate(seen) if label not in seen[:i]] == list(POINTS)


def test_the_pointer_moves_only_once_all_ranks_are_done(store: Store) -> None:
    save(store, 1)
    gate, waiting = threading.Event(), threading.Event()

    def hold(label: str) -> None:
        if label == "before record":
            waiting.set()
            gate.wait(20)

    threads = [SaveThread(store, job(r, 2), hold if r == 3 else no_probe) for r in RANKS]
    assert waiting.wait(20)
    assert all(t.wait(20) for t in threads[1:3])
    assert threads[0].running and not threads[0].durable, "requested is not durable"
    assert (store.path / "latest").read_text() == "step-0000000001.0001\n"
    gate.set()
    assert all(t.wait(20) for t in threads)
    assert (store.path / "latest").read_text() == "step-0000000002.0001\n"


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("label", ["before write", "mid write", "before fsync", "before record"])
def test_a_full_disk_removes_the_partial_save_and_keeps_the_previous_one(store, label, rank) -> None:
    save(store, 1)
    threads = save(store, 2, {rank: fail(label, full())})
    assert "no space left on device" in threads[rank].error
    assert "no space left on device" in threads[0].error, "rank 0 says why, whoever failed"
    assert not any(t.durable for t in threads)
    assert store.names() == [SaveName(1, 1)]
    assert (store.path / "latest").read_text() == "step-0000000001.0001\n"
    assert all(t.error == "" for t in save(store, 3)), "room again: the next save works"


def test_an_error_that_passes_is_tried_again(store: Store) -> None:
    flaky = fail("mid write", OSError(errno.EIO, "input/output error"), times=2)
    assert [t.error for t in save(store, 1, {1: flaky, 0: flaky})] == [""] * 4
    assert store.read(SaveName(1, 1)).head.step == 1


def test_an_error_that_stays_ends_the_save_before_its_deadline(store, monkeypatch) -> None:
    monkeypatch.setattr("unirl_scale.train.checkpoint.writer._FIRST_PAUSE_S", 0.001)
    threads = save(store, 1, {1: fail("before fsync", OSError(errno.EIO, "input/output error"))})
    assert threads[1].error.startswith("input/output error")
    assert threads[0].error == f"rank 1: {threads[1].error}"
    assert store.names() == []


def test_what_the_device_changed_is_found_before_anything_is_committed(store, monkeypatch) -> None:
    monkeypatch.setattr("unirl_scale.train.checkpoint.writer._FIRST_PAUSE_S", 0.001)
    folder = store.folder(SaveName(1, 1))

    def corrupt(label: str) -> None:
        if label == "before fsync":
            with (folder / BYTES[0][0].file).open("r+b") as file:
                file.seek(5000)
                byte = file.read(1)
                file.seek(5000)
                file.write(bytes([byte[0] ^ 1]))

    threads = save(store, 1, {0: corrupt})
    assert "chunk 0 reads back other than it was written" in threads[0].error
    assert store.names() == []


def test_a_stopped_disk_is_given_up_at_the_deadline_and_commits_nothing_later(store: Store) -> None:
    gate = threading.Event()

    def stuck(label: str) -> None:
        if label == "mid write":
            gate.wait(30)

    threads = [SaveThread(store, job(r, 1, deadline_s=0.5), stuck if r == 2 else no_probe) for r in RANKS]
    assert threads[0].wait(20)
    assert threads[0].error == "ranks [2] not done within 0.5 s"
    assert threads[2].running and threads[2].left_s < 0
    threads[2].cancel()
    gate.set()
    assert threads[2].wait(20)
    assert not threads[2].written
    assert store.names() == []


def test_a_cancelled_save_commits_nothing(store: Store) -> None:
    gate = threading.Event()
    threads = [
        SaveThread(store, job(r), (lambda at: gate.wait(20) and None) if r == 0 else no_probe) for r in RANKS
    ]
    threads[0].cancel()
    gate.set()
    assert all(t.wait(20) for t in threads)
    assert threads[0].error == "cancelled"
    assert store.names() == []


def test_a_start_that_was_fenced_off_cannot_commit(store: Store) -> None:
    def next_start(label: str) -> None:
        if label == "before manifest":
            store.claim_incarnation("the next start")

    threads = save(store, 1, {0: next_start})
    assert "incarnation 1 is fenced off by 2" in threads[0].error
    assert store.names() == []


def test_a_durable_save_is_never_written_again(store: Store) -> None:
    save(store, 1)
    before = {p.name: p.read_bytes() for p in store.folder(SaveName(1, 1)).iterdir()}
    errors = [thread.error for thread in save(store, 1)]
    assert "file exists" in errors[0]
    assert all("is durable already" in error for error in errors[1:])
    assert {p.name: p.read_bytes() for p in store.folder(SaveName(1, 1)).iterdir()} == before


def test_what_fails_after_the_manifest_takes_nothing_back(store: Store) -> None:
    threads = save(store, 1, {0: fail("before retention", full())})
    assert threads[0].durable
    assert "no space left" in threads[0].error
    assert store.read(SaveName(1, 1)).head.step == 1


def test_ranks_that_save_different_steps_are_refused(store: Store) -> None:
    other = replace(head(4, 1), data="another")
    threads = [SaveThread(store, job(r, of=other if r == 3 else None)) for r in RANKS]
    assert all(t.wait(20) for t in threads)
    assert "ranks disagree about step 1.1" in threads[0].error
    assert store.names() == []


def test_frozen_weights_are_linked_not_written_again(store: Store) -> None:
    save(store, 1)
    first = store.folder(SaveName(1, 1)) / BYTES[1][0].file
    threads = []
    for rank in RANKS:
        plain = job(rank, 2)
        file = replace(plain.files[0], same_as=first if rank == 1 else store.path / "gone")
        threads.append(SaveThread(store, replace(plain, files=[file])))
    assert all(t.wait(20) for t in threads)
    second = store.folder(SaveName(2, 1))
    assert (second / first.name).samefile(first)
    assert store.read(SaveName(2, 1)).head.step == 2, "where there is nothing to link to it is written"
    store.remove(SaveName(1, 1))
    store.read(SaveName(2, 1))


def test_memory_is_given_back_before_the_other_ranks_are_waited_for(store: Store) -> None:
    released: list[int] = []
    gate = threading.Event()
    hold: Callable[[str], None] = lambda label: gate.wait(20) and None  # noqa: E731
    first = SaveThread(store, job(0), release=lambda: released.append(0))
    others = [SaveThread(store, job(r), hold, release=lambda r=r: released.append(r)) for r in (1, 2, 3)]  # type: ignore[misc]
    while not released:
        assert first.running
    assert first.running
    gate.set()
    assert all(t.wait(20) for t in [first, *others])
    assert sorted(released) == [0, 1, 2, 3]


def test_nothing_is_raised_into_the_trainer(store: Store) -> None:
    def bug(label: str) -> None:
        raise ZeroDivisionError("a bug")

    threads = save(store, 1, {1: bug})
    assert threads[1].error == "ZeroDivisionError: a bug"
    assert threads[0].error == "rank 1: ZeroDivisionError: a bug"
    with pytest.raises(CheckpointError):
        store.read(SaveName(1, 1))
