"""What the ranks of the ordered-reduction tests run, and the one-process truth they are held against."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from tests import canonical
from unirl_scale.comm.accumulate import tree_sum_nodes
from unirl_scale.comm.fast import FastReducer
from unirl_scale.comm.groups import Group, GroupFactory
from unirl_scale.comm.ordered import OrderedReducer
from unirl_scale.comm.tree import split_contiguous


def wild(rows: int, elements: int, seed: int = 0) -> Tensor:
    """fp32 leaves of magnitude 1e-6..1e4 with both signs, some -0, +0 and subnormals: any other order
    shows."""
    generator = torch.Generator().manual_seed(seed)
    exponent = torch.rand(rows, elements, generator=generator) * 10 - 6
    values = 10.0**exponent * torch.randn(rows, elements, generator=generator).sign()
    kind = torch.rand(rows, elements, generator=generator)
    values[kind < 0.10] = -0.0
    values[(kind >= 0.10) & (kind < 0.13)] = 0.0
    values[(kind >= 0.13) & (kind < 0.18)] = 1e-42
    values[:, :2] = -0.0  # a column that is -0 on every rank must stay -0
    return values


def tree_sum(leaves: Tensor) -> Tensor:
    """fp32 [n, ...] -> [...] by the definition, in one process."""
    return canonical.naive_tree(leaves.unbind(), torch.add)


def same_bits(left: Tensor, right: Tensor) -> bool:
    """Equal shapes, dtypes and bits: unlike torch.equal, -0 is not +0."""
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    return torch.equal(
        left.contiguous().view(-1).view(torch.uint8), right.contiguous().view(-1).view(torch.uint8)
    )


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
    truth = tree_sum(leaves)
    sizes = uneven_sizes(elements, group.size)
    start = sum(sizes[: group.index])
    blocks = [None, *[b for b in (2, 3) if group.size % b == 0 and b < group.size]]
    found: dict[str, bool] = {}
    for inner in blocks:
        for chunk_bytes in (64 << 20, 1024):
            reducer = OrderedReducer(
                group, ranges, inner_size=inner, chunk_bytes=chunk_bytes, gather_below_bytes=0
            )
            nodes = own_nodes(reducer, ranges, group.index, leaves)
            kept = nodes.clone()
            name = f"inner {inner} chunk {chunk_bytes}"
            sliced = reducer.reduce_scatter(nodes, sizes)
            found[f"{name} reduce_scatter"] = same_bits(sliced, truth[start : start + sizes[group.index]])
            found[f"{name} started"] = all(in_parts(group, reducer, nodes, truth))
            found[f"{name} all_reduce"] = same_bits(reducer.all_reduce(nodes), truth)
            rounded = reducer.all_reduce(nodes.view(nodes.shape[0], 1, elements), torch.bfloat16)
            found[f"{name} all_reduce bf16"] = same_bits(rounded, truth.bfloat16().view(1, elements))
            on_last = reducer.reduce(nodes, group.size - 1)
            is_last = group.index == group.size - 1
            found[f"{name} reduce"] = same_bits(on_last, truth) if on_last is not None else not is_last
            found[f"{name} input untouched"] = same_bits(nodes, kept)
    small = OrderedReducer(group, ranges, gather_below_bytes=1 << 30)
    found["gathered"] = same_bits(small.all_reduce(own_nodes(small, ranges, group.index, leaves)), truth)
    fused = OrderedReducer(group, ranges, gather_below_bytes=0, tree_sum=tree_sum)
    found["fused"] = same_bits(fused.all_reduce(own_nodes(fused, ranges, group.index, leaves)), truth)
    return found


def in_parts(group: Group, reducer: OrderedReducer, nodes: Tensor, truth: Tensor) -> list[bool]:
    """The columns in three reduce-scatters, started before any is waited for: has each the bits of its
    part?"""
    cuts = [0, truth.numel() // 4, truth.numel() // 2, truth.numel()]
    started, expected = [], []
    for start, stop in pairwise(cuts):
        sizes = uneven_sizes(stop - start, group.size)
        first = start + sum(sizes[: group.index])
        expected.append(truth[first : first + sizes[group.index]])
        out = torch.full((sizes[group.index],), torch.nan) if start else None
        started.append((reducer.start_reduce_scatter(nodes[:, start:stop], sizes, out), out))
    found = []
    for (pending, out), part in zip(started, expected, strict=True):
        result = pending.wait()
        found.append(same_bits(result, part) and (out is None or out is result))
    return found


def on_leaves(groups: GroupFactory, leaves: Tensor, ranges: Sequence[range]) -> Tensor:
    """The ordered all-reduce of given leaves."""
    reducer = OrderedReducer(groups.world, ranges, gather_below_bytes=0)
    return reducer.all_reduce(own_nodes(reducer, ranges, groups.rank, leaves))


def vendor_sum(groups: GroupFactory, leaves: Tensor, ranges: Sequence[range]) -> dict[str, Tensor | None]:
    """The three vendor reductions of the same leaves, each rank's node summed by the tree."""
    group = groups.world
    reducer = FastReducer(group, ranges)
    mine = leaves[ranges[groups.rank].start : ranges[groups.rank].stop]
    sizes = uneven_sizes(leaves.shape[1], group.size)
    out = torch.full((sizes[groups.rank],), torch.nan)
    started = reducer.start_reduce_scatter(tree_sum_nodes(mine, reducer.local_nodes), sizes, out)
    return {
        "all_reduce": reducer.all_reduce(tree_sum_nodes(mine, reducer.local_nodes)),
        "started": started.wait(),
        "reduce": reducer.reduce(tree_sum_nodes(mine, reducer.local_nodes), 0),
        "reduce_scatter": reducer.reduce_scatter(tree_sum_nodes(mine, reducer.local_nodes), sizes),
        "even": reducer.reduce_scatter(
            tree_sum_nodes(mine, reducer.local_nodes)[:, : group.size * 2], [2] * group.size
        ),
    }


def bf16_wire(groups: GroupFactory, elements: int, inner: int | None) -> tuple[bool, bool, int]:
    """Rounded leaves over a bf16 wire -> (same bits as fp32 wire, same bits as one process, bytes sent)."""
    group = groups.world
    ranges = split_contiguous(group.size, group.size)
    leaves = wild(group.size, elements).bfloat16()
    truth = tree_sum(leaves.float())
    narrow = OrderedReducer(
        group, ranges, inner_size=inner, gather_below_bytes=0, wire_dtype=torch.bfloat16, chunk_bytes=4096
    )
    sizes = uneven_sizes(elements, group.size)
    narrow.reduce_scatter(leaves[groups.rank][None], sizes)
    sent_bytes = group.traffic.sent_bytes
    wide = OrderedReducer(group, ranges, gather_below_bytes=0)
    gathered = OrderedReducer(group, ranges, gather_below_bytes=1 << 30, wire_dtype=torch.bfloat16)
    result = narrow.all_reduce(leaves[groups.rank][None])
    return (
        same_bits(result, wide.all_reduce(leaves[groups.rank][None].float())),
        same_bits(result, truth) and same_bits(gathered.all_reduce(leaves[groups.rank][None]), truth),
        sent_bytes,
    )


def sent_and_planned(
    groups: GroupFactory, ranges: Sequence[range], sizes: Sequence[int], inner: int | Sequence[int] | None
) -> tuple[int, int]:
    """Bytes that a reduce-scatter sent, and those its schedule says."""
    reducer = OrderedReducer(groups.world, ranges, inner_size=inner, chunk_bytes=1024)
    nodes = torch.zeros(len(reducer.nodes), sum(sizes))
    reducer.reduce_scatter(nodes, sizes)
    return groups.world.traffic.sent_bytes, 4 * reducer.schedule.sent_elements(sizes)
