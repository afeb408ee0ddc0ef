"""A paged cache gives the bits of training's attention row, for any page size, order of pages and batch.

What a sample did not write is NaN here, and no pool has the table entries past a length: an op that reads
either shows.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.paging import paged
from unirl_scale.core.errors import ShapeError
from unirl_scale.kernels.check import same_bits
from unirl_scale.kernels.reference import ReferenceOps
from unirl_scale.kernels.spans import Spans

LENGTHS = [1, 31, 32, 33, 64, 100, 15, 16, 17]
PAGES = [1, 8, 16, 32, 64, 96, 128]


def case(dtype: torch.dtype, lengths: list[int] = LENGTHS) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(q, k, v, o of training) for 6 query heads on 3 kv heads."""
    g = torch.Generator().manual_seed(1)
    total = sum(lengths)
    q, k, v = (torch.randn(total, h, 8, generator=g).to(dtype) for h in (6, 3, 3))
    o, _ = ReferenceOps().attention(q, k, v, Spans.of(lengths), 0.3)
    return q, k, v, o


def last_rows(lengths: list[int]) -> Tensor:
    return torch.tensor(lengths).cumsum(0) - 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("page", PAGES)
def test_every_page_size_gives_trainings_rows(page: int, dtype: torch.dtype) -> None:
    q, k, v, o = case(dtype)
    k_pages, table = paged(k, LENGTHS, page)
    v_pages, _ = paged(v, LENGTHS, page)
    rows = last_rows(LENGTHS)
    got = ReferenceOps().attention_decode(q[rows], k_pages, v_pages, table, torch.tensor(LENGTHS), 0.3)
    assert same_bits(got, o[rows])


def test_earlier_positions_ignore_what_was_written_after_them() -> None:
    q, k, v, o = case(torch.float32)
    (k_pages, table), (v_pages, _) = (paged(t, LENGTHS, 16) for t in (k, v))
    lengths = torch.tensor([max(1, n - 5) for n in LENGTHS])
    rows = last_rows(LENGTHS) - torch.tensor(LENGTHS) + lengths
    got = ReferenceOps().attention_decode(q[rows], k_pages, v_pages, table, lengths, 0.3)
    assert same_bits(got, o[rows])


def test_samples_share_pages_and_leave_without_a_trace() -> None:
    q, k, v, o = case(torch.float32, [40])
    (k_pages, table), (v_pages, _) = (paged(t, [40], 16) for t in (k, v))
    shared = table.expand(3, -1).contiguous()
    lengths = torch.tensor([40, 33, 17])
    got = ReferenceOps().attention_decode(q[lengths - 1], k_pages, v_pages, shared, lengths, 0.3)
    assert same_bits(got, o[lengths - 1])
    alone = ReferenceOps().attention_decode(q[32:33], k_pages, v_pages, table, lengths[1:2], 0.3)
    assert same_bits(alone, got[1:2])


def test_one_sample_of_one_head_has_the_same_row() -> None:
    q, k, v, o = case(torch.float32, [77])
    (k_pages, table), (v_pages, _) = (paged(t[:, 1:2], [77], 16) for t in (k, v))
    got = ReferenceOps().attention_decode(q[76:, 3:4], k_pages, v_pages, table, torch.tensor([77]), 0.3)
    assert same_bits(got, o[76:, 3:4])


# ---- negative controls ------------------------------------------------------------------------------
def test_a_wrong_table_entry_shows() -> None:
    q, k, v, o = case(torch.float32)
    (k_pages, table), (v_pages, _) = (paged(t, LENGTHS, 16) for t in (k, v))
    table[5, 2], table[5, 3] = int(table[5, 3]), int(table[5, 2])
    rows = last_rows(LENGTHS)
    got = ReferenceOps().attention_decode(q[rows], k_pages, v_pages, table, torch.tensor(LENGTHS), 0.3)
    assert [same_bits(a, b) for a, b in zip(got, o[rows])] == [i != 5 for i in range(len(LENGTHS))]


def test_a_stale_page_shows() -> None:
    q, k, v, o = case(torch.float32)
    (k_pages, table), (v_pages, _) = (paged(t, LENGTHS, 16) for t in (k, v))
    v_pages[table[4, 1]] = v_pages[table[5, 0]]
    rows = last_rows(LENGTHS)
    got = ReferenceOps().attention_decode(q[rows], k_pages, v_pages, table, torch.tensor(LENGTHS), 0.3)
    assert [same_bits(a, b) for a, b in zip(got, o[rows])] == [i != 4 for i in range(len(LENGTHS))]


# ---- bad input --------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("page", "hint"), [(24, "16 or 32"), (48, "32 or 64"), (33, "32 or 64"), (5, "4 or 32"), (0, "1 or 32")]
)
def test_a_page_that_cuts_a_tile_is_refused(page: int, hint: str) -> None:
    q, k = torch.zeros(2, 4, 8), torch.zeros(3, page, 2, 8)
    table, lengths = torch.zeros(2, 1, dtype=torch.int32), torch.ones(2, dtype=torch.int64)
    with pytest.raises(ShapeError, match=rf"pages of {page} positions; .* tile of 32\nhint: {hint}"):
        ReferenceOps().attention_decode(q, k, k, table, lengths, 1.0)


@pytest.mark.parametrize("wrong", ["table dtype", "table rows", "heads", "width", "lengths"])
def test_shapes_that_do_not_fit_are_named(wrong: str) -> None:
    q, k = torch.zeros(2, 4, 8), torch.zeros(3, 16, 2, 8)
    table, lengths = torch.zeros(2, 1, dtype=torch.int32), torch.ones(2, dtype=torch.int64)
    if wrong == "table dtype":
        table = table.long()
    elif wrong == "table rows":
        table = table[:1]
    elif wrong == "heads":
        q = torch.zeros(2, 3, 8)
    elif wrong == "width":
        q = torch.zeros(2, 4, 16)
    else:
        lengths = lengths.int()
    with pytest.raises(ShapeError, match=r"attention_decode: got \[2, .*k and v pages \[P, page, hk, d\]"):
        ReferenceOps().attention_decode(q, k, k, table, lengths, 1.0)
