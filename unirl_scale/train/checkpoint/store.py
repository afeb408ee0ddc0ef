"""The directory of checkpoints: names, `latest`, retention, incarnations.

    checkpoints/
      run                        id of the run
      incarnations/000002        made with O_EXCL by the start it counts; the largest one is the owner
      step-0000000040.0002/      one save: step.incarnation, never written twice
        rank-00000.train.safetensors ...
        manifest.json            last, by rename: a directory without it is half-written
      distrusted                 saves that may hold corrupted state: "INCARNATION STEP", later than that step
      latest                     name of the newest durable save: a hint for people, never trusted

Steps and incarnations decide what is newest; clocks do not.
"""

from __future__ import annotations

import os
import secrets
import shutil
from contextlib import suppress
from pathlib import Path

from unirl_scale.core.errors import CheckpointError
from unirl_scale.train.checkpoint.manifest import Manifest, manifest_bytes, read_manifest, require_whole
from unirl_scale.train.checkpoint.names import (
    DISTRUSTED,
    INCARNATIONS,
    LATEST,
    MANIFEST,
    RUN,
    SaveName,
    save_names,
)


class Store:
    """Checkpoints of one run under a directory that every rank can open."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def folder(self, name: SaveName) -> Path:
        return self.path / str(name)

    def names(self) -> list[SaveName]:
        """All save directories, half-written ones too, newest first."""
        return save_names(self.path)

    def read(self, name: SaveName) -> Manifest:
        """A save's manifest, after every check that reads no tensor.

        Raises:
            CheckpointError: half-written, damaged, truncated or incomplete; names the file.
        """
        return read_save(self.folder(name))

    # ---- who owns the directory -----------------------------------------------------------------------
    def run_id(self) -> str:
        """The run's id; drawn on the first call in a directory."""
        self.path.mkdir(parents=True, exist_ok=True)
        file = self.path / RUN
        if not file.exists():
            write_durably(file, secrets.token_hex(8).encode())
        return file.read_text().strip()

    def run_id_or_none(self) -> str | None:
        """The run's id, or None where this rank sees no run."""
        file = self.path / RUN
        return file.read_text().strip() if file.exists() else None

    def claim_incarnation(self, who: str) -> int:
        """Count this start of the run; unique whoever else starts now. The largest owns the directory.

        Args:
            who: host and process, for people.
        """
        folder = self.path / INCARNATIONS
        folder.mkdir(parents=True, exist_ok=True)
        number = self.incarnation()
        while True:
            number += 1
            try:
                descriptor = os.open(folder / f"{number:06d}", os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
            except FileExistsError:
                continue
            with os.fdopen(descriptor, "w") as file:
                file.write(who + "\n")
            fsync_folder(folder)
            return number

    def incarnation(self) -> int:
        """The newest start of the run; 0 before the first. Saves count too, should the folder be lost."""
        folder = self.path / INCARNATIONS
        claimed = [int(i.name) for i in folder.iterdir() if i.name.isdecimal()] if folder.is_dir() else []
        return max([0, *claimed, *(name.incarnation for name in self.names())])

    def require_owner(self, incarnation: int) -> None:
        """Raise CheckpointError when a later start of the run owns the directory."""
        newest = self.incarnation()
        if newest != incarnation:
            raise CheckpointError(
                f"{self.path}: incarnation {incarnation} is fenced off by {newest}, a later start of this run"
            )

    # ---- saves that may be corrupted ------------------------------------------------------------------
    def distrust(self, incarnation: int, after_step: int) -> None:
        """Let nobody continue from saves that this start of the run made after a step."""
        file = self.path / DISTRUSTED
        before = file.read_text() if file.exists() else ""
        write_durably(file, f"{before}{incarnation} {after_step}\n".encode())

    def distrusted(self) -> dict[int, int]:
        """Incarnation -> the last step of it that is trusted, for those of which not all are."""
        file, found = self.path / DISTRUSTED, dict[int, int]()
        for line in file.read_text().splitlines() if file.exists() else ():
            incarnation, step = map(int, line.split())
            found[incarnation] = min(step, found.get(incarnation, step))
        return found

    # ---- after a save ---------------------------------------------------------------------------------
    def publish(self, name: SaveName, manifest: Manifest) -> None:
        """Make a save the newest durable one: manifest last, by rename."""
        require_whole(manifest)
        write_durably(self.folder(name) / MANIFEST, manifest_bytes(manifest))
        fsync_folder(self.path)

    def point_latest(self, name: SaveName) -> None:
        write_durably(self.path / LATEST, f"{name}\n".encode())

    def prune(self, keep: int, incarnation: int) -> list[SaveName]:
        """Delete saves older than the newest `keep` durable ones, and half-written ones of dead incarnations.

        A save counts as kept only while it is trusted and its manifest and file lengths hold, so damaged ones
        never push out the only good one.
        """
        names, distrusted = self.names(), self.distrusted()
        trusted = [n for n in names if n.step <= distrusted.get(n.incarnation, n.step)]
        good = [name for name in trusted if self._is_sound(name)][:keep]
        if not good:
            return []
        full = len(good) == keep
        removed = [
            name
            for name in names
            if (full and name < good[-1]) or (name not in good and self._is_dead(name, incarnation))
        ]
        for name in removed:
            self.remove(name)
        for mark in self.path.glob("step-*.failed"):
            mark.unlink(missing_ok=True)
        return removed

    def _is_sound(self, name: SaveName) -> bool:
        try:
            self.read(name)
        except CheckpointError:
            return False
        return True

    def _is_dead(self, name: SaveName, incarnation: int) -> bool:
        return name.incarnation < incarnation and not (self.folder(name) / MANIFEST).exists()

    def remove(self, name: SaveName) -> None:
        """Delete a save. Out of sight first, by rename: no rank can add a file to it then, and what a kill
        leaves half-deleted is not a save."""
        folder = self.folder(name)
        hidden = folder.with_name(f"removed.{name}")
        with suppress(FileNotFoundError):
            folder.rename(hidden)
        shutil.rmtree(hidden, ignore_errors=True)

    # ---- saves that failed ----------------------------------------------------------------------------
    def mark_failed(self, name: SaveName, reason: str) -> None:
        """Tell ranks that have not begun a save that there is none any more."""
        (self.path / f"{name}.failed").write_text(reason)

    def failure(self, name: SaveName) -> str | None:
        """Why a save was given up, or None."""
        mark = self.path / f"{name}.failed"
        return mark.read_text() if mark.exists() else None


def read_save(folder: Path) -> Manifest:
    """`Store.read` of any directory.

    Raises:
        CheckpointError: half-written, damaged, truncated or incomplete; names the file.
    """
    file = folder / MANIFEST
    try:
        data = file.read_bytes()
    except FileNotFoundError:
        raise CheckpointError(f"{folder}: half-written (it has no {MANIFEST})") from None
    except OSError as error:
        raise CheckpointError(f"{file}: {(error.strerror or 'unreadable').lower()}") from None
    manifest = read_manifest(data, str(file))
    for part in manifest.parts:
        try:
            size = (folder / part.file).stat().st_size
        except OSError:
            raise CheckpointError(f"{folder / part.file}: missing") from None
        if size != part.num_bytes:
            raise CheckpointError(f"{folder / part.file}: truncated, {size} of {part.num_bytes} bytes")
    require_whole(manifest)
    return manifest


def write_durably(path: Path, data: bytes) -> None:
    """Whole or not at all, and on the device when this returns."""
    partial = path.with_name(path.name + ".part")
    with partial.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
    fsync_folder(path.parent)


def fsync_folder(path: Path) -> None:
    """Make a folder's entries durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
