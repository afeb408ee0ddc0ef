"""Which op table a run uses: resolved once, proved by the self-check, never swapped silently."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import torch

from unirl_scale.core.config import HardwareConfig, ModelConfig
from unirl_scale.core.errors import ConfigError, InvarianceError
from unirl_scale.kernels.check import ProbeShapes, failures
from unirl_scale.kernels.fast import FastOps
from unirl_scale.kernels.reference import ReferenceOps
from unirl_scale.kernels.table import OpTable


def op_table(
    hardware: HardwareConfig,
    mode: str,
    shapes: Sequence[ProbeShapes],
    dtype: torch.dtype,
    device: torch.device,
) -> OpTable:
    """The op table of a run.

    CPU: `gemm: auto` takes whole-matrix GEMM where the self-check proves it on this processor's BLAS, and
    fixed row blocks otherwise; an explicit choice is checked too. NVIDIA: Triton kernels. Ascend: the
    plain-torch table in fixed row blocks. Mode `run` is not checked; `off` takes the fast table.

    Raises:
        InvarianceError: `layout` was asked and the platform cannot hold it; names the ops.
        ConfigError: the vendor's packages are missing.
    """
    if mode == "off":
        return _fast_table(hardware.vendor)
    candidates = _candidates(hardware)
    if mode == "run":
        return candidates[0]
    found: dict[str, list[str]] = {}
    for ops in candidates:
        # fp32 is probed for bf16 runs too: their sums are fp32, and rounding would hide most differences.
        dtypes = {torch.float32, dtype} if hardware.vendor == "cpu" else {dtype}
        failed = {f for s in shapes for d in dtypes for f in failures(ops, s, d, device)}
        if hardware.vendor == "cuda":
            failed |= {f for s in shapes for f in _cuda("check").tuned_failures(ops, s, dtype)}
        found[ops.name] = sorted(failed)
        if not found[ops.name]:
            return ops
    listed = "; ".join(f"{name}: {', '.join(ops)}" for name, ops in found.items())
    raise InvarianceError(
        f"invariance.mode: got layout; this platform does not hold it ({listed}); "
        "hint: hardware.threads=1, hardware.gemm=blocked, or invariance.mode=run"
    )


def _candidates(hardware: HardwareConfig) -> list[OpTable]:
    """Tables to try, fastest first."""
    if hardware.vendor == "cuda":
        return [_cuda("table").CudaOps()]
    if hardware.vendor == "npu" or hardware.gemm == "blocked":
        return [ReferenceOps("blocked")]
    return [ReferenceOps("whole")] + ([ReferenceOps("blocked")] if hardware.gemm == "auto" else [])


def _fast_table(vendor: str) -> OpTable:
    if vendor == "cuda":
        table: OpTable = _cuda("fast").FastCudaOps()
        return table
    return FastOps()


def _cuda(module: str) -> Any:
    """A module of kernels/cuda, which needs Triton."""
    try:
        return importlib.import_module(f"unirl_scale.kernels.cuda.{module}")
    except ImportError as error:
        raise ConfigError(
            f"hardware.vendor: got cuda; needs the package triton ({error}); "
            "hint: pip install 'unirl-scale[cuda]'"
        ) from error


def probe_shapes(model: ModelConfig, leaves: int) -> ProbeShapes:
    """The leaf dimensions of a model (a critic's head needs no shapes of its own)."""
    heads, kv_heads = model.num_heads // leaves, model.num_kv_heads // leaves
    qkv = (heads + 2 * kv_heads) * model.head_dim
    ffn, vocab = model.ffn_size // leaves, -(-model.vocab_size // leaves)
    return ProbeShapes(
        hidden=model.hidden_size,
        widths=(qkv, 2 * ffn, vocab),
        inner=(heads * model.head_dim, ffn),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=model.head_dim,
        leaves=max(leaves, 2),
    )
