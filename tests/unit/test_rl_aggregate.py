"""Aggregation by global counts: the loss is the same however the minibatch is cut."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch

from unirl_scale.rl.aggregate import token_weights

LOSS = torch.tensor([[1.0, 2.0, 3.0], [4.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
MASK = torch.tensor([[True, True, True], [True, False, False], [False, False, False]])
GOLDEN = [
    ("token-mean", 2.5),
    ("seq-mean-token-sum", 5.0),
    ("seq-mean-token-mean", 3.0),
    ("seq-mean-token-sum-norm", 1.6666667),
]


@pytest.mark.parametrize("aggregation, expected", GOLDEN)
def test_golden(aggregation: str, expected: float) -> None:
    weights = token_weights(MASK, aggregation, 3)  # type: ignore[arg-type]
    assert weights.dtype == torch.float32
    assert (weights * LOSS).sum().item() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("aggregation, _", GOLDEN)
def test_an_empty_row_changes_no_weight(aggregation: str, _: float) -> None:
    with_empty = token_weights(MASK, aggregation, 3)  # type: ignore[arg-type]
    without = token_weights(MASK[:2], aggregation, 3)  # type: ignore[arg-type]
    assert torch.equal(with_empty[:2], without)
    assert torch.equal(with_empty[2], torch.zeros(3)) and not torch.signbit(with_empty).any()


@pytest.mark.parametrize("aggregation, _", GOLDEN)
def test_nothing_kept_gives_zero_weights(aggregation: str, _: float) -> None:
    assert torch.equal(token_weights(torch.zeros_like(MASK), aggregation, 3), torch.zeros(3, 3))  # type: ignore[arg-type]
    assert token_weights(torch.zeros(2, 0, dtype=torch.bool), aggregation, 3).shape == (2, 0)  # type: ignore[arg-type]


def compositions(n: int) -> Iterator[list[int]]:
    """Every way to cut n rows into consecutive micro-batches."""
    for cuts in itertools.product([False, True], repeat=n - 1):
        sizes, run = [], 1
        for cut in cuts:
            if cut:
                sizes.append(run)
                run = 0
            run += 1
        yield [*sizes, run]


@pytest.mark.parametrize("aggregation, expected", GOLDEN)
def test_any_split_gives_the_same_loss(aggregation: str, expected: float) -> None:
    weights = token_weights(MASK, aggregation, 3)  # type: ignore[arg-type]
    for sizes in compositions(3):
        parts = zip(weights.split(sizes), LOSS.split(sizes))
        assert sum((w * x).sum().item() for w, x in parts) == pytest.approx(expected, abs=1e-6)


def test_the_known_wrong_answers_are_wrong() -> None:
    """A mean a micro-batch, summed, is 6; averaged over micro-batches, 3. The right one is 2.5."""
    per_micro_batch = [LOSS[i][MASK[i]].mean().item() for i in range(2)]
    assert sum(per_micro_batch) == 6.0 and sum(per_micro_batch) / 2 == 3.0
    assert (token_weights(MASK, "token-mean") * LOSS).sum().item() == 2.5
