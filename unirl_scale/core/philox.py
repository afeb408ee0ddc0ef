"""Counter-based random numbers: Philox-4x32-10 (Salmon et al. 2011), vectorised over counters.

A value depends on its key and counter alone, never on how many were drawn before, so a sampled token depends
on (seed, step, sample id, position) whatever rank or batch it is drawn in.
"""

from __future__ import annotations

from typing import cast

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint64]
_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (0x9E3779B9, 0xBB67AE85)
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)


def philox4x32(
    counter: tuple[Words, Words, Words, Words], key: tuple[int, int]
) -> tuple[Words, Words, Words, Words]:
    """Ten rounds on arrays of 32-bit words held in uint64; all four have one shape."""
    x0, x1, x2, x3 = counter
    k0, k1 = key
    for _ in range(10):
        p0, p1 = x0 * _MULTIPLIERS[0], x2 * _MULTIPLIERS[1]
        x0, x1, x2, x3 = (
            (p1 >> _HALF) ^ x1 ^ np.uint64(k0),
            p1 & _LOW,
            (p0 >> _HALF) ^ x3 ^ np.uint64(k1),
            p0 & _LOW,
        )
        k0, k1 = (k0 + _WEYL[0]) & 0xFFFFFFFF, (k1 + _WEYL[1]) & 0xFFFFFFFF
    return x0, x1, x2, x3


def sampling_uniforms(seed: int, step: int, sample_ids: list[int], positions: int) -> NDArray[np.float64]:
    """Uniform values in [0, 1) with 53 random bits for every (sample id, response position).

    Args:
        seed: run seed, 0 <= seed < 2**64.
        step: 0 <= step < 2**32.
        sample_ids: global sample ids, 0 <= id < 2**32.

    Returns:
        [len(sample_ids), positions].
    """
    ids = np.asarray(sample_ids, dtype=np.uint64).reshape(-1, 1)
    shape = (ids.shape[0], positions)
    counter = (
        np.broadcast_to(np.arange(positions, dtype=np.uint64), shape),
        np.broadcast_to(ids, shape),
        np.full(shape, step, dtype=np.uint64),
        np.zeros(shape, dtype=np.uint64),
    )
    high, low, _, _ = philox4x32(counter, (seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF))
    bits = ((high >> np.uint64(5)) << np.uint64(26)) | (low >> np.uint64(6))
    return cast(NDArray[np.float64], bits.astype(np.float64) / 2.0**53)
