"""RunDir: where a run leaves its files, and the lock that keeps two live runs out of one directory."""

from __future__ import annotations

import fcntl
import json
import os
import platform
import shutil
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from unirl_scale import __version__
from unirl_scale.core.errors import ConfigError
from unirl_scale.train.checkpoint.names import delete_run, was_run

# Also the mark of a run directory: only a directory that has it is ever cleared.
_LOCK = "unirl-scale.lock"


@dataclass(frozen=True, slots=True)
class RunDir:
    """Paths of one run."""

    path: Path

    @property
    def config(self) -> Path:
        """The resolved configuration."""
        return self.path / "config.yaml"

    @property
    def versions(self) -> Path:
        """Python, torch and kernel versions; see `write_versions`."""
        return self.path / "versions.json"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def digests(self) -> Path:
        return self.path / "digests.jsonl"

    @property
    def plot(self) -> Path:
        return self.path / "plot.png"

    @property
    def logs(self) -> Path:
        """One file a rank with what it wrote to stdout and stderr."""
        return self.path / "logs"

    @property
    def has_steps(self) -> bool:
        """Whether a run completed a step here."""
        return self.metrics.exists() and self.metrics.stat().st_size > 0


@contextmanager
def claim(
    run_dir: RunDir,
    checkpoints: Path | None = None,
    *,
    overwrite: bool = False,
    resume: bool = True,
    job: str = "",
) -> Iterator[bool]:
    """Make the directory and hold it for one live run.

    The lock is the kernel's (flock), so that it ends with the process that holds it, however that ends. A run
    that kept checkpoints is left as it is, to be continued; what a run that never completed a step left is
    cleared.

    Args:
        run_dir: where to; parents are made.
        checkpoints: directory of the run's checkpoints, see `checkpoint.names`.
        overwrite: delete the run that is there, its checkpoints too; files that are not a run's are never
            touched.
        resume: a run that is there may be continued.
        job: id of an elastic job, whose processes come and go while it holds the directory.

    Yields:
        Whether this process holds the directory; False when another process of the same job does: then
        nothing is cleared.

    Raises:
        ConfigError: it cannot be made, belongs to a live run, holds a run that cannot or shall not be
            continued, or holds other files.
    """
    _make(run_dir)
    descriptor = os.open(run_dir.path / _LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        if not _lock(descriptor, run_dir, job):
            yield False
            return
        kept = checkpoints is not None and was_run(checkpoints)
        if not overwrite:
            _require_free(run_dir, checkpoints if kept else None, resume=resume)
        if overwrite and checkpoints is not None:
            delete_run(checkpoints)
        if overwrite or not kept:
            _clear(run_dir)
        yield True
    finally:
        os.close(descriptor)


@contextmanager
def hold(run_dir: RunDir, job: str) -> Iterator[bool]:
    """Hold the directory for a job that is at work there and may have lost the process that held it.

    Yields:
        Whether this process holds it now; False when another process of the job does.

    Raises:
        ConfigError: another job has taken it.
    """
    descriptor = os.open(run_dir.path / _LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        yield _lock(descriptor, run_dir, job)
    finally:
        os.close(descriptor)


def _require_free(run_dir: RunDir, checkpoints: Path | None, *, resume: bool) -> None:
    """Raise ConfigError when a run is there that is not going to be continued."""
    if run_dir.has_steps and not (resume and checkpoints is not None):
        why = "it holds a run already and its results are kept"
        if checkpoints is None:
            why += ", and no checkpoint to continue it from"
        raise ConfigError(
            f"run_dir: got {run_dir.path}; {why}; "
            "hint: another run_dir=..., or --overwrite to delete that run"
        )
    if checkpoints is not None and not resume:
        raise ConfigError(
            f"checkpoint.resume: got never, but {checkpoints} holds the checkpoints of a run; "
            "hint: another checkpoint.dir=..., or --overwrite to delete that run"
        )


def write_config(run_dir: RunDir, text: str) -> None:
    """The resolved configuration as YAML."""
    _replace(run_dir.config, text)


def write_versions(run_dir: RunDir, extra: Mapping[str, str]) -> None:
    """Add to versions.json: software, platform, and e.g. {"kernels": what the self-check chose}."""
    known = json.loads(run_dir.versions.read_text()) if run_dir.versions.exists() else software()
    _replace(run_dir.versions, json.dumps({**known, **extra}, indent=2) + "\n")


def software() -> dict[str, str]:
    """Versions of what computes here, by name."""
    packages = {}
    for name in ("torch", "numpy", "pyyaml"):
        try:
            packages[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            packages[name] = "absent"
    return {
        "unirl_scale": __version__,
        "python": platform.python_version(),
        **packages,
        "platform": platform.platform(),
        "machine": platform.machine(),
    }


def _make(run_dir: RunDir) -> None:
    path = run_dir.path
    try:
        path.mkdir(parents=True, exist_ok=True)
        names = {item.name for item in path.iterdir()}
        writable = os.access(path, os.W_OK | os.X_OK)
    except OSError as error:
        reason = (error.strerror or type(error).__name__).lower()
        rule = f"must be a directory this user can make ({reason})"
        raise ConfigError(f"run_dir: got {path}; {rule}; hint: another run_dir=...") from None
    if not writable:
        raise ConfigError(f"run_dir: got {path}; must be writable; hint: another run_dir=...")
    if names and _LOCK not in names:
        raise ConfigError(
            f"run_dir: got {path}; it holds files that are not a run's, e.g. {min(names)}; "
            "hint: a new or empty directory"
        )


def _lock(descriptor: int, run_dir: RunDir, job: str) -> bool:
    """Take the lock; False when a process of the same job has it.

    Raises:
        ConfigError: a process of another one has it.
    """
    of_job = f", job {job}" if job else ""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(descriptor, 200, 0).decode(errors="replace").strip() or "another process"
        if job and holder.endswith(of_job):
            return False
        raise ConfigError(
            f"run_dir: got {run_dir.path}; it is in use by a live run ({holder}); "
            "hint: another run_dir=..., or wait for that run"
        ) from None
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}{of_job}\n".encode(), 0)
    return True


def _clear(run_dir: RunDir) -> None:
    for path in (run_dir.config, run_dir.versions, run_dir.metrics, run_dir.digests, run_dir.plot):
        path.unlink(missing_ok=True)
    if run_dir.logs.is_dir():
        shutil.rmtree(run_dir.logs)


def _replace(path: Path, text: str) -> None:
    """Write whole or not at all."""
    partial = path.with_name(path.name + ".part")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)
