"""Start-up proof: the tuned kernels give the bits of the portable ones, on this device, at a model's shapes.

The portable kernels are the truth: kernels/check.py probes their invariance. A tuned kernel that differs in
one bit is named, so that a run stops instead of promising what this GPU, driver or compiler does not hold.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from unirl_scale.kernels.check import ProbeShapes, same_bits
from unirl_scale.kernels.cuda.device import Device
from unirl_scale.kernels.cuda.table import CudaOps
from unirl_scale.kernels.spans import Spans

ROWS = (1, 33, 300)  # decode, a full decode batch, training
LENGTHS = (45, 0, 1, 254)
PAGE = 64  # cache rows of a page, smaller than a KV tile

Call = Callable[[CudaOps], Tensor]
# An op's name, what is asked of the tuned table and what of the portable one.
Comparison = tuple[str, Call, Call]


def tuned_failures(ops: CudaOps, shapes: ProbeShapes, dtype: torch.dtype) -> list[str]:
    """Names of the ops whose tuned kernel differs from the portable one; empty when none does.

    Raises:
        ShapeError: the model's shapes are none that the ops take.
    """
    portable = CudaOps(Device())
    return sorted(
        {name for name, ours, truth in _calls(shapes, dtype) if not same_bits(ours(ops), truth(portable))}
    )


def _calls(s: ProbeShapes, dtype: torch.dtype) -> Iterator[Comparison]:
    generator = torch.Generator("cuda").manual_seed(0)

    def random(*shape: int) -> Tensor:
        """Values of several magnitudes, so that another order of addition shows."""
        x = torch.randn(shape, generator=generator, device="cuda")
        return (x * torch.exp(2 * torch.randn(shape, generator=generator, device="cuda"))).to(dtype)

    for rows in ROWS:
        for n in s.widths:
            w, x = random(s.leaves, n, s.hidden), random(rows, s.hidden)
            yield from _column_parallel(w, x, random(rows, s.leaves * n))
        for k in s.inner:
            w, x = random(s.leaves, s.hidden, k), random(rows, s.leaves * k)
            yield from _row_parallel(w, x, random(rows, s.hidden))
    heads, kv_heads, total = s.heads * s.leaves, s.kv_heads * s.leaves, sum(LENGTHS)
    q, do = random(total, heads, s.head_dim), random(total, heads, s.head_dim)
    yield from _attention(q, do, random(total, kv_heads, s.head_dim), random(total, kv_heads, s.head_dim))


def _same(name: str, call: Call) -> Comparison:
    return name, call, call


def _column_parallel(w: Tensor, x: Tensor, dy: Tensor) -> Iterator[Comparison]:
    spans, whole = _halves(x), ((0, w.shape[0]),)
    yield _same("linear", lambda ops: ops.linear(x, w, out_fp32=True))
    yield _same("linear_dx_nodes", lambda ops: ops.linear_dx_nodes(dy, w, whole))
    yield _same("linear_dw", lambda ops: _added(w, lambda out: ops.linear_dw(dy, x, spans, out)))


def _row_parallel(w: Tensor, x: Tensor, dy: Tensor) -> Iterator[Comparison]:
    spans, whole = _halves(x), ((0, w.shape[0]),)
    yield _same("row_linear_nodes", lambda ops: ops.row_linear_nodes(x, w, whole))
    yield _same("row_linear_dx", lambda ops: ops.row_linear_dx(dy, w))
    yield _same("row_linear_dw", lambda ops: _added(w, lambda out: ops.row_linear_dw(dy, x, spans, out)))


def _attention(q: Tensor, do: Tensor, k: Tensor, v: Tensor) -> Iterator[Comparison]:
    spans, scale = Spans.of(LENGTHS, q.device), q.shape[2] ** -0.5

    def gradients(ops: CudaOps) -> Tensor:
        o, lse = ops.attention(q, k, v, spans, scale)
        return torch.cat([g.flatten() for g in ops.attention_dx(do, q, k, v, o, lse, spans, scale)])

    def decode(ops: CudaOps) -> Tensor:
        start, stop = spans.offsets[-2:]
        length = torch.tensor([stop - start], device=q.device)
        pages, table = _pages(k[start:stop]), torch.arange(-(-(stop - start) // PAGE), device=q.device)
        table = table.to(torch.int32).unsqueeze(0)
        return ops.attention_decode(q[-1:], pages, _pages(v[start:stop]), table, length, scale)

    yield _same("attention", lambda ops: ops.attention(q, k, v, spans, scale)[0])
    yield _same("attention_dx", gradients)
    # Decode owes the bits of the training row.
    yield "attention_decode", decode, lambda ops: ops.attention(q, k, v, spans, scale)[0][-1:]


def _pages(x: Tensor) -> Tensor:
    """One sample's rows [T, hk, d] as consecutive pages [P, PAGE, hk, d], zero-padded."""
    pages = x.new_zeros(-(-x.shape[0] // PAGE), PAGE, *x.shape[1:])
    pages.flatten(0, 1)[: x.shape[0]] = x
    return pages


def _halves(x: Tensor) -> Spans:
    rows = x.shape[0]
    return Spans.of([rows // 2, rows - rows // 2], x.device)


def _added(w: Tensor, add: Callable[[Tensor], None]) -> Tensor:
    out = torch.zeros_like(w, dtype=torch.float32)
    add(out)
    return out
