"""A shape or dtype an op does not take raises ShapeError naming it, before anything is launched."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.device.conftest import Random
from unirl_scale.core.errors import ShapeError
from unirl_scale.kernels.spans import Spans

pytestmark = pytest.mark.cuda


def test_wrong_shapes_and_dtypes_are_named(ops: Any, random: Random) -> None:
    x, w = random(8, 32), random(2, 16, 32)
    spans, out = Spans.of([8], "cuda"), torch.zeros(2, 16, 32, device="cuda")
    q, kv = random(8, 4, 64), random(8, 3, 64)
    cases = [
        (lambda: ops.linear(x[:, :31], w), r"linear: got \[8, 31\] bfloat16, \[2, 16, 32\] bfloat16"),
        (lambda: ops.linear(x.half(), w.half()), "float16"),
        (lambda: ops.linear(x, w.float()), "fp32 or bf16, the same for all"),
        (lambda: ops.row_linear_nodes(x, w, ((0, 2),)), r"x \[M, L\*k\]"),
        (lambda: ops.linear_dw(x, random(7, 32), spans, out), "T = 8 of spans"),
        (lambda: ops.linear_dw(random(8, 32), x, spans, out.bfloat16()), "contiguous fp32"),
        (lambda: ops.tree_sum(torch.empty(0, 3, device="cuda")), "n >= 1"),
        (lambda: ops.attention(q, kv, kv, spans, 1.0), "hk dividing h"),
        (lambda: ops.attention(random(8, 1, 512), *[random(8, 1, 512)] * 2, spans, 1.0), "d <= 256"),
        (lambda: ops.rope(random(8, 2, 5), *[random(8, 2, dtype=torch.float32)] * 2), "d even"),
        (lambda: ops.swiglu(random(8, 2, 3, 4)), r"\[T, L, 2, f\]"),
        (lambda: ops.block_sumsq(torch.zeros(2, 3, device="cuda")), "power of two"),
        (
            lambda: ops.vocab_stats(torch.zeros(2, 8, device="cuda"), 2, [5, 4], torch.zeros(2).cuda()),
            r"valid columns \[5, 4\]",
        ),
    ]
    for call, message in cases:
        with pytest.raises(ShapeError, match=message):
            call()
