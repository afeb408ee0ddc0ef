"""A checkpoint's actor, critic or reference as a Hugging Face directory, one stored parameter at a time."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from unirl_scale.core.errors import CheckpointError, ConfigError
from unirl_scale.core.pretrained import CONFIG, INDEX, WEIGHTS, model_to_plain
from unirl_scale.parallel.spec import ParamSpec, Part, parameter_specs
from unirl_scale.train.checkpoint.entries import Entry, Slab, Span
from unirl_scale.train.checkpoint.manifest import Manifest, SavedRole, stored_by_leaf
from unirl_scale.train.checkpoint.reading import Index, chunk_reads, copies_from, read_files
from unirl_scale.train.checkpoint.shard import DTYPES, ITEM_BYTES, header_bytes
from unirl_scale.train.checkpoint.store import fsync_folder, read_save
from unirl_scale.train.pretrained import hub_name

SHARD_BYTES = 5 << 30
_TORCH_NAMES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """What was written."""

    step: int
    tensors: int
    num_bytes: int
    files: int


def export(folder: Path, out: Path, role: str, dtype: str) -> Exported:
    """Write `config.json` and safetensors files that Hugging Face tools load; every byte read is verified.

    Args:
        folder: of one durable checkpoint.
        out: a directory that does not exist yet.
        role: "actor", "critic" or "reference".
        dtype: "F32", "BF16" or "F16"; fp32 master weights are rounded to it.

    Raises:
        CheckpointError: the checkpoint is damaged or does not have that role.
        ConfigError: the directory exists.
    """
    if out.exists():
        raise ConfigError(f"{out}: it exists; must be a new directory")
    manifest = read_save(folder)
    if role not in manifest.head.roles:
        raise CheckpointError(f"{folder}: it has no {role}; it has {', '.join(manifest.head.roles)}")
    saved = manifest.head.roles[role]
    partial = out.with_name(out.name + ".part")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    files = _plan_files(saved, dtype)
    source = _Source(folder, manifest, role)
    for name, parts in files.items():
        _write_file(partial / name, parts, source, dtype)
    _write_texts(partial, manifest, saved, files, dtype)
    fsync_folder(partial)
    partial.rename(out)
    return Exported(
        step=manifest.head.step,
        tensors=sum(len(parts) for parts in files.values()),
        num_bytes=sum(_bytes(p, dtype) for parts in files.values() for _, p in parts),
        files=len(files),
    )


# ---- what goes where ----------------------------------------------------------------------------------
def _parts(saved: SavedRole) -> Iterator[tuple[ParamSpec, Part]]:
    """Logical tensors in the order they are stored in."""
    for spec in parameter_specs(saved.model, saved.leaves, saved.head):
        for part in spec.parts:
            yield spec, part
            # Qwen3 with attention_bias has an output bias too; ours has none, that is zeros.
            if part.name.endswith("v_proj.bias") and saved.model.qk_norm:
                name = part.name.replace("v_proj", "o_proj")
                yield spec, Part(name=name, rows=saved.model.hidden_size, cols=0, cut="none", std=0.0)


def _plan_files(saved: SavedRole, dtype: str) -> dict[str, list[tuple[ParamSpec, Part]]]:
    """File name -> its tensors; a file ends where the next tensor would pass SHARD_BYTES."""
    groups: list[list[tuple[ParamSpec, Part]]] = [[]]
    size = 0
    for spec, part in _parts(saved):
        if groups[-1] and size + _bytes(part, dtype) > SHARD_BYTES:
            groups.append([])
            size = 0
        groups[-1].append((spec, part))
        size += _bytes(part, dtype)
    if len(groups) == 1:
        return {WEIGHTS: groups[0]}
    count = len(groups)
    return {f"model-{i:05d}-of-{count:05d}.safetensors": group for i, group in enumerate(groups, start=1)}


def _shape(part: Part) -> tuple[int, ...]:
    return (part.rows, part.cols) if part.cols else (part.rows,)


def _bytes(part: Part, dtype: str) -> int:
    return part.rows * max(part.cols, 1) * ITEM_BYTES[dtype]


# ---- reading ------------------------------------------------------------------------------------------
class _Source:
    """Stored parameters of one role of a checkpoint, joined from their leaves."""

    def __init__(self, folder: Path, manifest: Manifest, role: str) -> None:
        self._folder, self._role, self._saved = folder, role, manifest.head.roles[role]
        self._index: Index = stored_by_leaf(manifest)
        self._kept: tuple[str, dict[str, Tensor]] | None = None

    def logical(self, spec: ParamSpec, part: Part) -> Tensor:
        """A logical tensor, fp32 or as it is stored."""
        if part.name not in {p.name for p in spec.parts}:
            return torch.zeros(_shape(part))
        if self._kept is None or self._kept[0] != spec.name:
            self._kept = spec.name, logical_parts(spec, self._stored(spec))
        return self._kept[1][part.name]

    def _stored(self, spec: ParamSpec) -> Tensor:
        """[W, *shape], or [1, *shape] when replicated."""
        leaves = self._saved.leaves if spec.leafed else 1
        kind = "master" if self._saved.trained else "weight"
        first = self._index[self._role, kind, spec.name, 0][0][0]
        tensor = torch.empty(leaves * spec.numel, dtype=DTYPES[first.dtype])
        spans = [Span(name=spec.name, leaf=leaf, start=0, stop=spec.numel) for leaf in range(leaves)]
        entries = tuple(Entry(role=self._role, kind=kind, span=span) for span in spans)  # type: ignore[arg-type]
        slab = Slab(tensor=tensor, entries=entries, group="train", written=False)
        reads = chunk_reads(copies_from(self._index, [slab]))
        read_files(reads, lambda part: self._folder / part.file, mapped=False)
        return tensor.view(leaves, *spec.shape)


def logical_parts(spec: ParamSpec, stored: Tensor) -> dict[str, Tensor]:
    """The logical tensors of a stored parameter [leaves, *shape]: the inverse of `spec.initial_leaf`."""
    leaves = len(stored)
    out: dict[str, Tensor] = {}
    start = 0
    for part in spec.parts:
        rows = -(-part.rows // leaves) if part.cut == "rows" else part.rows
        piece = stored[:, start : start + rows]
        start += rows
        if part.cut == "cols":
            whole = torch.cat(tuple(piece), dim=1)
        else:
            whole = piece.flatten(0, 1)[: part.rows]
        out[part.name] = whole.reshape(_shape(part))
    return out


# ---- writing ------------------------------------------------------------------------------------------
def _write_file(path: Path, parts: list[tuple[ParamSpec, Part]], source: _Source, dtype: str) -> None:
    rows, position = [], 0
    for _, part in parts:
        rows.append((hub_name(part.name), dtype, _shape(part), position, position + _bytes(part, dtype)))
        position = rows[-1][4]
    with path.open("wb") as file:
        file.write(header_bytes(iter(rows), {"format": "pt"}))
        for spec, part in parts:
            tensor = source.logical(spec, part).to(DTYPES[dtype]).contiguous()
            file.write(memoryview(tensor.view(-1).view(torch.uint8).numpy()))
        file.flush()
        os.fsync(file.fileno())


def _write_texts(
    folder: Path,
    manifest: Manifest,
    saved: SavedRole,
    files: dict[str, list[tuple[ParamSpec, Part]]],
    dtype: str,
) -> None:
    rollout = manifest.head.config["rollout"]
    longest = rollout["max_prompt_tokens"] + rollout["max_response_tokens"]
    head = "lm" if saved.head == "lm" else "value"
    plain = model_to_plain(saved.model, head, _TORCH_NAMES[dtype], longest)
    (folder / CONFIG).write_text(json.dumps(plain, indent=2) + "\n", encoding="utf-8")
    if len(files) > 1:
        where = {hub_name(part.name): name for name, parts in files.items() for _, part in parts}
        total = sum(_bytes(part, dtype) for parts in files.values() for _, part in parts)
        index = {"metadata": {"total_size": total}, "weight_map": where}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
