"""Fixtures shared by all tests."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.dist.run_ranks import RankPool
from unirl_scale.launch.environment import numeric_environment

# Before any test loads torch: MKL reads its mode once, and unit tests hold bits too.
os.environ.update(numeric_environment(os.environ, threads=1))


@pytest.fixture(scope="session")
def run_ranks() -> Iterator[RankPool]:
    """`run_ranks(fn, world_size, *args)`: the warm pool of gloo ranks; starts on first use."""
    with RankPool() as pool:
        yield pool
