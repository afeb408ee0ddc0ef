"""The directory of checkpoints: what is newest, what is sound, what may be deleted, and who owns it."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.checkpoint_state import head, whole_state, write_shards
from unirl_scale.core.config import MeshConfig
from unirl_scale.core.errors import CheckpointError
from unirl_scale.train.checkpoint.manifest import Manifest, manifest_bytes, read_manifest
from unirl_scale.train.checkpoint.names import SaveName, delete_run, was_run
from unirl_scale.train.checkpoint.sources import newest_on_disk
from unirl_scale.train.checkpoint.store import Store

WHOLE = whole_state(0)
LAYOUT = MeshConfig(tp=2)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "checkpoints")


def saved(store: Store, step: int, incarnation: int = 1) -> Path:
    """A whole save."""
    name = SaveName(step, incarnation)
    files = write_shards(store.folder(name), WHOLE, LAYOUT)
    store.publish(name, Manifest(head=head(2, step, incarnation), parts=files.parts))
    store.point_latest(name)
    return store.folder(name)


def steps(store: Store) -> list[tuple[int, int]]:
    return [(n.step, n.incarnation) for n in store.names()]


def newest(store: Store) -> tuple[int, list[str]]:
    source, skipped = newest_on_disk(store)
    return (source.when[0] if source else -1), skipped


def test_steps_are_numbers_and_clocks_do_not_count(store: Store) -> None:
    for step in (10000, 9900, 99):
        folder = saved(store, step)
        os.utime(folder, (step, 10**9 - 86400 * step))  # the newest step looks the oldest
    assert steps(store) == [(10000, 1), (9900, 1), (99, 1)]
    assert newest(store) == (10000, [])


def test_the_later_start_wins_at_the_same_step(store: Store) -> None:
    saved(store, 7, incarnation=10), saved(store, 7, incarnation=9)
    assert steps(store) == [(7, 10), (7, 9)]


@pytest.mark.parametrize("text", ["", "garbage", "step-0000000001.0001\n", "../../etc"])
def test_latest_is_never_trusted(store: Store, text: str) -> None:
    saved(store, 1), saved(store, 2)
    (store.path / "latest").write_text(text)
    assert newest(store) == (2, [])


def test_foreign_names_are_left_alone(store: Store) -> None:
    saved(store, 3)
    for name in ("step-3", "step-0000000009.0001.bak", "notes.txt", "step-00000000x9.0001"):
        (store.path / name).mkdir()
    assert steps(store) == [(3, 1)]
    store.prune(1, incarnation=9)
    assert len(list(store.path.glob("step-*"))) == 4


DAMAGE = {
    "half-written": lambda f: (f / "manifest.json").unlink(),
    "rank-00001.train.safetensors: missing": lambda f: (f / "rank-00001.train.safetensors").unlink(),
    "rank-00000.train.safetensors: truncated": lambda f: os.truncate(
        f / "rank-00000.train.safetensors", 5000
    ),
    r"manifest.json: damaged \(\d+ bytes that do not match": lambda f: flip(f / "manifest.json", 500),
    r"manifest.json: damaged \(0 bytes": lambda f: os.truncate(f / "manifest.json", 0),
}


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("reason", DAMAGE)
def test_a_save_that_is_not_sound_is_named_and_skipped(store: Store, reason: str) -> None:
    saved(store, 1)
    DAMAGE[reason](saved(store, 2))
    step, skipped = newest(store)
    assert step == 1
    assert len(skipped) == 1
    with pytest.raises(CheckpointError, match=f"step-0000000002.0001.*{reason}"):
        store.read(SaveName(2, 1))


def test_every_flipped_byte_of_a_manifest_is_found(store: Store) -> None:
    data = bytearray((saved(store, 1) / "manifest.json").read_bytes())
    for at in range(0, len(data), 97):
        data[at] ^= 4
        with pytest.raises(CheckpointError, match="damaged"):
            read_manifest(bytes(data), "m")
        data[at] ^= 4
    assert read_manifest(bytes(data), "m").head.step == 1


def test_a_manifest_reads_back_equal() -> None:
    manifest = Manifest(head=head(2), parts=())
    assert read_manifest(manifest_bytes(manifest), "m") == manifest


def test_another_format_is_refused(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unirl_scale.train.checkpoint.manifest.FORMAT", 2)
    data = manifest_bytes(Manifest(head=head(1), parts=()))
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match="got format 2; this version reads format 1"):
        read_manifest(data, "m")


# ---- retention ----------------------------------------------------------------------------------------
def test_the_newest_stay(store: Store) -> None:
    for step in range(1, 6):
        saved(store, step)
    assert store.prune(2, incarnation=1) == [SaveName(3, 1), SaveName(2, 1), SaveName(1, 1)]
    assert steps(store) == [(5, 1), (4, 1)]


def test_damaged_saves_never_push_out_the_only_good_one(store: Store) -> None:
    saved(store, 1)
    for step in (2, 3, 4):
        os.truncate(saved(store, step) / "rank-00000.train.safetensors", 100)
    assert store.prune(1, incarnation=1) == []
    assert newest(store)[0] == 1


def test_half_written_saves_of_dead_starts_go_once_there_is_a_good_one(store: Store) -> None:
    (saved(store, 5, incarnation=1) / "manifest.json").unlink()
    assert store.prune(2, incarnation=2) == [], "nothing good to fall back to: leave the evidence"
    saved(store, 4, incarnation=2)
    (saved(store, 6, incarnation=2) / "manifest.json").unlink()  # of this start: being written right now
    assert store.prune(2, incarnation=2) == [SaveName(5, 1)]
    assert steps(store) == [(6, 2), (4, 2)]


def test_a_save_is_out_of_sight_before_it_is_deleted(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(store, 1)
    monkeypatch.setattr("shutil.rmtree", lambda *_, **__: None)  # killed right after the rename
    store.remove(SaveName(1, 1))
    assert store.names() == []


# ---- who owns it --------------------------------------------------------------------------------------
def test_starts_at_the_same_moment_get_numbers_of_their_own(store: Store) -> None:
    store.run_id()
    with ThreadPoolExecutor(8) as pool:
        numbers = list(pool.map(lambda i: store.claim_incarnation(f"start {i}"), range(24)))
    assert sorted(numbers) == list(range(1, 25))


def test_the_last_start_fences_the_others_off(store: Store) -> None:
    first = store.claim_incarnation("first")
    store.require_owner(first)
    second = store.claim_incarnation("second")
    store.require_owner(second)
    with pytest.raises(CheckpointError, match=f"incarnation {first} is fenced off by {second}"):
        store.require_owner(first)


def test_numbers_go_on_when_the_folder_of_starts_is_lost(store: Store) -> None:
    saved(store, 3, incarnation=4)
    assert store.claim_incarnation("again") == 5


def test_a_deleted_run_is_another_run_afterwards(store: Store) -> None:
    run = store.run_id()
    assert store.run_id() == run
    saved(store, 1)
    (store.path / "mine.txt").write_text("stays")
    assert was_run(store.path)
    delete_run(store.path)
    assert not was_run(store.path)
    assert [p.name for p in store.path.iterdir()] == ["mine.txt"]
    assert store.run_id() != run


def test_saves_that_may_be_corrupted_are_remembered(tmp_path: Path) -> None:
    store = Store(tmp_path)
    assert store.distrusted() == {}
    for incarnation, step in ((1, 4), (3, 9), (1, 2)):
        store.distrust(incarnation, step)
    assert Store(tmp_path).distrusted() == {1: 2, 3: 9}
    (tmp_path / "run").write_text("r")
    delete_run(tmp_path)
    assert Store(tmp_path).distrusted() == {}, "a new run begins with a clean slate"


def test_saves_that_may_be_corrupted_never_push_out_a_trusted_one(store: Store) -> None:
    for step in (1, 2, 3):
        saved(store, step)
    store.distrust(1, 1)
    store.prune(1, incarnation=1)
    assert steps(store) == [(3, 1), (2, 1), (1, 1)]
    saved(store, 2, incarnation=2)
    store.prune(1, incarnation=2)
    assert steps(store) == [(3, 1), (2, 2)]
