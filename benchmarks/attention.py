"""Training attention of the op table against cuDNN (non-deterministic backward), causal, bf16.

python -m benchmarks.attention [--json PATH]
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.device_timing import interleaved_us, report
from unirl_scale.kernels.cuda.table import CudaOps
from unirl_scale.kernels.spans import Spans

# batch, query heads, kv heads, tokens, head size
SHAPES = [(2, 32, 32, 4096, 128), (4, 32, 8, 4096, 128), (4, 32, 8, 4096, 64), (8, 32, 8, 2048, 128)]


def measure(ops: CudaOps, batch: int, heads: int, kv_heads: int, tokens: int, width: int) -> dict[str, Any]:
    """TFLOP/s; causal products count half, a backward pass two and a half forward ones."""
    spans, scale = Spans.of([tokens] * batch, "cuda"), width**-0.5

    def random(count: int) -> torch.Tensor:
        return torch.randn(batch * tokens, count, width, device="cuda", dtype=torch.bfloat16)

    q, k, v, do = random(heads), random(kv_heads), random(kv_heads), random(heads)
    group = heads // kv_heads
    wide = (q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1), do)
    q4, k4, v4, do4 = (t.unflatten(0, (batch, tokens)).transpose(1, 2).detach() for t in wide)
    leaves = [t.clone().requires_grad_() for t in (q4, k4, v4)]
    o, lse = ops.attention(q, k, v, spans, scale)

    def cudnn_forward() -> None:
        with torch.no_grad():
            scaled_dot_product_attention(q4, k4, v4, is_causal=True)

    def cudnn_both() -> None:
        scaled_dot_product_attention(*leaves, is_causal=True).backward(do4)

    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        f_peer, f_ours, fb_peer, b_ours = interleaved_us(
            [
                cudnn_forward,
                lambda: ops.attention(q, k, v, spans, scale),
                cudnn_both,
                lambda: ops.attention_dx(do, q, k, v, o, lse, spans, scale),
            ]
        )
    flop = 2.0 * batch * heads * tokens**2 * width
    return {
        "B h hk T d": f"{batch} {heads} {kv_heads} {tokens} {width}",
        "fwd cudnn": flop / f_peer / 1e6,
        "fwd": flop / f_ours / 1e6,
        "fwd ratio": f_peer / f_ours,
        "fwd+bwd cudnn": 3.5 * flop / fb_peer / 1e6,
        "fwd+bwd": 3.5 * flop / (f_ours + b_ours) / 1e6,
        "fwd+bwd ratio": fb_peer / (f_ours + b_ours),
        "bwd us": b_ours,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    ops = CudaOps()
    report([measure(ops, *shape) for shape in SHAPES], args.json)


if __name__ == "__main__":
    main()
