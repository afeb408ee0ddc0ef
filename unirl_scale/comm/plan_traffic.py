"""Which collectives a role issues in one optimizer step, with their exact payload."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np
import numpy.typing as npt

from unirl_scale.comm.cost import Collective
from unirl_scale.comm.plan_model import (
    MicroBatches,
    ModelSize,
    chunk_layers,
    sequence_tokens,
    stage_layers,
)
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


def training_calls(
    cfg: RunConfig, size: ModelSize, mesh: MeshConfig, micros: MicroBatches, *, backward: bool = True
) -> tuple[Call, ...]:
    """Calls of one optimizer step, those of each axis as the stage that sends most there issues them.

    The same transfers as parallel/traffic.py counts exactly, in micro-batches of mean size; left out is what
    no link notices: sums of squares of the gradient norm, and padding to the longest of uneven shares.

    Args:
        backward: False = forward only (scores).
    """
    shape = _Shape.of(cfg, size, mesh, micros)
    stages = [_Stage.of(size, mesh, stage) for stage in range(mesh.pp)]
    tp = [_tensor_calls(shape, stage, backward) for stage in stages]
    pp = [_pipeline_calls(shape, stage, backward) for stage in stages]
    dp = [_data_calls(shape, stage) for stage in stages] if backward else [[]]
    return tuple(call for per_stage in (tp, pp, dp) for call in max(per_stage, key=_bytes))


def _bytes(calls: Sequence[Call]) -> float:
    return sum((c.size_bytes + (c.result_bytes or 0.0)) * c.count for c in calls)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shape:
    """What all stages have in common: elements of a micro-batch and bytes of an element.

    Attributes:
        hidden: elements of one micro-batch's hidden states, each sample padded to whole leaves.
        scored: response tokens of it.
        node: bytes of an element that is to be reduced.
        tp_nodes, dp_nodes: nodes of the canonical tree that a rank ships, at most.
    """

    mesh: MeshConfig
    size: ModelSize
    ordered: bool
    count: int
    hidden: float
    scored: float
    itemsize: int
    node: int
    leaves: int
    tp_nodes: int
    dp_nodes: int

    @classmethod
    def of(cls, cfg: RunConfig, size: ModelSize, mesh: MeshConfig, micros: MicroBatches) -> _Shape:
        ordered = cfg.invariance.mode != "off"
        itemsize = 4 if cfg.precision == "fp32" else 2
        leaves = cfg.invariance.model_leaves if ordered else mesh.tp
        slots = cfg.invariance.data_slots if ordered else mesh.dp
        tokens = -(-sequence_tokens(cfg) // leaves) * leaves
        return cls(
            mesh=mesh,
            size=size,
            ordered=ordered,
            count=micros.count,
            hidden=micros.mean * tokens * size.config.hidden_size,
            scored=micros.mean * cfg.rollout.max_response_tokens,
            itemsize=itemsize,
            node=4 if ordered else itemsize,
            leaves=leaves,
            tp_nodes=_most_nodes(leaves, mesh.tp),
            dp_nodes=_most_nodes(slots, mesh.dp),
        )

    @property
    def tied(self) -> bool:
        """The output layer is the embedding."""
        return self.size.config.tie_embeddings and not self.size.critic

    @property
    def scattered(self) -> bool:
        """Rows are split over tp between the blocks."""
        return self.mesh.sequence_parallel and self.mesh.tp > 1


def _most_nodes(leaves: int, members: int) -> int:
    ranges = split_contiguous(leaves, members)
    return max(1, *(len(maximal_nodes(r.start, r.stop, leaves)) for r in ranges if r))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stage:
    """One pipeline stage, on one tp rank.

    Attributes:
        ups, downs: its chunks that hand on activations, and gradients.
        split: parameters that tp divides; copied: parameters that every tp rank holds.
    """

    layers: int
    first: bool
    last: bool
    ups: int
    downs: int
    split: float
    copied: int

    @classmethod
    def of(cls, size: ModelSize, mesh: MeshConfig, stage: int) -> _Stage:
        layers = stage_layers(chunk_layers(size.config, mesh), mesh.pp)[stage]
        first, last = stage == 0, stage == mesh.pp - 1
        split = layers * (size.layer_params - size.layer_norm_params)
        split += size.embedding_params * first + size.head_params * (last and not size.critic)
        return cls(
            layers=layers,
            first=first,
            last=last,
            ups=mesh.vpp - last,
            downs=mesh.vpp - first,
            split=split / mesh.tp,
            copied=layers * size.layer_norm_params + size.config.hidden_size * last,
        )


def _tensor_calls(shape: _Shape, stage: _Stage, backward: bool) -> list[Call]:
    """Two reductions a block and pass, after attention and after the MLP; the embedding's rows, and what the
    output layer exchanges for log-probs and its dX."""
    mesh, hidden = shape.mesh, shape.hidden
    if mesh.tp == 1:
        return []
    passes = 1 + backward * (1 + (mesh.recompute == "block"))  # forward, backward, and forward again
    blocks = 2 * stage.layers * passes
    calls = [
        Call(
            name="block outputs",
            axis="tp",
            collective="reduce_scatter" if shape.scattered else "all_reduce",
            size_bytes=hidden * shape.node * shape.tp_nodes,
            count=blocks * shape.count,
            ordered=shape.ordered,
            result_bytes=None if shape.scattered else hidden * shape.itemsize,
        )
    ]

    def gather(name: str, size_bytes: float, each: int) -> None:
        count = each * shape.count
        calls.append(Call(name=name, axis="tp", collective="all_gather", size_bytes=size_bytes, count=count))

    if shape.scattered:
        gather("block inputs", hidden * shape.itemsize, blocks + stage.first * backward + stage.last)
    if stage.first:
        gather("embedding rows", hidden * shape.itemsize * mesh.tp, 1)
    if stage.last and not shape.size.critic:
        gather("vocabulary stats", shape.scored * (shape.leaves * 3 + mesh.tp) * 4, 1)
        if backward:
            elements = shape.scored * shape.size.config.hidden_size
            calls.append(
                Call(
                    name="output layer dX",
                    axis="tp",
                    collective="all_reduce",
                    size_bytes=elements * shape.node * shape.tp_nodes,
                    count=shape.count,
                    ordered=shape.ordered,
                    result_bytes=elements * shape.itemsize,
                )
            )
    return calls


def _pipeline_calls(shape: _Shape, stage: _Stage, backward: bool) -> list[Call]:
    """Activations up, gradients down, once a chunk that has a neighbour there; what a tied output layer gives
    the embedding, and gets back."""
    if shape.mesh.pp == 1:
        return []
    sent = shape.hidden * shape.itemsize / (shape.mesh.tp if shape.scattered else 1)
    count = (stage.ups + stage.downs * backward) * shape.count
    calls = [Call(name="activations", axis="pp", collective="p2p", size_bytes=sent, count=count)]
    if shape.tied and backward and (stage.first or stage.last):
        name, width = ("tied weights", shape.itemsize) if stage.first else ("tied gradients", 4)
        size_bytes = shape.size.embedding_params / shape.mesh.tp * width
        calls.append(Call(name=name, axis="pp", collective="p2p", size_bytes=size_bytes, count=1))
    return calls


def _data_calls(shape: _Shape, stage: _Stage) -> list[Call]:
    """Gradients of the sharded parameters, chunk by chunk; of norms, which no rank shards; weights back. A
    tied output layer's gradient is reduced beside the embedding's."""
    mesh, size = shape.mesh, shape.size
    if mesh.dp == 1:
        return []
    itemsize = shape.itemsize
    reduced = stage.split + (shape.tied and stage.last) * size.embedding_params / mesh.tp
    norms = stage.copied * -(-shape.leaves // mesh.tp)
    return [
        Call(
            name="gradients",
            axis="dp",
            collective="reduce_scatter",
            size_bytes=reduced * 4 * shape.dp_nodes / mesh.vpp,
            count=mesh.vpp,
            ordered=shape.ordered,
        ),
        Call(
            name="norm gradients",
            axis="dp",
            collective="all_reduce",
            size_bytes=norms * 4 * shape.dp_nodes / mesh.vpp,
            count=mesh.vpp,
            ordered=shape.ordered,
            result_bytes=norms * 4 / mesh.vpp,
        ),
        Call(
            name="weights",
            axis="dp",
            collective="all_gather",
            size_bytes=stage.split * itemsize / mesh.vpp,
            count=mesh.vpp,
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
