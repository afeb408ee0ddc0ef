"""A paged cache made from packed rows, for tests of decode attention."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from torch import Tensor

NOWHERE = 10**6  # a table entry that no pool has


def paged(x: Tensor, lengths: Sequence[int], page: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Packed rows [T, ...] as pages [P, page, ...] and their block table.

    Pages lie in a random order with spare ones between them; what no sample wrote is NaN, and entries past a
    sample's end lead nowhere.
    """
    counts = [-(-n // page) for n in lengths]
    numbers = random.Random(seed).sample(range(2 * sum(counts)), sum(counts))
    pages = torch.full((2 * sum(counts), page, *x.shape[1:]), torch.nan, dtype=x.dtype, device=x.device)
    table = torch.full((len(counts), max(counts)), NOWHERE, dtype=torch.int32)
    for entries, count, part in zip(table, counts, x.split(list(lengths))):
        for i in range(count):
            entries[i] = numbers.pop()
            rows = part[i * page : (i + 1) * page]
            pages[entries[i], : len(rows)] = rows
    return pages, table.to(x.device)
