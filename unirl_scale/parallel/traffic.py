"""What the engine puts on the wire in one optimizer step, counted without running it.

Mirrors, collective by collective, what block.py, ends.py, pipeline.py, reduction.py, optimizer.py and
engine.py do; a group's own counter (`comm/wire.Traffic`) must read the same number after the step. Mode
`off`, whose reductions are the vendor's, is not covered.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from unirl_scale.comm.schedule import ReductionSchedule
from unirl_scale.comm.tree import split_contiguous
from unirl_scale.core.config import InvarianceConfig, MeshConfig, ModelConfig
from unirl_scale.core.mesh import Coordinates, Mesh
from unirl_scale.parallel.build import Reductions
from unirl_scale.parallel.chunk import ChunkRange, Head, chunk_ranges, chunk_specs
from unirl_scale.parallel.flat import Bucket, FlatSpace, shares
from unirl_scale.parallel.grad_norm import piece_nodes
from unirl_scale.parallel.samples import Sample, plan_slots
from unirl_scale.parallel.spec import ParamSpec

_NODE, _FP64 = 4, 8  # bytes of a node of an ordered sum, and of a sum of squares


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTraffic:
    """Bytes that one rank sends to others: what `traffic.sent_bytes` of each group grows by."""

    tp: int
    dp: int
    pp_up: int
    pp_down: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """One role's optimizer step.

    Attributes:
        model: with its vocabulary.
        itemsize: bytes of an activation: 4 (fp32) or 2 (bf16).
        samples: (prompt tokens, response tokens) of the minibatch.
        planned: axis -> how its ordered sums run, as for `build_context`.
    """

    model: ModelConfig
    mesh: MeshConfig
    invariance: InvarianceConfig
    head: Head
    itemsize: int
    samples: Sequence[tuple[int, int]]
    planned: Mapping[str, Reductions] | None = None


def step_traffic(work: Workload, rank: int) -> StepTraffic:
    """Bytes that a rank of the role's mesh sends in `accumulate`, `reduce` and `step`.

    Args:
        rank: global rank, on the mesh.
    """
    at = Mesh.from_config(work.mesh).coordinates(rank)
    assert at is not None, "the rank must be on the mesh"
    count = _Count(work, at)
    count.micro_batches()
    count.optimizer_step()
    return StepTraffic(tp=count.tp.sent, dp=count.dp.sent, pp_up=count.up.sent, pp_down=count.down.sent)


class _Wire:
    """One member of a group."""

    def __init__(self, size: int) -> None:
        self.size, self.sent = size, 0

    def gather(self, n_bytes: int) -> None:
        self.sent += n_bytes * (self.size - 1)

    def gather_uneven(self, sizes: Sequence[int], width: int) -> None:
        self.gather(max(sizes) * width)  # padded to the longest


class _Sums(_Wire):
    """A member of a group that adds in order."""

    def __init__(self, size: int, index: int, leaves: int, how: Reductions) -> None:
        super().__init__(size)
        self.how = how
        self.schedule = ReductionSchedule.of(split_contiguous(leaves, size), index, how.blocks)

    def reduce_scatter(self, sizes: Sequence[int]) -> None:
        if self.size > 1:
            self.sent += self.schedule.sent_elements(sizes) * _NODE

    def all_reduce(self, elements: int, itemsize: int) -> None:
        """The result comes back with `itemsize` bytes an element."""
        if self.size == 1:
            return
        if self.schedule.total_nodes * elements * 4 <= self.how.gather_below_bytes:
            self.gather_uneven([len(nodes) * elements for nodes in self.schedule.members_nodes], _NODE)
            return
        share = -(-elements // self.size)
        self.reduce_scatter([max(0, min(share, elements - i * share)) for i in range(self.size)])
        self.gather(share * itemsize)


class _Count:
    """Adds up a step. Group by group, so that a tp rank's dp traffic is its own."""

    def __init__(self, work: Workload, at: Coordinates) -> None:
        self.work, self.at = work, at
        mesh, planned = work.mesh, work.planned or {}
        leaves, slots = work.invariance.model_leaves, work.invariance.data_slots
        self.tp = _Sums(mesh.tp, at.tp, leaves, planned.get("tp", Reductions()))
        self.dp = _Sums(mesh.dp, at.dp, slots, planned.get("dp", Reductions()))
        self.up, self.down = _Wire(mesh.pp), _Wire(mesh.pp)
        self.sequence_parallel = mesh.sequence_parallel and mesh.tp > 1
        self.held = split_contiguous(leaves, mesh.tp)[at.tp]
        self.ranges = chunk_ranges(work.model.num_layers, mesh.pp * mesh.vpp, mesh.pipeline_split)
        self.chunks = range(at.pp, mesh.pp * mesh.vpp, mesh.pp)

    # ---- forward and backward ---------------------------------------------------------------------
    def micro_batches(self) -> None:
        work, leaves = self.work, self.work.invariance.model_leaves
        samples = [Sample((0,) * prompt, (0,) * response) for prompt, response in work.samples]
        mesh = work.mesh
        plan = plan_slots(samples, work.invariance.data_slots, mesh.dp, self.at.dp, mesh.micro_batch_size)
        for micro in plan.micros:
            rows = sum(-(-sum(work.samples[i]) // leaves) * leaves for i in micro)
            scored = sum(work.samples[i][1] for i in micro)
            for chunk in self.chunks:
                self._chunk(chunk, rows, scored)

    def _chunk(self, chunk: int, rows: int, scored: int) -> None:
        layers, work = self.ranges[chunk], self.work
        hidden = rows * work.model.hidden_size
        if layers.first:
            self.tp.gather(hidden * work.itemsize)  # rows of the embedding, as bit patterns
            self._gather_rows(hidden)  # backward
        passes = 3 if work.mesh.recompute == "block" else 2  # forward, backward, and forward again
        for _ in range((layers.stop - layers.start) * passes * 2):  # attention and feed-forward
            self._gather_rows(hidden)
            self._reduce(hidden)
        if layers.last:
            self._head(hidden, scored)
        self._send_hidden(chunk, hidden)

    def _gather_rows(self, hidden: int) -> None:
        if self.sequence_parallel:
            self.tp.gather(hidden // self.tp.size * self.work.itemsize)

    def _reduce(self, hidden: int) -> None:
        if self.sequence_parallel:
            self.tp.reduce_scatter([hidden // self.tp.size] * self.tp.size)
        else:
            self.tp.all_reduce(hidden, self.work.itemsize)

    def _head(self, hidden: int, scored: int) -> None:
        self._gather_rows(hidden)
        if self.work.head == "value":
            return
        self.tp.gather(scored * len(self.held) * 3 * 4)  # (m, s, u) of each leaf
        self.tp.gather(scored * 4)  # the target's logit
        self.tp.all_reduce(scored * self.work.model.hidden_size, self.work.itemsize)

    def _send_hidden(self, chunk: int, hidden: int) -> None:
        last = self.work.mesh.pp * self.work.mesh.vpp - 1
        n_bytes = hidden // (self.tp.size if self.sequence_parallel else 1) * self.work.itemsize
        for target, moves in ((chunk + 1, chunk < last), (chunk - 1, chunk > 0)):
            if moves:
                self._channel(target % self.work.mesh.pp).sent += n_bytes

    def _channel(self, target: int) -> _Wire:
        return self.up if self.at.pp < target else self.down

    # ---- reduction and update ---------------------------------------------------------------------
    def optimizer_step(self) -> None:
        segments = 0
        for chunk in self.chunks:
            specs = self._specs(self.ranges[chunk])
            leafed, replicated = self._spaces(specs)
            buckets = self._buckets(leafed)
            self._gradients(chunk, [spec for _, spec in specs], buckets)
            pieces = [leafed.pieces(*share.ranges) for share in shares(buckets)]
            self.dp.gather_uneven([sum(len(piece_nodes(p)) for p in owned) for owned in pieces], _FP64)
            for bucket in buckets:
                self.dp.gather_uneven(bucket.sizes, self.work.itemsize)  # weights
            segments += len(leafed.segments) + len(replicated.segments)
        self.tp.gather(segments * _FP64)
        self.up.gather_uneven([self._segments(stage) for stage in range(self.work.mesh.pp)], _FP64)
        self._tied_weights()

    def _specs(self, layers: ChunkRange) -> list[tuple[int, ParamSpec]]:
        return chunk_specs(self.work.model, self.work.invariance.model_leaves, self.work.head, layers)

    def _spaces(self, specs: Sequence[tuple[int, ParamSpec]]) -> tuple[FlatSpace, FlatSpace]:
        leafed = FlatSpace([(n, s) for n, s in specs if s.leafed], self.held)
        return leafed, FlatSpace([(n, s) for n, s in specs if not s.leafed], self.held)

    def _buckets(self, leafed: FlatSpace) -> tuple[Bucket, ...]:
        return leafed.buckets(self.dp.size, self.work.mesh.bucket_elements)

    def _gradients(self, chunk: int, specs: Sequence[ParamSpec], buckets: Sequence[Bucket]) -> None:
        for bucket in buckets:
            self.dp.reduce_scatter(bucket.sizes)
        if self._tied and self.ranges[chunk].last:
            owners = self._tied_owners()
            self.dp.reduce_scatter(owners)
            if self._tied_apart:
                self.down.sent += owners[self.at.dp] * _NODE
        partial = sum(s.numel for s in specs if not s.leafed and s.partial) * len(self.held)
        whole = sum(s.numel for s in specs if not s.leafed and not s.partial)
        self.dp.all_reduce(partial + whole, _NODE)
        self.tp.gather(partial * _NODE)

    def _segments(self, stage: int) -> int:
        """Rows that all tp ranks of a stage hold together."""
        each = 0
        for layers in self.ranges[stage :: self.work.mesh.pp]:
            each += sum(len(space.segments) for space in self._spaces(self._specs(layers)))
        return each * self.tp.size

    # ---- tied embeddings --------------------------------------------------------------------------
    @property
    def _tied(self) -> bool:
        return self.work.model.tie_embeddings and self.work.head == "lm"

    @property
    def _tied_apart(self) -> bool:
        return self._tied and self.work.mesh.pp > 1

    def _embedding_elements(self) -> int:
        return len(self.held) * prod(self._specs(self.ranges[0])[0][1].shape)

    def _tied_owners(self) -> list[int]:
        """Elements of the embedding that each dp rank of the first stage owns."""
        leafed, _ = self._spaces(self._specs(self.ranges[0]))
        size = self._embedding_elements()
        owned = self._buckets(leafed)[0].owned
        return [max(0, min(r.stop, size) - min(r.start, size)) for r in owned]

    def _tied_weights(self) -> None:
        if self._tied_apart and self.at.pp == 0:
            self.up.sent += self._embedding_elements() * self.work.itemsize
