"""Paged key-value cache of the decoder: who holds which page (host), and the pages (device).

A page is `page_size` consecutive positions of one sequence in every layer (Kwon et al. 2023, section 4).
Pages that hold a prompt are shared by the sequences that start with it, and counted. A sequence writes to its
own pages, so the last one, partly filled, is copied by all its holders but one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

SCRATCH = 0  # the page that padding rows of a graph write to; it belongs to no sequence


class PageAllocator:
    """Free list and reference counts of pages 1..pages; page numbers only, no memory."""

    def __init__(self, pages: int) -> None:
        self.pages = pages
        self._free = list(range(pages, 0, -1))
        self._holders = [0] * (pages + 1)

    @property
    def free(self) -> int:
        """Pages that nobody holds."""
        return len(self._free)

    def take(self) -> int | None:
        """A page with one holder, the one that was freed last; None when there is none."""
        if not self._free:
            return None
        page = self._free.pop()
        self._holders[page] = 1
        return page

    def share(self, pages: Iterable[int]) -> None:
        """One more holder of each page."""
        for page in pages:
            assert self._holders[page] > 0, f"page {page} is free"
            self._holders[page] += 1

    def drop(self, pages: Iterable[int]) -> None:
        """One holder less of each page; those without any are free again."""
        for page in pages:
            assert self._holders[page] > 0, f"page {page} is free"
            self._holders[page] -= 1
            if not self._holders[page]:
                self._free.append(page)

    def shared(self, page: int) -> bool:
        """Whether a page has more than one holder."""
        return self._holders[page] > 1


@dataclass(frozen=True, slots=True)
class LayerPages:
    """Keys and values of one layer, [P, page, hk, d] each."""

    k: Tensor
    v: Tensor

    def write(self, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """k, v [T, hk, d] to rows slots int64 [T], counted over all pages."""
        self.k.flatten(0, 1).index_copy_(0, slots, k)
        self.v.flatten(0, 1).index_copy_(0, slots, v)


class KvCache:
    """Pages of all layers on this rank; `pages` of them besides the scratch page."""

    def __init__(
        self,
        *,
        layers: int,
        pages: int,
        page_size: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.pages, self.page_size = pages, page_size
        shape = (layers, 2, pages + 1, page_size, kv_heads, head_dim)
        self._storage = torch.empty(shape, dtype=dtype, device=device)
        self._storage[:, :, SCRATCH].zero_()
        self.layers = [LayerPages(k, v) for k, v in self._storage]

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy pages (from, to), as if all were read before any is written."""
        if pairs:
            source, target = torch.tensor(pairs, device=self._storage.device).unbind(1)
            self._storage[:, :, target] = self._storage[:, :, source]


@dataclass(frozen=True, slots=True)
class CachedRows:
    """Where the new tokens of a decode step stand.

    Attributes:
        lengths: int64 [B], positions of each sequence, the new one included.
        table: int32 [B, N], pages of each sequence.
        slots: int64 [B], cache rows of the new positions.
    """

    lengths: Tensor
    table: Tensor
    slots: Tensor

    @classmethod
    def of(cls, lengths: Tensor, table: Tensor, page_size: int) -> CachedRows:
        """Rows at position lengths - 1; reads nothing back to the host."""
        last = lengths - 1
        page = table.gather(1, (last // page_size).unsqueeze(1)).squeeze(1).long()
        return cls(lengths, table, page * page_size + last % page_size)
