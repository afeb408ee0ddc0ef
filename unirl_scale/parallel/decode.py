"""Decoder: the actor with a key-value cache, on its own mesh. The layers, heads and kernels are those of
training.

Every op is row-invariant and attention walks the same key tiles from position 0, so the log-probability
recorded when a token is sampled equals, bit for bit, the one the training forward computes for it later.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from unirl_scale.kernels.spans import Spans
from unirl_scale.parallel.chunk import Chunk
from unirl_scale.parallel.ends import LmHead
from unirl_scale.parallel.sampling import SamplingOptions, choose


@dataclass(frozen=True, slots=True)
class Response:
    """What one prompt was answered with.

    Attributes:
        tokens: sampled ids, the end or stop token included.
        logprobs: fp32 [len(tokens)] under the temperature, before top-k and top-p; empty when greedy.
        truncated: reached the maximum length without an end.
    """

    tokens: tuple[int, ...]
    logprobs: Tensor
    truncated: bool


class Decoder:
    """Generates with one chunk that holds the whole depth of the model (rollout meshes have pp = 1)."""

    def __init__(self, chunk: Chunk, max_tokens: int) -> None:
        assert chunk.layers.first and chunk.layers.last and isinstance(chunk.head, LmHead)
        self.chunk, self.ctx, self.model = chunk, chunk.ctx, chunk.model
        self.head = chunk.head
        self.max_tokens = max_tokens

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        uniforms: Tensor,
        options: SamplingOptions,
        stops: Sequence[tuple[int, ...]],
        max_new: int,
    ) -> list[Response]:
        """Decode a batch to the end.

        Args:
            prompts: token ids, at least one each.
            uniforms: fp64 [B, max_new], one number a (sample, position).
            stops: token sequences that end a response.
            max_new: most tokens of a response.
        """
        if not prompts:
            return []
        batch = _Batch(prompts, stops, max_new)
        uniforms = uniforms.to(self.ctx.device)
        caches, hidden = self._prefill(prompts)
        lengths = torch.tensor([len(p) for p in prompts], device=self.ctx.device)
        for position in range(max_new):
            tokens, logprobs = self._sample(
                hidden, uniforms[batch.rows_tensor(self.ctx.device), position], options
            )
            keep = batch.record(tokens, logprobs)
            if not keep:
                break
            if position + 1 == max_new:
                break
            if len(keep) < tokens.numel():  # finished samples leave; rows do not depend on each other
                index = torch.tensor(keep, device=self.ctx.device)
                tokens, lengths = tokens[index], lengths[index]
                caches = [(k[index], v[index]) for k, v in caches]
            lengths = lengths + 1
            hidden = self._decode(tokens, caches, lengths)
        return batch.responses()

    def _prefill(self, prompts: Sequence[Sequence[int]]) -> tuple[list[tuple[Tensor, Tensor]], Tensor]:
        """Run whole prompts; returns the caches and the last hidden row of each prompt."""
        device, chunk = self.ctx.device, self.chunk
        spans = Spans.of([len(p) for p in prompts], device)
        positions = torch.cat([torch.arange(n) for n in spans.lengths]).to(device)
        ids = torch.tensor([t for p in prompts for t in p], dtype=torch.int64, device=device)
        sample = torch.repeat_interleave(torch.arange(len(prompts)), torch.tensor(spans.lengths)).to(device)
        rope = chunk.rope.at(positions)
        assert chunk.embedding is not None
        x = chunk.embedding.lookup(ids)
        heads = len(self.ctx.local_leaves) * self.model.num_kv_heads // self.ctx.leaves
        shape = (len(prompts), self.max_tokens, heads, self.model.head_dim)
        caches = []
        for block in chunk.blocks:
            x, k, v = block.prefill(x, spans, rope)
            pair = tuple(torch.zeros(shape, dtype=self.ctx.dtype, device=device) for _ in range(2))
            pair[0][sample, positions], pair[1][sample, positions] = k, v
            caches.append((pair[0], pair[1]))
        last = torch.tensor(spans.offsets[1:], device=device) - 1
        return caches, x[last]

    def _decode(self, tokens: Tensor, caches: list[tuple[Tensor, Tensor]], lengths: Tensor) -> Tensor:
        """tokens int64 [B] at positions lengths - 1 -> hidden rows [B, H]."""
        rope = self.chunk.rope.at(lengths - 1)
        assert self.chunk.embedding is not None
        x = self.chunk.embedding.lookup(tokens)
        for block, (k_cache, v_cache) in zip(self.chunk.blocks, caches):
            x = block.decode(x, rope, k_cache, v_cache, lengths)
        return x

    def _sample(self, hidden: Tensor, uniforms: Tensor, options: SamplingOptions) -> tuple[Tensor, Tensor]:
        """hidden [B, H] -> (tokens int64 [B], logprobs fp32 [B]); every tp rank chooses the same."""
        inv = 1.0 if options.temperature == 0 else self.chunk.inv_temperature
        normed, _ = self.head.normed(hidden)
        logits = self.head.logits(normed, inv)
        leaves = len(self.ctx.local_leaves)
        everyone = self.ctx.all_gather_leaves(logits.view(logits.shape[0], leaves, -1)).flatten(1)
        real = everyone[:, : self.model.vocab_size]
        tokens = choose(real, uniforms, options)
        if options.temperature == 0:
            return tokens, torch.zeros(tokens.shape[0])
        logprobs, _, _ = self.head.score(logits, tokens)
        return tokens, logprobs


class _Batch:
    """Which samples are alive and what they said so far; host side."""

    def __init__(
        self, prompts: Sequence[Sequence[int]], stops: Sequence[tuple[int, ...]], max_new: int
    ) -> None:
        self.alive = list(range(len(prompts)))
        self.tokens: list[list[int]] = [[] for _ in prompts]
        self.logprobs: list[list[Tensor]] = [[] for _ in prompts]
        self.ended = [False] * len(prompts)
        self.stops, self.max_new = stops, max_new

    def rows_tensor(self, device: torch.device) -> Tensor:
        return torch.tensor(self.alive, device=device)

    def record(self, tokens: Tensor, logprobs: Tensor) -> list[int]:
        """Append one token a living sample; returns which rows go on."""
        values = logprobs.cpu()
        keep, alive = [], []
        for row, (sample, token) in enumerate(zip(self.alive, tokens.tolist())):
            said = self.tokens[sample]
            said.append(token)
            self.logprobs[sample].append(values[row])
            if any(tuple(said[-len(stop) :]) == stop for stop in self.stops):
                self.ended[sample] = True
            else:
                keep.append(row)
                alive.append(sample)
        self.alive = alive
        return keep

    def responses(self) -> list[Response]:
        return [
            Response(tuple(t), torch.stack(lp) if lp else torch.empty(0), not ended)
            for t, lp, ended in zip(self.tokens, self.logprobs, self.ended)
        ]
