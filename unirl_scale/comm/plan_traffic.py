"""Which collectives a role issues in one optimizer step, with their exact payload."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np
import numpy.typing as npt

from unirl_scale.comm.cost import Collective
from unirl_scale.comm.plan_model import ModelSize, chunk_layers, sequence_tokens, stage_layers, stage_params
from unirl_scale.comm.tree import maximal_nodes, split_contiguous
from unirl_scale.core.config import MeshConfig, RunConfig

Axis = Literal["tp", "dp", "pp"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A collective that a rank issues `count` times a step.

    `size_bytes` is S of cost.py: for a reduction what one rank contributes as one node; `result_bytes` is
    what an all-reduce hands back, when its dtype differs.
    """

    name: str
    axis: Axis
    collective: Collective
    size_bytes: float
    count: float
    ordered: bool = False
    result_bytes: float | None = None


def training_calls(cfg: RunConfig, size: ModelSize, mesh: MeshConfig, micro_batches: int) -> tuple[Call, ...]:
    """Calls of the busiest rank: most layers, and the output layer.

    A row-parallel GEMM's result is reduced as fp32 nodes (bf16 with `leaf_dtype: bf16`) and comes back in the
    activations' dtype. Gradients are fp32; weights go back in their own dtype.
    """
    itemsize = 4 if cfg.precision == "fp32" else 2
    ordered = cfg.invariance.mode == "layout"
    node = 2 if cfg.invariance.leaf_dtype == "bf16" and cfg.precision == "bf16" else 4
    wire = node if ordered else itemsize
    rows = mesh.micro_batch_size * sequence_tokens(cfg)
    elements = float(rows * size.config.hidden_size)
    layers = max(stage_layers(chunk_layers(size.config, mesh), mesh.pp))
    passes = 2 + (mesh.recompute == "block")  # forward, backward, and forward again
    calls: list[Call] = []
    if mesh.tp > 1:
        calls += _tensor_calls(cfg, mesh, elements, itemsize, wire, layers * passes * micro_batches, ordered)
        stats = rows * cfg.invariance.model_leaves * 3 * 4.0
        calls.append(
            Call(
                name="vocabulary stats",
                axis="tp",
                collective="all_gather",
                size_bytes=stats,
                count=micro_batches,
            )
        )
    if mesh.pp > 1:
        sent = elements * itemsize / (mesh.tp if mesh.sequence_parallel else 1)
        calls.append(
            Call(
                name="activations",
                axis="pp",
                collective="p2p",
                size_bytes=sent,
                count=2 * micro_batches * mesh.vpp,
            )
        )
    if mesh.dp > 1:
        params = max(stage_params(size, mesh, s) for s in range(mesh.pp))
        calls += [
            Call(
                name="gradients",
                axis="dp",
                collective="reduce_scatter",
                size_bytes=params * 4,
                count=1,
                ordered=ordered,
            ),
            Call(name="weights", axis="dp", collective="all_gather", size_bytes=params * itemsize, count=1),
        ]
    return tuple(calls)


def _tensor_calls(
    cfg: RunConfig, mesh: MeshConfig, elements: float, itemsize: int, wire: int, blocks: float, ordered: bool
) -> list[Call]:
    """Two reductions a block and pass, after attention and after the MLP; and the output layer's dX."""
    if not mesh.sequence_parallel:
        return [
            Call(
                name="block outputs",
                axis="tp",
                collective="all_reduce",
                size_bytes=elements * wire,
                count=2 * blocks + 1,
                ordered=ordered,
                result_bytes=elements * itemsize,
            )
        ]
    return [
        Call(
            name="block outputs",
            axis="tp",
            collective="reduce_scatter",
            size_bytes=elements * wire,
            count=2 * blocks + 1,
            ordered=ordered,
        ),
        Call(
            name="block inputs",
            axis="tp",
            collective="all_gather",
            size_bytes=elements * itemsize,
            count=2 * blocks + 1,
        ),
    ]


def decode_calls(cfg: RunConfig, size: ModelSize, mesh: MeshConfig, sequences: int) -> tuple[Call, ...]:
    """Calls of one decode step: a row a sequence, two reductions a block, and the vocabulary's statistics."""
    if mesh.tp == 1:
        return ()
    itemsize = 4 if cfg.precision == "fp32" else 2
    elements = float(sequences * size.config.hidden_size)
    ordered = cfg.invariance.mode == "layout"
    wire = 4 if ordered else itemsize
    return (
        Call(
            name="block outputs",
            axis="tp",
            collective="all_reduce",
            size_bytes=elements * wire,
            count=2 * size.config.num_layers,
            ordered=ordered,
            result_bytes=elements * itemsize,
        ),
    )


def leaf_ranges(leaves: int, members: int) -> tuple[range, ...]:
    """Leaves of each member: contiguous, as even as it goes."""
    return split_contiguous(leaves, members)


def reduce_scatter_elements(
    ranges: Sequence[range], blocks: Sequence[int], sizes: Sequence[int]
) -> npt.NDArray[np.int64]:
    """Elements every member sends to others in an ordered reduce-scatter, int64 [members].

    The same number as `ReductionSchedule.sent_elements`, for all members at once: at the level that joins
    blocks of `inner` into blocks of `outer`, a member sends what belongs to indices equal to its own modulo
    `inner` but not modulo `outer`, once for each node its block holds.
    """
    n = len(ranges)
    total = max(part.stop for part in ranges)
    index = np.arange(n)
    counts = np.asarray(sizes, np.int64)
    sent = np.zeros(n, np.int64)
    edges = [1, *(b for b in blocks if 1 < b < n), n]
    for inner, outer in pairwise(edges):
        held = np.bincount(index % inner, weights=counts, minlength=inner).astype(np.int64)[index % inner]
        kept = np.bincount(index % outer, weights=counts, minlength=outer).astype(np.int64)[index % outer]
        nodes = [_joint_nodes(ranges[k : k + inner], total) for k in range(0, n, inner)]
        sent += np.repeat(np.array(nodes, np.int64), inner) * (held - kept)
    return sent


def _joint_nodes(parts: Sequence[range], total: int) -> int:
    filled = [p for p in parts if p]
    return len(maximal_nodes(filled[0].start, filled[-1].stop, total)) if filled else 0
