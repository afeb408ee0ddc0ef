"""Any layout reads any layout's files: exact values, no more bytes than needed, and damage is named."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest
import safetensors
import torch

from tests.checkpoint_state import rank_state, shard_bytes, whole_state, write_shards
from unirl_scale.core.config import MeshConfig
from unirl_scale.core.errors import CheckpointError
from unirl_scale.core.mesh import Mesh
from unirl_scale.train.checkpoint.checksum import chunk_sum
from unirl_scale.train.checkpoint.entries import Slab
from unirl_scale.train.checkpoint.manifest import Manifest
from unirl_scale.train.checkpoint.reading import DamagedError, chunk_reads, plan_copies, read_files

LAYOUTS = [
    MeshConfig(),
    MeshConfig(dp=3),
    MeshConfig(tp=2, pp=2),
    MeshConfig(tp=3, dp=2),
    MeshConfig(pp=2, vpp=2, dp=3),
]


def read(manifest: Manifest, folder: Path, slabs: list[Slab], *, mapped: bool = False) -> int:
    reads = chunk_reads(plan_copies(manifest, slabs))
    return read_files(reads, lambda part: folder / part.file, mapped=mapped)


@pytest.mark.parametrize("mapped", [False, True], ids=["read", "mapped"])
@pytest.mark.parametrize(("source", "target"), list(itertools.permutations(LAYOUTS, 2)))
def test_values_survive_a_change_of_layout(tmp_path: Path, source, target, mapped) -> None:
    whole = whole_state(1)
    manifest = write_shards(tmp_path, whole, source)
    for rank in Mesh.from_config(target).ranks:
        got, expected = rank_state(None, target, rank), rank_state(whole, target, rank)
        read(manifest, tmp_path, got, mapped=mapped)
        for a, b in zip(got, expected, strict=True):
            assert torch.equal(a.tensor, b.tensor)


def in_small_chunks(manifest: Manifest, folder: Path, size: int) -> Manifest:
    """The same files summed in chunks of another size; one of the real size would hold this whole model."""
    parts = []
    for part in manifest.parts:
        data = torch.from_file(str(folder / part.file), size=part.num_bytes, dtype=torch.uint8)
        sums = tuple(chunk_sum(data[i : i + size]) for i in range(0, part.num_bytes, size))
        parts.append(replace(part, chunk_bytes=size, sums=sums))
    return replace(manifest, parts=tuple(parts))


def test_a_rank_reads_what_it_holds_and_not_the_whole_save(tmp_path: Path) -> None:
    whole, chunk = whole_state(2), 1024
    manifest = in_small_chunks(write_shards(tmp_path, whole, MeshConfig(tp=2, pp=2)), tmp_path, chunk)
    for rank in range(6):
        slabs = rank_state(None, MeshConfig(dp=6), rank)
        size = read(manifest, tmp_path, slabs)
        need = sum(s.tensor.numel() * 4 for s in slabs)
        assert need <= size <= need + len(plan_copies(manifest, slabs)) * 2 * chunk
        assert size < manifest.num_bytes / 2
        for a, b in zip(slabs, rank_state(whole, MeshConfig(dp=6), rank), strict=True):
            assert torch.equal(a.tensor, b.tensor)


def test_reads_of_neighbours_are_joined(tmp_path: Path) -> None:
    manifest = write_shards(tmp_path, whole_state(0), MeshConfig())
    slabs = rank_state(None, MeshConfig(), 0)
    assert len(plan_copies(manifest, slabs)) == len(slabs)


def test_any_safetensors_reader_opens_a_shard(tmp_path: Path) -> None:
    slabs = rank_state(whole_state(3), MeshConfig(tp=2), 1)
    part, data = shard_bytes(slabs, 1)
    path = tmp_path / part.file
    path.write_bytes(data.numpy().tobytes())
    with safetensors.safe_open(path, "pt") as file:
        keys = set(file.keys())
        for slab in (s for s in slabs if s.written):
            position = 0
            for entry in slab.entries:
                expected = slab.tensor[position : position + entry.span.numel]
                assert torch.equal(file.get_tensor(entry.key), expected)
                keys.remove(entry.key)
                position += entry.span.numel
    assert not keys


@pytest.mark.parametrize("mapped", [False, True], ids=["read", "mapped"])
def test_a_flipped_byte_is_named(tmp_path: Path, mapped: bool) -> None:
    manifest = write_shards(tmp_path, whole_state(0), MeshConfig(dp=2))
    file = tmp_path / "rank-00001.train.safetensors"
    data = bytearray(file.read_bytes())
    data[-100] ^= 1
    file.write_bytes(data)
    with pytest.raises(
        DamagedError, match=r"rank-00001.train.safetensors: damaged in bytes 0\.\.\d+ \(checksum"
    ):
        for rank in range(2):
            read(manifest, tmp_path, rank_state(None, MeshConfig(dp=2), rank), mapped=mapped)


@pytest.mark.parametrize("mapped", [False, True], ids=["read", "mapped"])
def test_a_truncated_and_a_missing_file_are_named(tmp_path: Path, mapped: bool) -> None:
    manifest = write_shards(tmp_path, whole_state(0), MeshConfig())
    file = tmp_path / "rank-00000.train.safetensors"
    size = file.stat().st_size
    with file.open("r+b") as handle:
        handle.truncate(size - 1)
    with pytest.raises(DamagedError, match=f"truncated, {size - 1} of {size} bytes"):
        read(manifest, tmp_path, rank_state(None, MeshConfig(), 0), mapped=mapped)
    file.unlink()
    with pytest.raises(DamagedError, match=r"rank-00000.train.safetensors: no such file"):
        read(manifest, tmp_path, rank_state(None, MeshConfig(), 0), mapped=mapped)


def test_what_the_save_lacks_is_named(tmp_path: Path) -> None:
    manifest = write_shards(tmp_path, whole_state(0), MeshConfig(dp=2))
    half = Manifest(head=manifest.head, parts=manifest.parts[:1])
    with pytest.raises(CheckpointError, match=r"actor\.master\..*: the save has no elements"):
        plan_copies(half, rank_state(None, MeshConfig(), 0))
