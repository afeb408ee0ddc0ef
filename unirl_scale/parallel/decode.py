"""Decoder: the actor with a paged key-value cache, on its own mesh. The layers, heads and kernels are those
of training.

Every op is row-invariant and attention walks the same key tiles from position 0, so the log-probability
recorded when a token is sampled equals, bit for bit, the one the training forward computes for it later: for
every batch, page size, shared prompt and preemption.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from unirl_scale.core.config import RolloutConfig
from unirl_scale.core.errors import ShapeError
from unirl_scale.parallel.chunk import Chunk
from unirl_scale.parallel.decode_graph import DecodeGraphs
from unirl_scale.parallel.decode_step import DecodeStep, rows_array
from unirl_scale.parallel.kv_cache import KvCache, PageAllocator
from unirl_scale.parallel.sampling import SamplingOptions
from unirl_scale.parallel.scheduler import Plan, Request, Scheduler, pages_for


@dataclass(frozen=True, slots=True)
class Response:
    """What one prompt was answered with.

    Attributes:
        tokens: sampled ids, the end or stop token included.
        logprobs: fp32 [len(tokens)] under the temperature, before top-k and top-p; zeros when greedy.
        truncated: reached the maximum length without an end.
    """

    tokens: tuple[int, ...]
    logprobs: Tensor
    truncated: bool


@dataclass(slots=True)
class Counts:
    """What one call of `generate` did.

    Attributes:
        steps: launches of the model.
        prefilled_tokens: that ran in prefills: shared prompts once, preempted sequences again.
        preempted: sequences that had to give their pages back.
    """

    steps: int = 0
    prefilled_tokens: int = 0
    preempted: int = 0

    def add(self, plan: Plan) -> None:
        self.steps += 1
        self.prefilled_tokens += sum(len(prefix.tokens) for prefix in plan.prefills)
        self.preempted += plan.preempted


class Decoder:
    """Generates with one chunk that holds the whole depth of the model (rollout meshes have pp = 1).

    Args:
        rollout: sizes of prompts, cache, batch and prefill.

    Attributes:
        lag: steps that are launched before the host reads the tokens of an earlier one. With one, the host's
            work hides behind the device's, and a sequence that met its stop runs one step for nothing.
        counts: of the last call.
    """

    def __init__(self, chunk: Chunk, rollout: RolloutConfig) -> None:
        self.chunk, self.ctx, self.rollout = chunk, chunk.ctx, rollout
        self.max_tokens = rollout.max_prompt_tokens + rollout.max_response_tokens
        self.lag = 0 if chunk.ctx.device.type == "cpu" else 1
        self.counts = Counts()
        self._graphs: DecodeGraphs | None = None

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        uniforms: NDArray[np.float64],
        options: SamplingOptions,
        stops: Sequence[tuple[int, ...]],
        max_new: int,
    ) -> list[Response]:
        """Answer every prompt. Collective over the tp group.

        Args:
            prompts: token ids, at least one each. Equal ones run through the model once.
            uniforms: [B, max_new], one number a (sample, position).
            stops: token sequences that end a response.
            max_new: most tokens of a response.

        Raises:
            ShapeError: a prompt is empty, or too long for the model's positions.
        """
        if not prompts:
            return []
        groups: dict[tuple[int, ...], int] = {}
        requests = [
            Request(number, tokens, groups.setdefault(tokens, len(groups)), max_new)
            for number, tokens in enumerate(map(tuple, prompts))
        ]
        self._check(requests)
        self.counts = Counts()
        call = _Call(self._steps(requests), self._scheduler(requests), uniforms, options, Stops(stops))
        call.run(self.lag, self.counts)
        return call.responses(requests)

    def _check(self, requests: Sequence[Request]) -> None:
        for request in requests:
            if not 0 < len(request.prompt) <= self.max_tokens - request.max_new:
                raise ShapeError(
                    f"generate: got a prompt of {len(request.prompt)} tokens (sample {request.number}) and "
                    f"{request.max_new} new ones; takes 1 to {self.max_tokens - request.max_new}: "
                    f"rollout.max_prompt_tokens + max_response_tokens = {self.max_tokens} in all"
                )

    # ---- sizes ------------------------------------------------------------------------------------
    def _scheduler(self, requests: Sequence[Request]) -> Scheduler:
        """Pages are counted out anew for each call: nothing of an earlier one is used again."""
        return Scheduler(
            requests,
            PageAllocator(self._pages(requests)),
            page_size=self.rollout.page_size,
            max_running=self._running(requests),
            prefill_tokens=self.rollout.prefill_tokens,
        )

    def _running(self, requests: Sequence[Request]) -> int:
        return self.rollout.batch_size or len(requests)

    def _pages(self, requests: Sequence[Request]) -> int:
        """Pages of the cache: as configured, or so many that nobody is ever preempted."""
        size = self.rollout.page_size
        if self.rollout.kv_cache_tokens:
            return self.rollout.kv_cache_tokens // size
        needs = sorted((pages_for(len(r.prompt) + r.max_new, size) for r in requests), reverse=True)
        return sum(needs[: self._running(requests)])

    def _steps(self, requests: Sequence[Request]) -> DecodeStep | DecodeGraphs:
        """The device side for these requests. Graphs hold addresses, so they and their cache are kept while
        they are large enough."""
        pages, running = self._pages(requests), min(self._running(requests), len(requests))
        if self._graphs is not None and self._graphs.fits(pages, len(requests), running):
            return self._graphs
        self._graphs = None  # frees the old cache before the new one is made
        step = DecodeStep(self.chunk, self._cache(pages), len(requests))
        if not self.rollout.cuda_graphs or self.ctx.device.type != "cuda":
            return step
        self._graphs = DecodeGraphs(step, running, pages_for(self.max_tokens, self.rollout.page_size))
        return self._graphs

    def _cache(self, pages: int) -> KvCache:
        model, ctx = self.chunk.model, self.ctx
        return KvCache(
            layers=model.num_layers,
            pages=pages,
            page_size=self.rollout.page_size,
            kv_heads=len(ctx.local_leaves) * model.num_kv_heads // ctx.leaves,
            head_dim=model.head_dim,
            dtype=ctx.dtype,
            device=ctx.device,
        )


class Stops:
    """Which token sequences end a response."""

    def __init__(self, stops: Sequence[tuple[int, ...]]) -> None:
        self._single = frozenset(stop[0] for stop in stops if len(stop) == 1)
        self._longer = [list(stop) for stop in stops if len(stop) > 1]

    def end(self, said: list[int]) -> bool:
        """Whether the last token completes a stop."""
        return said[-1] in self._single or any(said[-len(stop) :] == stop for stop in self._longer)


@dataclass(frozen=True, slots=True)
class _Flight:
    """Tokens on their way to the host: int32 [2, B] of these requests, there once `arrived`."""

    requests: list[Request]
    sampled: Tensor
    arrived: torch.Event | None

    @classmethod
    def of(cls, requests: list[Request], sampled: Tensor) -> _Flight:
        """Start the copy to the host."""
        if sampled.device.type == "cpu":
            return cls(requests, sampled, None)
        host, arrived = sampled.to("cpu", non_blocking=True), torch.Event(sampled.device)
        arrived.record()
        return cls(requests, host, arrived)

    def landed(self) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """Tokens and log-probs, waited for."""
        if self.arrived is not None:
            self.arrived.synchronize()
        tokens, bits = self.sampled.numpy()
        return tokens, bits.view(np.float32)


class _Call:
    """One `generate`: plan, launch, read, until all requests have ended."""

    def __init__(
        self,
        steps: DecodeStep | DecodeGraphs,
        scheduler: Scheduler,
        uniforms: NDArray[np.float64],
        options: SamplingOptions,
        stops: Stops,
    ) -> None:
        self.steps, self.scheduler = steps, scheduler
        self.uniforms, self.options, self.stops = uniforms, options, stops
        self.logprobs = np.zeros(uniforms.shape, dtype=np.float32)
        self.ended: set[int] = set()

    def run(self, lag: int, counts: Counts) -> None:
        """Returns when every request has ended and all tokens have arrived."""
        flying: deque[_Flight] = deque()
        while True:
            plan = self.scheduler.plan()
            if not plan.empty:
                counts.add(plan)
                flying.append(self._launch(plan))
            elif not flying:
                return
            while flying and (plan.empty or len(flying) > lag):
                self._record(flying.popleft())

    def _launch(self, plan: Plan) -> _Flight:
        requests, sampled = [], []
        self.steps.copy(plan.copies)
        if plan.prefills:
            self.steps.prefill(plan.prefills)
        if plan.starts:
            starting = [start.request for start in plan.starts]
            hidden = [start.prefix.last_hidden for start in plan.starts]
            noise = self._noise(starting, [start.position for start in plan.starts])
            sampled.append(self.steps.start([r.number for r in starting], hidden, noise, self.options))
            requests += starting
        if plan.rows:
            fed = [row.request for row in plan.rows]
            numbers, lengths = [r.number for r in fed], [row.length for row in plan.rows]
            rows = rows_array(numbers, lengths, self.scheduler.table[numbers])
            noise = self._noise(fed, [row.position for row in plan.rows])
            sampled.append(self.steps.feed(rows, noise, self.options))
            requests += fed
        return _Flight.of(requests, sampled[0] if len(sampled) == 1 else torch.cat(sampled, dim=1))

    def _noise(self, requests: Sequence[Request], positions: Sequence[int]) -> NDArray[np.float64]:
        noise: NDArray[np.float64] = self.uniforms[[r.number for r in requests], positions]
        return noise

    def _record(self, flight: _Flight) -> None:
        """Append each token to its response; whoever met a stop leaves."""
        tokens, logprobs = flight.landed()
        for request, token, logprob in zip(flight.requests, tokens.tolist(), logprobs):
            if request.number in self.ended:
                continue  # sampled before the host had seen the stop
            self.logprobs[request.number, len(request.said)] = logprob
            request.said.append(token)
            if self.stops.end(request.said):
                self.ended.add(request.number)
                self.scheduler.finish(request)

    def responses(self, requests: Sequence[Request]) -> list[Response]:
        return [
            Response(
                tuple(r.said),
                torch.from_numpy(self.logprobs[r.number, : len(r.said)].copy()),
                r.number not in self.ended,
            )
            for r in requests
        ]
