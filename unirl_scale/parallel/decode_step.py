"""The device side of decoding: prompts into the cache, one step of all running sequences, sampling.

Tokens stay on the device from step to step, so that a step can be launched before the host has seen the
tokens of the one before it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from unirl_scale.kernels.spans import Spans
from unirl_scale.parallel.chunk import Chunk
from unirl_scale.parallel.ends import LmHead
from unirl_scale.parallel.kv_cache import CachedRows, KvCache
from unirl_scale.parallel.sampling import SamplingOptions, choose
from unirl_scale.parallel.scheduler import Prefix

HEAD_COLUMNS = 2  # of a row of a step: place of the sequence in `last_tokens`, length; then its pages
NOBODY = 0  # the place of padding rows; sequence i has place i + 1


class DecodeStep:
    """One model over one cache.

    Args:
        chunk: the whole depth of the model (rollout meshes have pp = 1).
        requests: most sequences of a call.
    """

    def __init__(self, chunk: Chunk, cache: KvCache, requests: int) -> None:
        assert chunk.embedding is not None and isinstance(chunk.head, LmHead)
        self.chunk, self.ctx, self.cache, self.requests = chunk, chunk.ctx, cache, requests
        self.embedding, self.head = chunk.embedding, chunk.head
        self.last_tokens = torch.zeros(requests + 1, dtype=torch.int64, device=chunk.ctx.device)

    def prefill(self, prefixes: Sequence[Prefix]) -> None:
        """Run whole prefixes, packed; fills their pages and `last_hidden`."""
        size, spans = self.cache.page_size, Spans.of([len(p.tokens) for p in prefixes], self.ctx.device)
        positions = [np.arange(n) for n in spans.lengths]
        slots = [np.asarray(p.pages)[at // size] * size + at % size for p, at in zip(prefixes, positions)]
        ids = np.fromiter((t for p in prefixes for t in p.tokens), dtype=np.int64, count=spans.total)
        rope = self.chunk.rope.at(self._upload(np.concatenate(positions)))
        rows = self._upload(np.concatenate(slots))
        x = self.embedding.lookup(self._upload(ids))
        for block, pages in zip(self.chunk.blocks, self.cache.layers):
            x, k, v = block.prefill(x, spans, rope)
            pages.write(rows, k, v)
        last = x.index_select(0, self._upload(np.array(spans.offsets[1:]) - 1))
        for prefix, hidden in zip(prefixes, last):
            prefix.last_hidden = hidden

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy pages (from, to)."""
        self.cache.copy(pairs)

    def start(
        self,
        numbers: Sequence[int],
        hidden: Sequence[Tensor],
        uniforms: NDArray[np.float64],
        options: SamplingOptions,
    ) -> Tensor:
        """Sample what follows prefixes.

        Args:
            numbers: the sequences.
            hidden: the last hidden row [H] of each one's prefix.
            uniforms: [B].

        Returns:
            As `advance`.
        """
        places = self._upload(np.asarray(numbers) + 1)
        return self._sample(places, torch.stack(list(hidden)), self._upload(uniforms), options)

    def feed(
        self, rows: NDArray[np.int32], uniforms: NDArray[np.float64], options: SamplingOptions
    ) -> Tensor:
        """`advance` from the host's arrays."""
        return self.advance(self._upload(rows), self._upload(uniforms), options)

    def advance(self, rows: Tensor, uniforms: Tensor, options: SamplingOptions) -> Tensor:
        """Feed every row's last token and sample the next; reads nothing back to the host.

        Args:
            rows: int32 [B, HEAD_COLUMNS + N] of `rows_array`.
            uniforms: fp64 [B].

        Returns:
            int32 [2, B]: tokens, and the bits of their fp32 log-probs.
        """
        head = rows[:, :HEAD_COLUMNS].t()
        places, lengths = head.to(torch.int64, memory_format=torch.contiguous_format)
        at = CachedRows.of(lengths, rows[:, HEAD_COLUMNS:], self.cache.page_size)
        rope = self.chunk.rope.at(lengths - 1)
        x = self.embedding.lookup(self.last_tokens.index_select(0, places))
        for block, pages in zip(self.chunk.blocks, self.cache.layers):
            x = block.decode(x, rope, pages, at)
        return self._sample(places, x, uniforms, options)

    def _upload(self, array: NDArray[np.generic]) -> Tensor:
        """To the device without waiting for what runs there; rows are contiguous there."""
        host = torch.from_numpy(np.ascontiguousarray(array))
        return (
            host
            if self.ctx.device.type == "cpu"
            else host.pin_memory().to(self.ctx.device, non_blocking=True)
        )

    def _sample(self, places: Tensor, hidden: Tensor, uniforms: Tensor, options: SamplingOptions) -> Tensor:
        """hidden [B, H]; every tp rank chooses the same tokens and keeps them."""
        greedy = options.temperature == 0
        normed, _ = self.head.normed(hidden)
        logits = self.head.logits(normed, 1.0 if greedy else self.chunk.inv_temperature)
        leaves = len(self.ctx.local_leaves)
        everyone = self.ctx.all_gather_leaves(logits.view(logits.shape[0], leaves, -1)).flatten(1)
        tokens = choose(self.ctx.ops, everyone[:, : self.chunk.model.vocab_size], uniforms, options)
        logprobs = torch.zeros_like(tokens, dtype=torch.float32)
        if not greedy:
            logprobs, _, _ = self.head.score(logits, tokens)
        self.last_tokens.index_copy_(0, places, tokens)
        return torch.stack((tokens.to(torch.int32), logprobs.view(torch.int32)))


def rows_array(numbers: Sequence[int], lengths: Sequence[int], table: NDArray[np.int32]) -> NDArray[np.int32]:
    """The `rows` of `DecodeStep.advance`.

    Args:
        numbers: the sequences.
        lengths: tokens of each, with the one that is fed.
        table: [B, N], pages of each.
    """
    rows = np.empty((len(numbers), HEAD_COLUMNS + table.shape[1]), dtype=np.int32)
    rows[:, 0], rows[:, 1], rows[:, HEAD_COLUMNS:] = np.asarray(numbers) + 1, lengths, table
    return rows
