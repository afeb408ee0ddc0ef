"""What the ranks of the ordered-reduction tests run, and the one-process truth they are held against."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor

from unirl_scale.comm.accumulate import tree_sum_nodes
from unirl_scale.comm.groups import GroupFactory
from unirl_scale.comm.ordered import OrderedReducer


def wild(rows: int, elements: int, seed: int = 0) -> Tensor:
    """fp32 leaves of magnitude 1e-6..1e4 with both signs, some -0, +0 and subnormals: any other order shows."""
    generator = torch.Generator().manual_seed(seed)
    exponent = torch.rand(rows, elements, generator=generator) * 10 - 6
    values = 10.0**exponent * torch.randn(rows, elements, generator=generator).sign()
    kind = torch.rand(rows, elements, generator=generator)
    values[kind < 0.10] = -0.0
    values[(kind >= 0.10) & (kind < 0.13)] = 0.0
    values[(kind >= 0.13) & (kind < 0.18)] = 1e-42
    values[:, :2] = -0.0  # a column that is -0 on every rank must stay -0
    return values


def naive_tree(leaves: Tensor) -> Tensor:
    """The definition, recursively, in one process."""
    n = leaves.shape[0]
    if n == 1:
        return leaves[0]
    middle = 1
    while middle * 2 < n:
        middle *= 2
    return naive_tree(leaves[:middle]) + naive_tree(leaves[middle:])


def same_bits(left: Tensor, right: Tensor) -> bool:
    """Equal shapes, dtypes and bits: unlike torch.equal, -0 is not +0."""
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    return torch.equal(left.contiguous().view(-1).view(torch.uint8), right.contiguous().view(-1).view(torch.uint8))


def random_ranges(total: int, parts: int, seed: int) -> tuple[range, ...]:
    """A contiguous partition that may have empty parts."""
    rng = random.Random(seed)
    cuts = [0, *sorted(rng.randint(0, total) for _ in range(parts - 1)), total]
    return tuple(range(a, b) for a, b in pairwise(cuts))


def own_nodes(reducer: OrderedReducer, ranges: Sequence[range], index: int, leaves: Tensor) -> Tensor:
    """This rank's nodes, from its own leaves alone."""
    mine = leaves[ranges[index].start : ranges[index].stop]
    return tree_sum_nodes(mine, reducer.local_nodes)


def uneven_sizes(elements: int, members: int) -> list[int]:
    """Slices of different lengths, the first of them empty."""
    sizes = [0] * members
    for element in range(elements):
        sizes[1 + element * element % (members - 1) if members > 1 else 0] += 1
    return sizes


def every_path(
    groups: GroupFactory, total: int, elements: int, ranges: Sequence[range], leaf_seed: int
) -> dict[str, bool]:
    """Each path of OrderedReducer on the same leaves -> does it have the bits of the tree?"""
    group = groups.world
    leaves = wild(total, elements, leaf_seed)
    truth = naive_tree(leaves)
    sizes = uneven_sizes(elements, group.size)
    start = sum(sizes[: group.index])
    blocks = [None, *[b for b in (2, 3) if group.size % b == 0 and b < group.size]]
    found: dict[str, bool] = {}
    for inner in blocks:
        for chunk_bytes in (64 << 20, 256):
            reducer = OrderedReducer(
                group, ranges, inner_size=inner, chunk_bytes=chunk_bytes, gather_below_bytes=0
            )
            nodes = own_nodes(reducer, ranges, group.index, leaves)
            kept = nodes.clone()
            name = f"inner {inner} chunk {chunk_bytes}"
            sliced = reducer.reduce_scatter(nodes, sizes)
            found[f"{name} reduce_scatter"] = same_bits(sliced, truth[start : start + sizes[group.index]])
            found[f"{name} all_reduce"] = same_bits(reducer.all_reduce(nodes), truth)
            rounded = reducer.all_reduce(nodes.view(-1, 1, elements), torch.bfloat16)
            found[f"{name} all_reduce bf16"] = same_bits(rounded, truth.bfloat16().view(1, elements))
            on_last = reducer.reduce(nodes, group.size - 1)
            is_last = group.index == group.size - 1
            found[f"{name} reduce"] = same_bits(on_last, truth) if on_last is not None else not is_last
            found[f"{name} input untouched"] = same_bits(nodes, kept)
    small = OrderedReducer(group, ranges, gather_below_bytes=1 << 30)
    found["gathered"] = same_bits(small.all_reduce(own_nodes(small, ranges, group.index, leaves)), truth)
    fused = OrderedReducer(group, ranges, gather_below_bytes=0, tree_sum=naive_tree)
    found["fused"] = same_bits(fused.all_reduce(own_nodes(fused, ranges, group.index, leaves)), truth)
    return found
