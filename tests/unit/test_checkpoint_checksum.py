"""A chunk's checksum sees every change of up to three words, order, length, and the same on every tier."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from unirl_scale.train.checkpoint.checksum import CHUNK_BYTES, chunk_sum, chunk_sums

SIZES = [0, 1, 7, 8, 9, 8191, 8192, 8200, 40_000, 300_001]


def bytes_of(size: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("size", [s for s in SIZES if s])
def test_any_flipped_bit_is_seen(size: int) -> None:
    data, rng = bytes_of(size), random.Random(size)
    before = chunk_sum(data)
    for at in {0, size - 1, *(rng.randrange(size) for _ in range(30))}:
        bit = 1 << rng.randrange(8)
        data[at] ^= bit
        assert chunk_sum(data) != before, f"byte {at}"
        data[at] ^= bit
    assert chunk_sum(data) == before


@pytest.mark.parametrize("words", [2, 3])
def test_changes_of_a_few_words_that_cancel_in_a_plain_sum_are_seen(words: int) -> None:
    data, rng = bytes_of(80_000), random.Random(1)
    view = data.view(torch.int64)
    before, plain = chunk_sum(data), int(view.sum())
    for _ in range(200):
        places = rng.sample(range(len(view)), words)
        old = view[places].clone()
        # The worst case of modular sums: changes that add up to nothing, such as two flipped top bits.
        changes = [-(2**63)] * 2 if words == 2 else [2**61, 2**61, -(2**62)]
        view[places] += torch.tensor(changes)
        assert int(view.sum()) == plain, "the control: a plain sum is blind to this"
        assert chunk_sum(data) != before
        view[places] = old


def test_exchanged_pieces_are_seen() -> None:
    data = bytes_of(1 << 17)
    before = chunk_sum(data)
    for piece in (8, 1024, 8192):  # words, part of a row, whole rows
        swapped = data.clone()
        swapped[:piece], swapped[piece : 2 * piece] = data[piece : 2 * piece], data[:piece]
        assert chunk_sum(swapped) != before, piece


def test_zeros_at_the_end_are_not_free() -> None:
    assert len({chunk_sum(torch.zeros(n, dtype=torch.uint8)) for n in SIZES}) == len(SIZES)


def test_position_in_a_larger_buffer_does_not_matter() -> None:
    data = bytes_of(10_001)
    for shift in (0, 1, 4, 8):
        moved = torch.cat([torch.zeros(shift, dtype=torch.uint8), data])[shift:]
        assert chunk_sum(moved) == chunk_sum(data)


def test_a_file_is_summed_chunk_by_chunk() -> None:
    data = bytes_of(2 * CHUNK_BYTES + 5)
    sums = chunk_sums(data)
    assert sums == [chunk_sum(piece) for piece in data.split(CHUNK_BYTES)]
    assert len(sums) == 3
