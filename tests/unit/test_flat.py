"""Ownership of the flat space moves whole blocks and loses nothing; decay settings follow the parameter."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from tests.dist.engine_ranks import GQA, MHA
from unirl_scale.core.config import ModelConfig
from unirl_scale.parallel.flat import BLOCK, FlatSpace, padded_blocks, shares
from unirl_scale.parallel.spec import parameter_specs

# Leaves of every size: below a block, whole blocks, blocks and a rest.
MIXED = ModelConfig(hidden_size=64, num_layers=2, num_heads=4, num_kv_heads=2, ffn_size=96, vocab_size=77)
SPACES = [(MHA, 12, range(3, 6)), (GQA, 6, range(6)), (MIXED, 2, range(1, 2)), (MIXED, 1, range(1))]


def space_of(model: ModelConfig, leaves: int, held: range) -> FlatSpace:
    specs = [(n, s) for n, s in enumerate(parameter_specs(model, leaves, "lm")) if s.leafed]
    return FlatSpace(specs, held)


@pytest.mark.parametrize(("model", "leaves", "held"), SPACES)
def test_segments_lie_end_to_end_in_canonical_order(model, leaves, held) -> None:
    space = space_of(model, leaves, held)
    assert [s.offset for s in space.segments[1:]] == [s.offset + s.numel for s in space.segments[:-1]]
    assert [s.first_block for s in space.segments[1:]] == [
        s.first_block + s.blocks for s in space.segments[:-1]
    ]
    assert [(s.param, s.leaf) for s in space.segments] == sorted((s.param, s.leaf) for s in space.segments)
    assert space.numel == sum(s.numel for s in space.segments)
    assert {s.leaf for s in space.segments} == set(held)


@pytest.mark.parametrize("least", [1, 3000, 10**9])
@pytest.mark.parametrize("members", [1, 2, 3, 4, 5, 6, 7, 100])
@pytest.mark.parametrize(("model", "leaves", "held"), SPACES)
def test_owners_share_every_block_once_and_evenly(model, leaves, held, members, least) -> None:
    space = space_of(model, leaves, held)
    owners = shares(space.buckets(members, least))
    pieces = [list(space.pieces(*share.ranges)) for share in owners]
    assert [sum(p.numel for p in own) for own in pieces] == [share.numel for share in owners]
    blocks = [sum(p.stop - p.first for p in own) for own in pieces]
    assert sum(blocks) == space.blocks and max(blocks) - min(blocks) <= 1
    seen = [
        (p.segment.param, p.segment.leaf, b) for own in pieces for p in own for b in range(p.first, p.stop)
    ]
    assert sorted(seen) == [(s.param, s.leaf, b) for s in space.segments for b in range(s.blocks)]
    for p in (p for own in pieces for p in own):
        assert p.start == p.segment.offset + p.first * BLOCK
        assert p.end == min(p.segment.offset + p.stop * BLOCK, p.segment.offset + p.segment.numel)


@pytest.mark.parametrize("least", [1, 3000, 10**9])
@pytest.mark.parametrize(("model", "leaves", "held"), SPACES)
def test_buckets_are_whole_layers_of_the_wanted_size_in_order(model, leaves, held, least) -> None:
    space = space_of(model, leaves, held)
    buckets = space.buckets(3, least)
    assert buckets[0].elements.start == 0 and buckets[-1].elements.stop == space.numel
    for before, after in pairwise(buckets):
        assert before.elements.stop == after.elements.start and before.layer < after.layer
    for bucket in buckets:
        inside = [s.layer for s in space.segments if s.offset in bucket.elements]
        assert min(inside) == bucket.layer
        assert bucket.owned[0].start == bucket.elements.start
        assert bucket.owned[-1].stop == bucket.elements.stop
        assert all(a.stop == b.start for a, b in pairwise(bucket.owned))
        assert len(bucket.elements) >= min(least, space.numel)
        layers = set(inside)
        assert not any(s.layer in layers for s in space.segments if s.offset not in bucket.elements)
    wanted = {1: len({s.layer for s in space.segments}), 10**9: 1}
    assert len(buckets) == wanted.get(least, len(buckets))
    assert len(space.buckets(1, least)) == 1


def test_a_shard_is_its_ranges_end_to_end() -> None:
    space = space_of(MIXED, 1, range(1))
    flat = torch.arange(float(space.numel))
    buckets = space.buckets(3, 1)
    back = torch.full_like(flat, torch.nan)
    for owner, share in enumerate(shares(buckets)):
        shard = share.take(flat)
        assert shard.numel() == share.numel
        for bucket, part in zip(buckets, share.cut(shard), strict=True):
            assert part.numel() == bucket.sizes[owner]
            mine = bucket.owned[owner]
            back[mine.start : mine.stop] = part
    assert torch.equal(back, flat)


def test_a_short_last_block_is_padded_with_zeros() -> None:
    flat = torch.arange(1.0, BLOCK + 4)
    blocks = padded_blocks(flat)
    assert blocks.shape == (2, BLOCK)
    assert torch.equal(blocks.view(-1)[: flat.numel()], flat)
    assert not blocks[1, 3:].any()
    assert padded_blocks(flat[:BLOCK]).shape == (1, BLOCK)
