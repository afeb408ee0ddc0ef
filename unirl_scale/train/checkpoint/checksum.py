"""One word of evidence a chunk: fast enough to be on by default on every tier.

A chunk is seen as a matrix of 64-bit words. The sums of its rows and of its columns, modulo 2^64, are a
product code of two parity codes (Elias 1954): a change of up to three words leaves some row or column with
exactly one changed word, whose sum then differs, whatever the change. SHA-256 folds the sums, their order
included, into 64 bits. The sums run at memory speed; hashing every byte would be eight times slower than
copying it.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

CHUNK_BYTES = 4 << 20
_COLUMNS = 1024


def chunk_sum(data: Tensor) -> str:
    """Checksum of up to CHUNK_BYTES bytes.

    Args:
        data: uint8 [n], contiguous, on any device.

    Returns:
        16 hex digits. The length counts: zeros at the end are not free.
    """
    n = data.numel()
    words = n // 8
    body = (
        data[: words * 8].view(torch.int64) if _aligned(data) else data[: words * 8].clone().view(torch.int64)
    )
    full = words // _COLUMNS * _COLUMNS
    matrix = body[:full].view(-1, _COLUMNS)
    digest = hashlib.sha256(n.to_bytes(8, "little"))
    for sums in (matrix.sum(1), matrix.sum(0), body[full:], data[words * 8 :]):
        digest.update(sums.cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]


def chunk_sums(data: Tensor) -> list[str]:
    """`chunk_sum` of each CHUNK_BYTES of uint8 [n]; the last one may be short."""
    return [chunk_sum(data[i : i + CHUNK_BYTES]) for i in range(0, data.numel(), CHUNK_BYTES)]


def _aligned(data: Tensor) -> bool:
    return data.data_ptr() % 8 == 0 and data.storage_offset() % 8 == 0
