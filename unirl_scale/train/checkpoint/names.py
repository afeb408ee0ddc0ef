"""Names in the directory of checkpoints. Imports no torch: the launcher asks before any rank starts."""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from unirl_scale.core.config import RunConfig

_NAME = re.compile(r"step-(\d{10})\.(\d{4,})")
MANIFEST, LATEST, RUN, INCARNATIONS = "manifest.json", "latest", "run", "incarnations"
DISTRUSTED = "distrusted"


@dataclass(frozen=True, slots=True, order=True)
class SaveName:
    """A save's directory; ordered by step, then incarnation."""

    step: int
    incarnation: int

    def __str__(self) -> str:
        return f"step-{self.step:010d}.{self.incarnation:04d}"

    @classmethod
    def parse(cls, text: str) -> SaveName | None:
        match = _NAME.fullmatch(text)
        return cls(int(match[1]), int(match[2])) if match else None


def checkpoint_dir(cfg: RunConfig) -> Path:
    """Where a run's durable checkpoints go."""
    return Path(cfg.checkpoint.dir) if cfg.checkpoint.dir else Path(cfg.run_dir) / "checkpoints"


def save_names(path: Path) -> list[SaveName]:
    """All save directories, half-written ones too, newest first: by number, never by clock or alphabet."""
    if not path.is_dir():
        return []
    found = (SaveName.parse(item.name) for item in path.iterdir())
    return sorted((name for name in found if name is not None), reverse=True)


def was_run(path: Path) -> bool:
    """Whether a run ever kept checkpoints, or snapshots, there."""
    return (path / RUN).exists() or bool(save_names(path))


def delete_run(path: Path) -> None:
    """Delete a run's saves and its identity; files of others stay."""
    for name in save_names(path):
        shutil.rmtree(path / str(name))
    for file in (path / RUN, path / LATEST, path / DISTRUSTED, *path.glob("step-*.failed")):
        file.unlink(missing_ok=True)
    for folder in (*path.glob("removed.step-*"), *path.glob("leaving.*")):
        shutil.rmtree(folder, ignore_errors=True)
    shutil.rmtree(path / INCARNATIONS, ignore_errors=True)
