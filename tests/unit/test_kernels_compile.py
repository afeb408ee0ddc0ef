"""The CUDA kernels compile for a Hopper GPU on a machine without one, and fit its shared memory."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

SHARED_BYTES = 227 << 10  # that a program may have on compute capability 9.0
KERNELS = {
    "attention.attention_decode_kernel",
    "attention.attention_kernel",
    "attention_dx.attention_dkv_kernel",
    "attention_dx.attention_dq_kernel",
    "attention_dx.row_stats_kernel",
    "decode.decode_products_kernel",
    "hopper_attention.attention_kernel",
    "hopper_attention_dkv.attention_dkv_kernel",
    "hopper_attention_dq.attention_dq_kernel",
    "hopper_gemm.leaf_products_kernel",
    "hopper_weight_grad.weight_grad_kernel",
    "norm.rmsnorm_dx_kernel",
    "norm.rmsnorm_kernel",
    "pointwise.add_kernel",
    "pointwise.rope_to_pages_kernel",
    "pointwise.swiglu_dx_kernel",
    "pointwise.swiglu_kernel",
    "sampling.sample_kernel",
    "sums.block_tree_kernel",
    "vocab.vocab_dlogits_kernel",
    "vocab.vocab_stats_kernel",
}


def test_the_kernels_compile_for_hopper_and_fit_its_shared_memory(tmp_path: Path) -> None:
    if find_spec("triton") is None:
        pytest.skip("triton is not installed (pip install unirl-scale[cuda])")
    # A process of its own: this one may have asked for Triton's interpreter. A cache of its own: to compile.
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.compile_kernels"],
        env=environment | {"TRITON_CACHE_DIR": str(tmp_path)},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    assert {name for name, _ in lines} == KERNELS
    assert max(int(shared) for _, shared in lines) <= SHARED_BYTES
