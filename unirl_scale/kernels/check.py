"""Start-up self-check: probes the ops a run will use, on the device it will use, at the shapes it will use.

What fails names the op, so that training stops instead of claiming what the platform cannot hold. A probe is
evidence, not proof; the layout lottery (`unirl-scale verify`) is the test of the whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from unirl_scale.kernels.spans import Spans
from unirl_scale.kernels.table import OpTable


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeShapes:
    """Dimensions of one leaf of a model: what the checks run at.

    Attributes:
        hidden: H. leaves: at most a few are probed.
        widths: rows a leaf has in each column-parallel weight (qkv, gate-up, vocabulary).
        inner: columns a leaf has in each row-parallel weight (attention, FFN).
        heads, kv_heads: of one leaf.
    """

    hidden: int
    widths: tuple[int, ...]
    inner: tuple[int, ...]
    heads: int
    kv_heads: int
    head_dim: int
    leaves: int = 3


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal shapes and bit patterns (so -0 differs from +0, and NaN equals itself)."""
    return a.shape == b.shape and torch.equal(
        a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8)
    )


def failures(ops: OpTable, shapes: ProbeShapes, dtype: torch.dtype, device: torch.device) -> list[str]:
    """Names of the properties that do not hold, e.g. "linear: rows"; empty when all do."""
    probe = _Probe(ops, shapes, dtype, device)
    return [name for name, holds in probe.run() if not holds]


class _Probe:
    def __init__(self, ops: OpTable, shapes: ProbeShapes, dtype: torch.dtype, device: torch.device) -> None:
        self.ops, self.s, self.dtype, self.device = ops, shapes, dtype, device
        self.generator = torch.Generator().manual_seed(0)

    def random(self, *shape: int) -> Tensor:
        """Values of several magnitudes, so that another order of addition shows."""
        x = torch.randn(shape, generator=self.generator)
        return (
            (x * torch.exp(2 * torch.randn(shape, generator=self.generator))).to(self.dtype).to(self.device)
        )

    def run(self) -> Iterator[tuple[str, bool]]:
        yield from self._column_parallel()
        yield from self._row_parallel()
        yield from self._attention()
        yield from self._pointwise()

    def _column_parallel(self) -> Iterator[tuple[str, bool]]:
        rows, leaves = 150, self.s.leaves
        spans = Spans.of([40, 1, 70, 39], self.device)
        for n in self.s.widths:
            x, w, dy = (
                self.random(rows, self.s.hidden),
                self.random(leaves, n, self.s.hidden),
                self.random(rows, leaves * n),
            )
            y = self.ops.linear(x, w)
            yield "linear: rows", self._rows_hold(lambda t, w=w: self.ops.linear(t, w), x, y)
            yield "linear: leaves", same_bits(self.ops.linear(x, w[1:2]), y[:, n : 2 * n])
            one, all_leaves = ((1, 2),), ((0, leaves),)
            dx = self.ops.linear_dx_nodes(dy, w, all_leaves)[0]
            yield (
                "linear_dx_nodes: rows",
                self._rows_hold(lambda t, w=w, a=all_leaves: self.ops.linear_dx_nodes(t, w, a)[0], dy, dx),
            )
            alone = self.ops.linear_dx_nodes(dy[:, n : 2 * n].contiguous(), w[1:2], ((0, 1),))
            yield "linear_dx_nodes: leaves", same_bits(alone, self.ops.linear_dx_nodes(dy, w, one))
            yield (
                "linear_dw: leaves, samples",
                self._dw_holds(
                    lambda d, s, out, x=x: self.ops.linear_dw(d, x[: s.total], s, out),
                    dy,
                    spans,
                    (leaves, n, self.s.hidden),
                    n,
                ),
            )
        x, w = self.random(rows, self.s.hidden), self.random(1, 1, self.s.hidden)  # a value head
        yield (
            "linear: rows, one column",
            self._rows_hold(lambda t: self.ops.linear(t, w), x, self.ops.linear(x, w)),
        )

    def _dw_holds(
        self,
        dw: Callable[[Tensor, Spans, Tensor], None],
        dy: Tensor,
        spans: Spans,
        shape: tuple[int, int, int],
        n: int,
    ) -> bool:
        whole = torch.zeros(shape, device=self.device)
        dw(dy, spans, whole)
        part = torch.zeros(1, *shape[1:], device=self.device)
        dw(dy[:, n : 2 * n].contiguous(), spans, part)
        return same_bits(whole[1:2], part)

    def _row_parallel(self) -> Iterator[tuple[str, bool]]:
        rows, leaves = 150, self.s.leaves
        for k in self.s.inner:
            x, w = self.random(rows, leaves * k), self.random(leaves, self.s.hidden, k)
            every = ((0, leaves),)
            y = self.ops.row_linear_nodes(x, w, every)[0]
            yield (
                "row_linear_nodes: rows",
                self._rows_hold(lambda t, w=w, e=every: self.ops.row_linear_nodes(t, w, e)[0], x, y),
            )
            alone = self.ops.row_linear_nodes(x[:, k : 2 * k].contiguous(), w[1:2], ((0, 1),))
            yield "row_linear_nodes: leaves", same_bits(alone, self.ops.row_linear_nodes(x, w, ((1, 2),)))
            dy = self.random(rows, self.s.hidden)
            dx = self.ops.row_linear_dx(dy, w)
            yield "row_linear_dx: rows", self._rows_hold(lambda t, w=w: self.ops.row_linear_dx(t, w), dy, dx)
            yield "row_linear_dx: leaves", same_bits(self.ops.row_linear_dx(dy, w[1:2]), dx[:, k : 2 * k])
            spans = Spans.of([40, 1, 70, 39], self.device)
            whole = torch.zeros(leaves, self.s.hidden, k, device=self.device)
            part = torch.zeros(1, self.s.hidden, k, device=self.device)
            self.ops.row_linear_dw(dy, x, spans, whole)
            self.ops.row_linear_dw(dy, x[:, k : 2 * k].contiguous(), spans, part)
            yield "row_linear_dw: leaves", same_bits(whole[1:2], part)

    def _rows_hold(self, op: Callable[[Tensor], Tensor], x: Tensor, y: Tensor) -> bool:
        """Any run of rows, one row included, at another place gives the same bits."""
        cuts = ((0, 1), (17, 18), (149, 150), (3, 8), (60, 130))
        return all(same_bits(op(x[a:b].clone()), y[a:b]) for a, b in cuts)

    def _attention(self) -> Iterator[tuple[str, bool]]:
        lengths, d, scale = [45, 1, 70], self.s.head_dim, self.s.head_dim**-0.5
        spans = Spans.of(lengths, self.device)
        heads, kv_heads = 2 * self.s.heads, 2 * self.s.kv_heads
        q, do = self.random(spans.total, heads, d), self.random(spans.total, heads, d)
        k, v = (self.random(spans.total, kv_heads, d) for _ in range(2))
        o, lse = self.ops.attention(q, k, v, spans, scale)
        grads = self.ops.attention_dx(do, q, k, v, o, lse, spans, scale)
        alone, a, b = Spans.of(lengths[2:], self.device), spans.offsets[2], spans.offsets[3]
        h, hk = self.s.heads, self.s.kv_heads
        part = [t[a:b, n:].contiguous() for t, n in ((q, h), (k, hk), (v, hk))]
        o2, lse2 = self.ops.attention(*part, alone, scale)
        yield "attention: heads, batch", same_bits(o2, o[a:b, h:].contiguous())
        grads2 = self.ops.attention_dx(do[a:b, h:].contiguous(), *part, o2, lse2, alone, scale)
        held = zip(grads2, grads, (h, hk, hk))
        yield "attention_dx: heads, batch", all(same_bits(x, y[a:b, n:].contiguous()) for x, y, n in held)
        yield "attention_decode: training row", self._decode_holds(q, k, v, o, spans, scale)

    def _decode_holds(self, q: Tensor, k: Tensor, v: Tensor, o: Tensor, spans: Spans, scale: float) -> bool:
        (k_pages, table), (v_pages, _) = (_paged(t, spans, 16) for t in (k, v))
        for at in ((44, 0, 69), (3, 0, 33)):
            rows = torch.tensor([s + p for s, p in zip(spans.offsets, at)], device=self.device)
            lengths = torch.tensor(at, device=self.device) + 1
            got = self.ops.attention_decode(q[rows], k_pages, v_pages, table, lengths, scale)
            if not same_bits(got, o[rows]):
                return False
        return True

    def _pointwise(self) -> Iterator[tuple[str, bool]]:
        x = self.random(150, self.s.hidden)
        w = torch.ones(self.s.hidden, device=self.device)
        yield (
            "rmsnorm: rows",
            self._rows_hold(lambda t: self.ops.rmsnorm(t, w, 1e-6)[0], x, self.ops.rmsnorm(x, w, 1e-6)[0]),
        )
        yield from self._fused(x, w)
        gate_up = self.random(150, 1, 2, self.s.widths[0])
        act = self.ops.swiglu(gate_up)
        yield "swiglu_dx: activation", same_bits(self.ops.swiglu_dx(act, gate_up)[1], act)
        yield "swiglu: rows", self._rows_hold(self.ops.swiglu, gate_up, self.ops.swiglu(gate_up))
        width = self.s.widths[-1]
        logits = self.random(150, 2 * width).float()
        none = torch.full((150,), -1, device=self.device)
        stats = self.ops.vocab_stats(logits, 2, [width, width], none)[0]
        yield (
            "vocab_stats: rows",
            self._rows_hold(
                lambda t: self.ops.vocab_stats(t, 2, [width, width], none[: t.shape[0]])[0], logits, stats
            ),
        )
        third = torch.full((150,), 1 / 3, dtype=torch.float64, device=self.device)
        yield (
            "sample: rows",
            self._rows_hold(
                lambda t: self.ops.sample(t, third[: t.shape[0]]), logits, self.ops.sample(logits, third)
            ),
        )
        half = self.ops.vocab_stats(logits[:, width:].contiguous(), 1, [width], none)[0]
        yield "vocab_stats: leaves", same_bits(half, stats[:, 1:].contiguous())

    def _fused(self, x: Tensor, w: Tensor) -> Iterator[tuple[str, bool]]:
        """One op for several gives their bits, also where the sum it reads was rounded before."""
        root = self.random(*x.shape).float() / 3
        rounded = root.to(self.dtype)
        y = self.ops.add(x, rounded)
        normed, rstd = self.ops.rmsnorm(y, w, 1e-6)
        pairs = [self.ops.add_rmsnorm(x, delta, w, 1e-6) for delta in (root, rounded)]
        wanted = (y, normed, rstd)
        yield "add_rmsnorm", all(same_bits(a, b) for got in pairs for a, b in zip(got, wanted))
        dx, dw = self.ops.rmsnorm_dx(rounded, x, w, rstd)
        got = self.ops.rmsnorm_dx(root, x, w, rstd, y)
        yield "rmsnorm_dx: residual", same_bits(got[0], self.ops.add(y, dx)) and same_bits(got[1], dw)
        d = self.s.head_dim
        q, k, v = self.random(150, self.s.heads + 2 * self.s.kv_heads, d).split(
            [self.s.heads, self.s.kv_heads, self.s.kv_heads], dim=1
        )
        cos, sin = torch.rand(2, 150, d // 2, generator=self.generator).to(self.device)
        k_pages, v_pages = self.random(2, 10, 16, self.s.kv_heads, d)
        slots = torch.arange(150, device=self.device)
        rotated = self.ops.rope_to_pages(q, k, v, cos, sin, k_pages, v_pages, slots)
        held = same_bits(rotated, self.ops.rope(q, cos, sin))
        held &= same_bits(k_pages.flatten(0, 1)[:150], self.ops.rope(k, cos, sin))
        yield "rope_to_pages", held and same_bits(v_pages.flatten(0, 1)[:150], v.contiguous())


def _paged(x: Tensor, spans: Spans, page: int) -> tuple[Tensor, Tensor]:
    """Packed rows [T, ...] as pages [P, page, ...] with their block table. A sample's pages lie apart and
    backwards, and what no sample wrote is NaN."""
    each, samples = -(-spans.max_length // page), len(spans)
    table = torch.arange(each * samples, dtype=torch.int32).flip(0).view(each, samples).t().contiguous()
    pages = torch.full((table.numel(), page, *x.shape[1:]), torch.nan, dtype=x.dtype, device=x.device)
    for entries, start, length in zip(table, spans.offsets, spans.lengths):
        position = torch.arange(length)
        rows = entries[position // page].long() * page + position % page
        pages.flatten(0, 1)[rows.to(x.device)] = x[start : start + length]
    return pages, table.to(x.device)
