"""Runs that fail, and the undisturbed run that they are held against."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fault.train_job import LONG_STEPS, TrainJob


@pytest.fixture
def job(tmp_path: Path) -> Iterator[TrainJob]:
    """An elastic run."""
    job = TrainJob(tmp_path, options=("elastic.enabled=true",))
    try:
        yield job
    finally:
        job.end()


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Run directory of one rank that nothing happened to; five steps."""
    yield from _alone(tmp_path_factory)


@pytest.fixture(scope="session")
def undisturbed_long(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The same with LONG_STEPS steps."""
    yield from _alone(tmp_path_factory, f"stages.0.num_steps={LONG_STEPS}")


def _alone(tmp_path_factory: pytest.TempPathFactory, *options: str) -> Iterator[Path]:
    job = TrainJob(tmp_path_factory.mktemp("undisturbed"))
    try:
        job.train_well("mesh.actor.dp=1", *options)
        yield job.run_dir
    finally:
        job.end()
        shutil.rmtree(job.folder, ignore_errors=True)
