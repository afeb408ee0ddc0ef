"""NativeEngine: one trainable (or frozen) model of a role on its mesh. The layout-invariant engine.

accumulate(samples, token_loss)  forward and backward of one minibatch, pipeline schedule inside; starts the
                                 ordered reduction over data slots, bucket by bucket
reduce()                         the end of that reduction; the gradient's sum of squares
step(adam, clip, sumsq)          clip, AdamW; starts to publish the weights
score(samples)                   forward only
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from unirl_scale.core.config import MeshConfig, ModelConfig
from unirl_scale.parallel.block import Rope
from unirl_scale.parallel.chunk import TIED, Chunk, Head, chunk_ranges, chunk_specs
from unirl_scale.parallel.context import ParallelContext
from unirl_scale.parallel.flat import FlatSpace
from unirl_scale.parallel.grad_norm import SegmentNorms
from unirl_scale.parallel.gradients import Gradients
from unirl_scale.parallel.optimizer import AdamStep, ChunkOptimizer, Reduced
from unirl_scale.parallel.packing import Packed, pack
from unirl_scale.parallel.pipeline import run_schedule
from unirl_scale.parallel.reduction import Reduction
from unirl_scale.parallel.samples import Sample, SlotPlan, plan_slots
from unirl_scale.parallel.schedule import forward_only, one_f_one_b
from unirl_scale.parallel.scored import pad_scored, split_scored, unpad_scored
from unirl_scale.parallel.segments import Label, SegmentIndex, segment_digests
from unirl_scale.parallel.spec import Rows, normal_rows, parameter_specs
from unirl_scale.rl.reduce import tree_sum

# (sample numbers, scores: one fp32 [n, S] tensor each) -> weighted token losses [n, S] and named diagnostics
# [n, S].
TokenLoss = Callable[[Sequence[int], tuple[Tensor, ...]], tuple[Tensor, dict[str, Tensor]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What an optimizer step did; equal on every rank of the mesh.

    Attributes:
        grad_norm: global L2 norm before clipping.
        applied: False when the gradient was not finite; then nothing changed.
        nonfinite: parameters whose gradient is not finite.
    """

    grad_norm: float
    applied: bool
    nonfinite: tuple[str, ...] = ()


@dataclass(slots=True)
class MicroResults:
    """Per-sample results on the last pipeline stage, by sample number."""

    loss: dict[int, Tensor] = field(default_factory=dict)
    diagnostics: dict[str, dict[int, Tensor]] = field(default_factory=dict)
    scores: dict[int, tuple[Tensor, ...]] = field(default_factory=dict)


class NativeEngine:
    """A model on a mesh.

    Args:
        max_tokens: longest prompt + response.
        trainable: keep optimizer state; a frozen engine only scores.
    """

    def __init__(
        self,
        model: ModelConfig,
        mesh: MeshConfig,
        context: ParallelContext,
        head: Head,
        *,
        max_tokens: int,
        inv_temperature: float = 1.0,
        trainable: bool = True,
    ) -> None:
        self.model, self.mesh, self.ctx, self.head = model, mesh, context, head
        rope = Rope.table(model, max_tokens + context.leaves, context.device)
        self.ranges = chunk_ranges(model.num_layers, mesh.pp * mesh.vpp, mesh.pipeline_split)
        self.chunks = [
            Chunk(
                model,
                context,
                head,
                layers,
                rope,
                inv_temperature=inv_temperature,
                recompute=mesh.recompute == "block",
            )
            for layers in self.ranges[context.at.pp :: mesh.pp]
        ]
        self.optimizers = [ChunkOptimizer(c) for c in self.chunks] if trainable else []
        self.norms = [SegmentNorms(o.chunk, o.shares) for o in self.optimizers]
        self.segments = SegmentIndex(self.chunks, self.ranges)
        self.adam_steps = 0
        self._reduction: Reduction | None = None
        self._reduced: list[Reduced] = []
        self._sums: dict[Label, float] = {}

    @property
    def is_last_stage(self) -> bool:
        return self.ctx.at.pp == self.mesh.pp - 1

    # ---- state ------------------------------------------------------------------------------------
    def initialise(self, seed: int) -> None:
        """Fresh weights keyed by (seed, parameter name, row); zero moments."""
        self.begin(normal_rows(seed))

    def begin(self, rows: Rows) -> None:
        """Start from these values with zero moments. Collective over the mesh."""
        for i, chunk in enumerate(self.chunks):
            leafed, replicated = chunk.initial(rows)
            if self.optimizers:
                self.optimizers[i].load(leafed, replicated)
            else:
                chunk.flat.copy_(leafed)
                chunk.flat_replicated.copy_(replicated)
        self.publish()

    def publish(self) -> None:
        """Master weights -> compute weights on every rank, and the tied head's copy to the last stage. With
        overlap the weights may still be on their way afterwards; chunks wait where they read them."""
        for optimizer in self.optimizers:
            optimizer.publish()
            if not self.ctx.overlap:
                optimizer.chunk.settle()
        self._send_tied_weights()

    def _send_tied_weights(self) -> None:
        if not self._tied_apart:
            return
        first, last = self.chunks[0], self.chunks[-1]
        if self.ctx.at.pp == 0:
            self.ctx.pp_up.isend(first.settled(-1)["embed"].contiguous(), self.mesh.pp - 1).wait()
        elif self.is_last_stage:
            buffer = torch.empty_like(last.weights[TIED])
            last.weights[TIED].copy_(self.ctx.pp_up.irecv(buffer, 0).wait())

    @property
    def _tied_apart(self) -> bool:
        """Tied embeddings whose two uses live on different pipeline ranks."""
        return self.model.tie_embeddings and self.head == "lm" and self.mesh.pp > 1

    # ---- one minibatch ----------------------------------------------------------------------------
    def plan(self, samples: Sequence[Sample]) -> SlotPlan:
        return plan_slots(
            samples, self.ctx.slots, self.ctx.dp.size, self.ctx.dp.index, self.mesh.micro_batch_size
        )

    def _pack(self, samples: Sequence[Sample], numbers: Sequence[int]) -> Packed:
        return pack(
            [samples[i].prompt for i in numbers],
            [samples[i].response for i in numbers],
            leaves=self.ctx.leaves,
            tp=self.ctx.tp.size,
            tp_rank=self.ctx.tp.index,
            device=self.ctx.device,
        )

    def score(self, samples: Sequence[Sample]) -> MicroResults:
        """Forward only. On the last stage: each own sample's scores, fp32 [response length] tensors
        (logprobs and entropy, or values)."""
        plan, results = self.plan(samples), MicroResults()
        micros = [self._pack(samples, numbers) for numbers in plan.micros]

        def keep(micro: int, out: Any) -> None:
            scores = out if isinstance(out, tuple) else (out,)
            for number, *parts in zip(plan.micros[micro], *(split_scored(s, micros[micro]) for s in scores)):
                results.scores[number] = tuple(parts)

        schedule = forward_only(self.mesh.pp, self.mesh.vpp, len(micros))
        run_schedule(schedule, self.chunks, micros, keep)
        return results

    def accumulate(self, samples: Sequence[Sample], token_loss: TokenLoss) -> MicroResults:
        """Forward and backward of one minibatch into this step's gradients.

        Args:
            samples: the whole minibatch, the same on every rank.
            token_loss: elementwise; weights already divide by the global count.

        Returns:
            On the last stage: each own sample's loss and diagnostics, summed over tokens by the tree.
        """
        plan, results = self.plan(samples), MicroResults()
        micros = [self._pack(samples, numbers) for numbers in plan.micros]
        gradients = self.open_gradients(plan)
        self._reduction = None  # of a step that was given up
        reduction = Reduction(self.optimizers, gradients)
        completing = self.completing_micro(plan) if self.ctx.overlap else None

        def objective(micro: int, out: Any) -> Any:
            scores = out if isinstance(out, tuple) else (out,)
            grads = self._loss_gradients(plan.micros[micro], micros[micro], scores, token_loss, results)
            return grads if isinstance(out, tuple) else grads[0]

        def left(part: int, micro: int, layer: int) -> None:
            if micro == completing:
                reduction.leave(part, layer)

        schedule = one_f_one_b(self.mesh.pp, self.mesh.vpp, len(micros))
        run_schedule(schedule, self.chunks, micros, objective, gradients, plan.slot_ends, left)
        reduction.start_rest()
        self._reduction = reduction
        return results

    def open_gradients(self, plan: SlotPlan) -> list[Gradients]:
        """Empty accumulators, one a chunk."""
        return [Gradients(c, plan.slots, self.ctx.slots) for c in self.chunks]

    def completing_micro(self, plan: SlotPlan) -> int | None:
        """The micro-batch in whose backward buckets may start."""
        return plan.completing_micro

    def _loss_gradients(
        self,
        numbers: Sequence[int],
        packed: Packed,
        scores: tuple[Tensor, ...],
        token_loss: TokenLoss,
        results: MicroResults,
    ) -> tuple[Tensor, ...]:
        """Differentiate the token losses with respect to the scores, both padded to [n, S]."""
        padded = tuple(pad_scored(s, packed).requires_grad_() for s in scores)
        with torch.enable_grad():
            losses, diagnostics = token_loss(numbers, padded)
            grads = torch.autograd.grad(losses.sum(), padded, allow_unused=True)
        # Masked slots hold +0, so the sum over tokens does not depend on the padded width.
        for name, values in {"": losses.detach(), **diagnostics}.items():
            target = results.loss if name == "" else results.diagnostics.setdefault(name, {})
            target.update(zip(numbers, tree_sum(values.float(), -1) + 0.0))
        zero = torch.zeros_like(padded[0])
        return tuple(unpad_scored(zero if g is None else g, packed) for g in grads)

    # ---- optimizer step ---------------------------------------------------------------------------
    def reduce(self) -> float:
        """Ordered reduction over data slots; returns the global sum of squares of the gradient."""
        assert self._reduction is not None, "accumulate() comes before reduce()"
        tied_ranges = self._tied_ranges()
        self._reduced, tied = self._reduction.finish(tied_ranges)
        self._reduction = None
        self._add_tied(tied, tied_ranges)
        parts = [n.sums(r.shard, r.replicated) for n, r in zip(self.norms, self._reduced)]
        labels, sums = self.segments.collect(torch.cat(parts))
        self._sums = dict(zip(labels, sums.squeeze(1).tolist()))
        return float(tree_sum(sums, 0)[0])

    def _tied_ranges(self) -> list[range] | None:
        """Who owns which part of the embedding, on the first stage."""
        if not (self.model.tie_embeddings and self.head == "lm"):
            return None
        specs = chunk_specs(self.model, self.ctx.leaves, self.head, self.ranges[0])
        space = FlatSpace([(n, s) for n, s in specs if s.leafed], self.ctx.local_leaves)
        first = space.buckets(self.ctx.dp.size, self.ctx.bucket_elements)[0]
        size = len(self.ctx.local_leaves) * specs[0][1].numel
        return [range(min(r.start, size), min(r.stop, size)) for r in first.owned]

    def _add_tied(self, tied: Tensor | None, ranges: list[range] | None) -> None:
        """Add the head's share of the tied embedding's gradient to the embedding's: one addition of two."""
        if ranges is None:
            return
        mine = ranges[self.ctx.dp.index]
        if self._tied_apart and len(mine):
            if self.is_last_stage:
                assert tied is not None
                self.ctx.pp_down.isend(tied.contiguous(), 0).wait()
            elif self.ctx.at.pp == 0:
                buffer = torch.empty(len(mine), device=self.ctx.device)
                tied = self.ctx.pp_down.irecv(buffer, self.mesh.pp - 1).wait()
        if self.ctx.at.pp == 0 and tied is not None:
            self._reduced[0].shard[: len(mine)] += tied

    def step(self, adam: Callable[[int], AdamStep], clip: float, sumsq: float) -> StepResult:
        """Clip and update from the reduced gradient.

        Args:
            adam: optimizer step number (from 1) -> its settings.
            clip: largest global norm, 0 = off.
            sumsq: result of `reduce`.
        """
        if not math.isfinite(sumsq):
            self._reduced = []
            return StepResult(grad_norm=sumsq, applied=False, nonfinite=self._nonfinite())
        norm = sumsq**0.5
        scale = min(1.0, clip / (norm + 1e-6)) if clip > 0 else 1.0
        self.adam_steps += 1
        for optimizer, reduced in zip(self.optimizers, self._reduced):
            optimizer.apply(reduced, adam(self.adam_steps), scale)
        self._reduced = []
        self.publish()
        return StepResult(grad_norm=norm, applied=True)

    def _nonfinite(self) -> tuple[str, ...]:
        """Parameters whose gradient's sum of squares is not finite."""
        names = [spec.name for spec in parameter_specs(self.model, self.ctx.leaves, self.head)]
        return tuple(sorted({names[number] for (number, _), v in self._sums.items() if not math.isfinite(v)}))

    # ---- digests ----------------------------------------------------------------------------------
    def gradient_digests(self) -> dict[str, str]:
        """SHA-256 by logical parameter of the reduced gradient, before clipping. Collective over the mesh."""
        return self._digests([(r.shard, r.replicated) for r in self._reduced])

    def state_digests(self) -> dict[str, dict[str, str]]:
        """SHA-256 by logical parameter of master weights and both Adam moments. Collective over the mesh."""
        return {
            kind: self._digests(
                [(o.shard.tensors()[kind], o.replicated.tensors()[kind]) for o in self.optimizers]
            )
            for kind in ("master", "exp_avg", "exp_avg_sq")
        }

    def _digests(self, tensors: Sequence[tuple[Tensor, Tensor]]) -> dict[str, str]:
        rows = [
            segment_digests(o.chunk, o.shares, shard, replicated)
            for o, (shard, replicated) in zip(self.optimizers, tensors)
        ]
        labels, digests = self.segments.collect(torch.cat(rows))
        names = [spec.name for spec in parameter_specs(self.model, self.ctx.leaves, self.head)]
        joined: dict[str, bytes] = {}
        for (number, _), row in zip(labels, digests.cpu()):
            joined[names[number]] = joined.get(names[number], b"") + bytes(row.tolist())
        return {name: hashlib.sha256(data).hexdigest() for name, data in joined.items()}
