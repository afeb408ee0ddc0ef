"""Products of the op table against cuBLAS: training shapes of a 1.1B and an 8B model, and decode.

python -m benchmarks.gemm [--json PATH] [--rows 8192]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.device_timing import geomean, graph_of, interleaved_us, report
from unirl_scale.kernels.cuda.table import CudaOps
from unirl_scale.kernels.spans import Spans

# name, output columns N, inner size K
TRAINING = [
    ("1.1B qkv", 3072, 2048),
    ("1.1B attn_out", 2048, 2048),
    ("1.1B gate_up", 16384, 2048),
    ("1.1B ffn_down", 2048, 8192),
    ("8B qkv", 6144, 4096),
    ("8B attn_out", 4096, 4096),
    ("8B gate_up", 28672, 4096),
    ("8B ffn_down", 4096, 14336),
]
DECODE = [*TRAINING, ("1.1B lm_head", 32000, 2048)]
BYTES_PER_US = 4.3e6  # of a device-to-device copy on an H200, reads and writes counted
ROTATE_BYTES = 300e6  # decode weights are rotated through more than L2 holds
LEAVES = 4


def random(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def added_by_sample(dy: Tensor, x: Tensor, spans: Spans, grad: Tensor) -> None:
    """What `dw` does, with cuBLAS: an fp32 product of each sample, added to the fp32 gradient."""
    for start, stop in zip(spans.offsets, spans.offsets[1:]):
        grad += torch.mm(dy[start:stop].t(), x[start:stop], out_dtype=torch.float32)


def training_row(ops: CudaOps, name: str, n: int, k: int, rows: int, sample: int) -> dict[str, Any]:
    """TFLOP/s. `dw` adds into fp32 sample by sample; `dw cublas` is one bf16 product of all tokens."""
    spans = Spans.of([sample] * (rows // sample), "cuda")
    x, w, dy = random(rows, k), random(1, n, k), random(rows, n)
    grad = torch.zeros(1, n, k, device="cuda")
    split_rows, split_columns = w.view(LEAVES, n // LEAVES, k), w.view(n, LEAVES, k // LEAVES).transpose(0, 1)
    split_columns = split_columns.contiguous()
    tree = ((0, LEAVES),)
    calls: dict[str, Callable[[], object]] = {
        "fwd cublas": lambda: x @ w[0].t(),
        "fwd": lambda: ops.linear(x, w),
        "dx cublas": lambda: dy @ w[0],
        "dx": lambda: ops.row_linear_dx(dy, w),
        "dw cublas": lambda: dy.t() @ x,
        "dw": lambda: ops.linear_dw(dy, x, spans, grad),
        "dw cublas fp32": lambda: added_by_sample(dy, x, spans, grad[0]),
        f"row fwd, {LEAVES} leaves": lambda: ops.row_linear_nodes(x, split_columns, tree),
        f"col dx, {LEAVES} leaves": lambda: ops.linear_dx_nodes(dy, split_rows, tree),
    }
    times = interleaved_us(list(calls.values()))
    flop = 2.0 * rows * n * k
    row = {"shape": name} | {key: flop / us / 1e6 for key, us in zip(calls, times)}
    return row | {
        "same bits": torch.equal(x @ w[0].t(), ops.linear(x, w)),
        "ratio": geomean(
            [row["fwd"] / row["fwd cublas"], row["dx"] / row["dx cublas"], row["dw"] / row["dw cublas"]]
        ),
    }


def decode_row(ops: CudaOps, name: str, n: int, k: int, rows: int) -> dict[str, Any]:
    """Microseconds a product, in a CUDA graph over many weights."""
    count = max(2, int(ROTATE_BYTES / (2 * n * k)))
    weights = [random(1, n, k) for _ in range(count)]
    leaves = [w.view(LEAVES, n, k // LEAVES) for w in weights]
    x = random(rows, k)

    def cublas() -> None:
        for w in weights:
            torch.mm(x, w[0].t())

    def ours() -> None:
        for w in weights:
            ops.linear(x, w)

    def tree() -> None:
        for w in leaves:
            ops.row_linear_nodes(x, w, ((0, LEAVES),))

    times = [us / count for us in interleaved_us([graph_of(f) for f in (cublas, ours, tree)], 6)]
    floor = 2 * n * k / BYTES_PER_US
    return {
        "shape": name,
        "M": rows,
        "floor us": floor,
        "cublas us": times[0],
        "ours us": times[1],
        f"{LEAVES} leaves us": times[2],
        "ratio": times[0] / times[1],
        "of floor": floor / times[1],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rows", type=int, default=8192)
    parser.add_argument("--sample", type=int, default=4096)
    args = parser.parse_args()
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    ops = CudaOps()
    training = [training_row(ops, *shape, args.rows, args.sample) for shape in TRAINING]
    report(training, args.json)
    print(f"geomean of ours over cuBLAS, fwd dx dw: {geomean([row['ratio'] for row in training]):.3f}")
    decode = [decode_row(ops, *shape, rows) for shape in DECODE for rows in (1, 16, 32, 64)]
    report(decode, args.json.with_suffix(".decode.json") if args.json else None)
    print(f"geomean of ours over cuBLAS, decode: {geomean([row['ratio'] for row in decode]):.3f}")


if __name__ == "__main__":
    main()
