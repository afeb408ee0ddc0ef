"""Pages are handed out once, counted, and free again after their last holder; the cache moves whole pages."""

from __future__ import annotations

import random

import pytest
import torch

from unirl_scale.parallel.kv_cache import SCRATCH, CachedRows, KvCache, PageAllocator


def test_every_page_is_taken_once_and_never_the_scratch_page() -> None:
    allocator = PageAllocator(5)
    taken = [allocator.take() for _ in range(6)]
    assert sorted(page for page in taken if page is not None) == [1, 2, 3, 4, 5] and taken[-1] is None
    assert SCRATCH not in taken and allocator.free == 0
    allocator.drop([3])
    assert allocator.take() == 3


def test_a_shared_page_is_free_after_its_last_holder() -> None:
    allocator = PageAllocator(2)
    page = allocator.take()
    assert page is not None and not allocator.shared(page)
    allocator.share([page])
    allocator.share([page])
    assert allocator.shared(page)
    allocator.drop([page])
    allocator.drop([page])
    assert not allocator.shared(page) and allocator.free == 1
    allocator.drop([page])
    assert allocator.free == 2


def test_pages_that_nobody_holds_can_be_neither_shared_nor_dropped() -> None:
    allocator = PageAllocator(2)
    with pytest.raises(AssertionError, match="page 1 is free"):
        allocator.share([1])
    with pytest.raises(AssertionError, match="page 2 is free"):
        allocator.drop([2])


def test_random_holders_lose_no_page() -> None:
    rng, allocator, held = random.Random(0), PageAllocator(8), []
    for _ in range(2000):
        action = rng.randrange(3)
        if action == 0:
            page = allocator.take()
            assert (page is None) == (len(set(held)) == 8)
            held += [] if page is None else [page]
        elif held and action == 1:
            held.append(rng.choice(held))
            allocator.share(held[-1:])
        elif held:
            allocator.drop([held.pop(rng.randrange(len(held)))])
        assert allocator.free == 8 - len(set(held))
        assert all(allocator.shared(page) == (held.count(page) > 1) for page in held)


def cache(page_size: int = 4) -> KvCache:
    return KvCache(
        layers=2,
        pages=3,
        page_size=page_size,
        kv_heads=2,
        head_dim=3,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )


def test_rows_are_written_where_the_table_says() -> None:
    kv, table = cache(), torch.tensor([[2, 3], [1, 0]], dtype=torch.int32)
    lengths = torch.tensor([6, 4])
    at = CachedRows.of(lengths, table, 4)
    assert at.slots.tolist() == [3 * 4 + 1, 1 * 4 + 3]
    k, v = torch.randn(2, 2, 3), torch.randn(2, 2, 3)
    kv.layers[1].write(at.slots, k, v)
    assert torch.equal(kv.layers[1].k[3, 1], k[0]) and torch.equal(kv.layers[1].v[1, 3], v[1])


def test_copies_read_all_pages_before_they_write_any() -> None:
    """A page that one copy reads may be the target of another in the same step."""
    kv = cache()
    for number, layer in enumerate(kv.layers):
        for page in range(4):
            layer.k[page], layer.v[page] = 10 * number + page, 100 + 10 * number + page
    kv.copy([(1, 2), (2, 3)])
    for number, layer in enumerate(kv.layers):
        assert layer.k[:, 0, 0, 0].tolist() == [10 * number + p for p in (0, 1, 1, 2)]
        assert layer.v[:, 3, 1, 2].tolist() == [100 + 10 * number + p for p in (0, 1, 1, 2)]


def test_the_scratch_page_starts_finite() -> None:
    """Padding rows of a graph attend to it."""
    kv = cache()
    assert all(bool((t[SCRATCH] == 0).all()) for layer in kv.layers for t in (layer.k, layer.v))
