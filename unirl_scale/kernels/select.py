"""Which op table a run uses: resolved once, proved by the self-check, never swapped silently."""

from __future__ import annotations

from collections.abc import Sequence

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
    fixed row blocks otherwise; an explicit choice is checked too. Modes `run` and `off` are not checked;
    `off` takes the fast table.

    Raises:
        InvarianceError: `layout` was asked and the platform cannot hold it; names the ops.
        ConfigError: the vendor has no op table here.
    """
    if hardware.vendor != "cpu":
        raise ConfigError(
            f"hardware.vendor: got {hardware.vendor}; this build has op tables for cpu; "
            "hint: hardware.vendor=cpu"
        )
    if mode == "off":
        return FastOps()
    paths = ["whole", "blocked"] if hardware.gemm == "auto" else [hardware.gemm]
    if mode == "run":
        return ReferenceOps("whole" if hardware.gemm == "auto" else hardware.gemm)
    found: dict[str, list[str]] = {}
    for path in paths:
        ops = ReferenceOps("whole" if path == "whole" else "blocked")
        # fp32 is probed for bf16 runs too: their sums are fp32, and rounding would hide most differences.
        dtypes = {torch.float32, dtype}
        found[path] = sorted({f for s in shapes for d in dtypes for f in failures(ops, s, d, device)})
        if not found[path]:
            return ops
    listed = "; ".join(f"gemm {path}: {', '.join(names)}" for path, names in found.items())
    raise InvarianceError(
        f"invariance.mode: got layout; this platform does not hold it ({listed}); "
        "hint: hardware.threads=1, hardware.gemm=blocked, or invariance.mode=run"
    )


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
