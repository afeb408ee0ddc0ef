"""`unirl-scale checkpoint`: which there are, whether they are sound, and one of them for other tools."""

from __future__ import annotations

from pathlib import Path

from unirl_scale.core.errors import CheckpointError, ConfigError
from unirl_scale.launch.console import Console
from unirl_scale.launch.rank_process import FAILED
from unirl_scale.train.checkpoint.export import export
from unirl_scale.train.checkpoint.manifest import Manifest
from unirl_scale.train.checkpoint.names import LATEST, SaveName, save_names
from unirl_scale.train.checkpoint.reading import DamagedError, check_file
from unirl_scale.train.checkpoint.store import read_save

_DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}


def saves_at(path: str) -> list[Path]:
    """The checkpoints that a path names, newest first: one, or all of a run.

    Raises:
        ConfigError: there are none.
    """
    folder = Path(path)
    if SaveName.parse(folder.resolve().name) is not None and folder.is_dir():
        return [folder]
    for place in (folder, folder / "checkpoints"):
        names = save_names(place)
        if names:
            return [place / str(name) for name in names]
    raise ConfigError(f"{path}: it has no checkpoints; must be a run directory or a checkpoint")


def list_saves(path: str, console: Console) -> int:
    """A table of checkpoints; 1 when none of them is sound."""
    saves = saves_at(path)
    rows = [("checkpoint", "step", "stage", "ranks", "size", "state")]
    pointer = saves[0].parent / LATEST
    latest = pointer.read_text(encoding="utf-8", errors="replace").strip() if pointer.exists() else ""
    sound = 0
    for save in saves:
        try:
            manifest = read_save(save)
        except CheckpointError as error:
            name = SaveName.parse(save.name)
            step = str(name.step) if name else "?"
            rows.append((save.name, step, "", "", "", str(error).removeprefix(f"{save}").lstrip(":/ ")))
            continue
        sound += 1
        state = "durable, latest" if save.name == latest else "durable"
        rows.append((save.name, str(manifest.head.step), *_facts(manifest), state))
    console.table(rows)
    return 0 if sound else FAILED


def _facts(manifest: Manifest) -> tuple[str, str, str]:
    """Stage, ranks and size."""
    state = manifest.head.state
    stage = manifest.head.config["stages"][state.stage]
    where = f"{stage['name']} {state.stage_step}/{stage['num_steps']}"
    return where, str(manifest.head.writers), f"{manifest.num_bytes / 2**20:.1f} MiB"


def verify_saves(path: str, console: Console) -> int:
    """Read every byte of the checkpoints and compare it with its checksum; 1 when any is damaged."""
    damaged = 0
    for save in saves_at(path):
        try:
            manifest = read_save(save)
            for part in manifest.parts:
                check_file(save / part.file, part)
            console.line(f"{save}: sound, {len(manifest.parts)} files, {manifest.num_bytes} bytes")
        except (CheckpointError, DamagedError) as error:
            damaged += 1
            console.line(f"DAMAGED {error}")
    return FAILED if damaged else 0


def export_save(path: str, out: str, role: str, dtype: str, console: Console) -> int:
    """Write a Hugging Face directory from the newest sound checkpoint that the path names.

    Raises:
        CheckpointError: none is sound.
        ConfigError: there is none, or the directory exists.
    """
    errors = []
    for save in saves_at(path):
        try:
            read_save(save)
        except CheckpointError as error:
            errors.append(str(error))
            continue
        done = export(save, Path(out), role, _DTYPES[dtype])
        for text in errors:
            console.line(f"skipped {text}")
        console.line(
            f"{out}: {role} of step {done.step}, {done.tensors} tensors, {done.num_bytes} bytes of {dtype} "
            f"in {done.files} file{'s' * (done.files > 1)}"
        )
        return 0
    raise CheckpointError("no checkpoint is sound" + "".join(f"\n  {text}" for text in errors))
