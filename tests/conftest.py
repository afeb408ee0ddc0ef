"""Fixtures shared by all tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.dist.run_ranks import RankPool


@pytest.fixture(scope="session")
def run_ranks() -> Iterator[RankPool]:
    """`run_ranks(fn, world_size, *args)`: the warm pool of gloo ranks; starts on first use."""
    with RankPool() as pool:
        yield pool
