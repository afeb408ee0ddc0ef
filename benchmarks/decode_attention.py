"""Decode attention and the memory-bound ops against the memory floor.

python -m benchmarks.decode_attention [--json PATH]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.device_timing import graph_of, interleaved_us, report
from benchmarks.gemm import BYTES_PER_US, random
from unirl_scale.kernels.cuda.table import CudaOps
from unirl_scale.kernels.spans import Spans

PAGE = 64  # rollout.page_size's default


def decode_row(
    ops: CudaOps, batch: int, heads: int, kv_heads: int, length: int, width: int
) -> dict[str, Any]:
    """Every sample has `length` tokens in scattered pages; the floor is reading its K and V once."""
    q, pages = random(batch, heads, width), batch * -(-length // PAGE)
    k, v = random(pages, PAGE, kv_heads, width), random(pages, PAGE, kv_heads, width)
    table = torch.randperm(pages, device="cuda").view(batch, -1).to(torch.int32)
    lengths = torch.full((batch,), length, device="cuda")
    (us,) = interleaved_us([graph_of(lambda: ops.attention_decode(q, k, v, table, lengths, width**-0.5))])
    floor = 2 * 2 * batch * length * kv_heads * width / BYTES_PER_US
    name = f"attention_decode B{batch} h{heads}/{kv_heads} S{length} d{width}"
    return {"op": name, "us": us, "floor us": floor, "of floor": floor / us}


def streaming_rows(
    ops: CudaOps, tokens: int = 16384, hidden: int = 2048, ffn: int = 8192
) -> list[dict[str, Any]]:
    """Ops whose floor is bytes: what they read and write, each once."""
    x, dy, w = random(tokens, hidden), random(tokens, hidden), torch.ones(hidden, device="cuda")
    rstd = torch.ones(tokens, device="cuda")
    gate_up, act = random(tokens, 4, 2, ffn // 4), random(tokens, 4, ffn // 4)
    heads, half = random(tokens, 32, 64), torch.ones(tokens, 32, device="cuda")
    leaves = torch.randn(4, tokens, hidden, device="cuda")
    root = leaves[0]
    spans = Spans.of([4096] * (tokens // 4096), "cuda")
    total = torch.zeros(hidden, device="cuda")
    logits = torch.randn(8192, 32000, device="cuda")
    targets = torch.randint(0, 32000, (8192,), device="cuda")
    per_row = torch.ones(8192, device="cuda")
    valid = [8000] * 4
    ids = torch.randint(0, 32000, (tokens,), device="cuda")
    table = torch.zeros(32000, hidden, device="cuda")
    blocks = torch.randn(4096, 65536, device="cuda")
    state = [torch.randn(2**28, device="cuda").abs_() for _ in range(4)]
    adamw = {"lr": 1e-4, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}
    adamw |= {"bias_correction1": 0.5, "bias_correction2": 0.5, "grad_scale": 1.0}
    row = tokens * hidden
    calls: list[tuple[str, float, Callable[[], object]]] = [
        ("rmsnorm", 4.0 * row, lambda: ops.rmsnorm(x, w, 1e-6)),
        ("rmsnorm_dx", 10.0 * row, lambda: ops.rmsnorm_dx(dy, x, w, rstd)),
        ("swiglu", 6.0 * tokens * ffn, lambda: ops.swiglu(gate_up)),
        ("add_rmsnorm", 10.0 * row, lambda: ops.add_rmsnorm(x, root, w, 1e-6)),
        ("rmsnorm_dx + residual", 14.0 * row, lambda: ops.rmsnorm_dx(root, x, w, rstd, dy)),
        ("swiglu_dx", 12.0 * tokens * ffn, lambda: ops.swiglu_dx(act, gate_up)),
        ("rope", 4.0 * row, lambda: ops.rope(heads, half, half)),
        ("tree_sum of 4", 20.0 * row, lambda: ops.tree_sum(leaves)),
        ("sum_tokens", 2.0 * row, lambda: ops.sum_tokens(x, spans, total)),
        ("vocab_stats", 4.0 * logits.numel(), lambda: ops.vocab_stats(logits, 4, valid, targets)),
        (
            "vocab_dlogits",
            6.0 * logits.numel(),
            lambda: ops.vocab_dlogits(
                logits, 4, valid, targets, *[per_row] * 4, scale=1.0, dtype=torch.bfloat16
            ),
        ),
        ("embedding_dw", 10.0 * row, lambda: ops.embedding_dw(x, ids, table)),
        ("block_sumsq", 4.0 * blocks.numel(), lambda: ops.block_sumsq(blocks)),
        ("adamw", 28.0 * state[0].numel(), lambda: ops.adamw(*state, **adamw)),
        ("copy", 4.0 * blocks.numel() * 2, lambda: blocks.clone()),
    ]
    times = interleaved_us([call for _, _, call in calls], 5)
    return [
        {"op": name, "us": us, "floor us": size / BYTES_PER_US, "of floor": size / BYTES_PER_US / us}
        for (name, size, _), us in zip(calls, times)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    ops = CudaOps()
    shapes = [(64, 32, 8, 4096, 128), (64, 32, 8, 1024, 64), (64, 32, 8, 4096, 64), (8, 32, 8, 4096, 128)]
    report([decode_row(ops, *shape) for shape in shapes] + streaming_rows(ops), args.json)


if __name__ == "__main__":
    main()
