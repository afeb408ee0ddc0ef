"""Which prompt comes when: a pure function of (seed, epoch, position), never of history or rank.

The global cursor counts the prompts used since the start of training. A resumed run therefore needs one
integer to continue exactly, also from the end of an epoch.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_ORDER_DOMAIN = 0x4F72646572  # keeps these Philox streams apart from every other use of the run's seed


def epoch_permutation(seed: int, epoch: int, size: int) -> NDArray[np.int64]:
    """The order of one epoch: int64 [size], a permutation of range(size).

    Sorts raw Philox words instead of calling a shuffle, whose algorithm numpy may change.

    Args:
        seed: any integer, taken modulo 2^64.
        epoch: >= 0.
        size: prompts in the data set.
    """
    key = np.array([seed % 2**64, _ORDER_DOMAIN], dtype=np.uint64)
    counter = np.array([0, 0, epoch, 0], dtype=np.uint64)
    words = np.random.Philox(key=key, counter=counter).random_raw(size)
    return np.argsort(words, kind="stable")


def prompts_at(seed: int, cursor: int, count: int, size: int) -> list[int]:
    """Prompt indices at cursor .. cursor + count - 1; may run over the end of an epoch, or of several.

    Raises:
        ValueError: an empty data set, or a negative cursor or count.
    """
    if size < 1 or cursor < 0 or count < 0:
        raise ValueError(f"data order: got size {size}, cursor {cursor}, count {count}")
    out: list[int] = []
    while count > 0:
        epoch, start = divmod(cursor, size)
        chunk = epoch_permutation(seed, epoch, size)[start : start + count].tolist()
        out += chunk
        cursor += len(chunk)
        count -= len(chunk)
    return out
