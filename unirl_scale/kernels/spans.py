"""Spans: where each sample's rows lie in a packed [T, ...] activation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Spans:
    """B samples laid end to end without padding between them.

    Attributes:
        lengths: rows of each sample, in order.
        offsets: first row of each sample, plus the total: B + 1 entries.
        cu_seqlens: `offsets` as int32 on the compute device, for varlen kernels.
    """

    lengths: tuple[int, ...]
    offsets: tuple[int, ...]
    cu_seqlens: Tensor

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device | str = "cpu") -> Spans:
        """Spans of consecutive samples with these row counts."""
        offsets = [0]
        for length in lengths:
            offsets.append(offsets[-1] + int(length))
        cu = torch.tensor(offsets, dtype=torch.int32, device=device)
        return cls(tuple(int(n) for n in lengths), tuple(offsets), cu)

    @property
    def total(self) -> int:
        """Rows in all (T)."""
        return self.offsets[-1]

    @property
    def max_length(self) -> int:
        return max(self.lengths, default=0)

    def __len__(self) -> int:
        return len(self.lengths)
