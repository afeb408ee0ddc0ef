"""The order of prompts is a pure function of (seed, epoch, position)."""

from __future__ import annotations

import numpy as np
import pytest

from unirl_scale.train.data_order import epoch_permutation, prompts_at


def test_an_epoch_shows_every_prompt_once() -> None:
    for size in (1, 2, 3, 10, 1000):
        assert sorted(epoch_permutation(7, 0, size).tolist()) == list(range(size))


def test_epochs_and_seeds_differ_and_zero_is_a_seed() -> None:
    orders = {
        tuple(epoch_permutation(s, e, 50).tolist()) for s in (0, 1, -1, 2**63 + 1, 2**63) for e in (0, 1)
    }
    assert len(orders) == 10 and tuple(range(50)) not in orders


def test_the_order_is_pinned() -> None:
    """A change here makes every checkpoint's data position point at other prompts."""
    assert epoch_permutation(0, 0, 8).tolist() == [0, 6, 3, 2, 1, 7, 4, 5]
    assert epoch_permutation(5, 3, 8).tolist() == [4, 5, 1, 2, 3, 7, 0, 6]


@pytest.mark.parametrize("batch", [1, 3, 7, 10, 23])
def test_batches_of_any_size_walk_the_same_sequence(batch: int) -> None:
    whole = prompts_at(3, 0, 70, 10)
    parts = [i for c in range(0, 70, batch) for i in prompts_at(3, c, min(batch, 70 - c), 10)]
    assert parts == whole
    assert whole == np.concatenate([epoch_permutation(3, e, 10) for e in range(7)]).tolist()
    assert whole[:10] != whole[10:20]


def test_resuming_on_an_epoch_boundary_starts_the_next_epoch() -> None:
    assert prompts_at(3, 10, 10, 10) == epoch_permutation(3, 1, 10).tolist()
    assert prompts_at(3, 10, 0, 10) == []


@pytest.mark.parametrize("cursor, count, size", [(0, 1, 0), (-1, 1, 5), (0, -1, 5)])
def test_nonsense_is_refused(cursor: int, count: int, size: int) -> None:
    with pytest.raises(ValueError, match="data order"):
        prompts_at(0, cursor, count, size)
