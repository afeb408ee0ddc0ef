"""Compile the kernels for a Hopper GPU without one.

    python -m tests.compile_kernels    # prints name and shared bytes of each

Every launch of `CudaOps` on CPU tensors is turned into a compilation of its kernel for compute capability
9.0, down to machine code. What this cannot show: results.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction
from triton.runtime.jit import JITFunction, mangle_type

from unirl_scale.kernels.cuda.device import Device
from unirl_scale.kernels.cuda.table import CudaOps
from unirl_scale.kernels.spans import Spans

TARGET = GPUTarget("cuda", 90, 32)
H200 = Device(name="NVIDIA H200", programs=132, l2_bytes=50 << 20, hopper=True)


def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
    """Stands in for JITFunction.run."""
    given = dict(zip(self.arg_names, args)) | kwargs
    options = {name: given.pop(name) for name in list(given) if name not in self.arg_names}
    constants = {(p.num,): given[p.name] for p in self.params if p.is_constexpr}
    signature = {p.name: "constexpr" if p.is_constexpr else mangle_type(given[p.name]) for p in self.params}
    # What a launch would find, so that copies are as wide and pipelines as deep as there.
    aligned = {
        (p.num,): [["tt.divisibility", 16]]
        for p in self.params
        if not p.is_constexpr and _aligned(given[p.name], specialized=not p.do_not_specialize)
    }
    kind = GluonASTSource if isinstance(self, GluonJITFunction) else ASTSource
    source = kind(self, signature, constants, aligned)
    kernel = triton.compile(source, target=TARGET, options=options)
    sys.stdout.write(f"{self.__module__.rpartition('.')[2]}.{self.__name__} {kernel.metadata.shared}\n")


def _aligned(value: Any, *, specialized: bool) -> bool:
    return isinstance(value, Tensor) or (specialized and isinstance(value, int) and value % 16 == 0)


def bf16(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.bfloat16)


def products(ops: CudaOps) -> None:
    hidden, width, leaves = 256, 512, 4
    w, rows = bf16(leaves, width, hidden), 8 * leaves * 1024
    for tokens in (16, 64, rows):
        ops.linear(bf16(tokens, hidden), w)
        ops.row_linear_nodes(bf16(tokens, leaves * hidden), bf16(leaves, width, hidden), ((0, leaves),))
    spans = Spans.of([rows])
    ops.linear_dx_nodes(bf16(rows, leaves * width), w, ((0, leaves),))
    ops.linear_dw(bf16(rows, leaves * width), bf16(rows, hidden), spans, torch.zeros(leaves, width, hidden))


def attention(ops: CudaOps, width: int) -> None:
    spans = Spans.of([130, 100])
    q, k, v = bf16(230, 8, width), bf16(230, 2, width), bf16(230, 2, width)
    o, lse = ops.attention(q, k, v, spans, 0.1)
    ops.attention_dx(o, q, k, v, o, lse, spans, 0.1)
    pages, table = bf16(8, 64, 2, width), torch.zeros(3, 2, dtype=torch.int32)
    ops.attention_decode(q[:3], pages, pages, table, torch.ones(3, dtype=torch.int64), 0.1)
    angle = torch.zeros(3, width // 2)
    ops.rope_to_pages(q[:3], k[:3], v[:3], angle, angle, pages, pages, torch.arange(3))


def rows(ops: CudaOps) -> None:
    x, w, root = bf16(64, 2048), torch.ones(2048), torch.zeros(64, 2048)
    y, normed, rstd = ops.add_rmsnorm(x, root, w, 1e-6)
    ops.rmsnorm_dx(root, y, w, rstd, normed)
    ops.add(x, root)
    ops.swiglu_dx(ops.swiglu(bf16(8, 2, 2, 128)), bf16(8, 2, 2, 128))
    ops.tree_sum(torch.zeros(5, 100))
    logits, per_row, targets = torch.zeros(64, 2000), torch.zeros(64), torch.zeros(64, dtype=torch.int64)
    ops.vocab_stats(logits, 2, [1000, 900], targets)
    ops.vocab_dlogits(logits, 2, [1000, 900], targets, *[per_row] * 4, scale=0.5, dtype=torch.bfloat16)
    ops.sample(logits, per_row.double())


def main() -> None:
    JITFunction.run = compile_only
    ops = CudaOps(H200)
    products(ops)
    for width in (64, 128, 256):
        attention(ops, width)
    rows(ops)


if __name__ == "__main__":
    main()
