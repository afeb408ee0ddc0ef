"""The start-up self-check finds ops that break the contract, and the choice of an op table obeys it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.dist.engine_ranks import GQA, MHA
from unirl_scale.core.config import HardwareConfig
from unirl_scale.core.errors import InvarianceError
from unirl_scale.kernels import select
from unirl_scale.kernels.check import failures, same_bits
from unirl_scale.kernels.fast import FastOps
from unirl_scale.kernels.reference import ReferenceOps
from unirl_scale.kernels.select import op_table, probe_shapes

CPU = torch.device("cpu")
SHAPES = probe_shapes(MHA, 4)


def off_by_one_bit(x: Tensor) -> Tensor:
    """Another rounding: the last mantissa bit of every element flipped."""
    out = x.clone()
    bits = out.view(torch.int32 if x.dtype == torch.float32 else torch.int16)
    bits ^= 1
    return out


def broken(method: str, when: Callable[..., bool]) -> type[ReferenceOps]:
    """ReferenceOps whose `method` errs by one bit in the cases that `when` picks from its arguments."""
    original = getattr(ReferenceOps, method)

    def op(self: ReferenceOps, *args: Any, **kw: Any) -> Any:
        result = original(self, *args, **kw)
        if not when(*args):
            return result
        if result is None:  # an accumulating op: its last argument is the result
            args[-1].copy_(off_by_one_bit(args[-1]))
            return None
        return (
            (off_by_one_bit(result[0]), *result[1:]) if isinstance(result, tuple) else off_by_one_bit(result)
        )

    return type(f"Broken_{method}", (ReferenceOps,), {method: op})


def many_rows(x: Tensor, *_: Any) -> bool:
    return x.shape[0] > 100


def many_leaves(x: Tensor, w: Tensor, *_: Any) -> bool:
    return w.shape[0] > 1


BROKEN = [
    ("linear", many_rows, "linear: rows"),
    ("linear", many_leaves, "linear: leaves"),
    ("linear", lambda x, w, *_: x.shape[0] > 100 and w.shape[1] == 1, "linear: rows, one column"),
    ("linear_dx_nodes", many_rows, "linear_dx_nodes: rows"),
    ("linear_dx_nodes", many_leaves, "linear_dx_nodes: leaves"),
    ("linear_dw", lambda dy, x, spans, out: out.shape[0] == 1, "linear_dw: leaves, samples"),
    ("row_linear_nodes", many_rows, "row_linear_nodes: rows"),
    ("row_linear_nodes", many_leaves, "row_linear_nodes: leaves"),
    ("row_linear_dx", many_rows, "row_linear_dx: rows"),
    ("row_linear_dx", lambda dy, w: w.shape[0] == 1, "row_linear_dx: leaves"),
    ("row_linear_dw", lambda dy, x, spans, out: out.shape[0] == 1, "row_linear_dw: leaves"),
    ("attention", lambda q, k, v, spans, scale: len(spans) == 1, "attention: heads, batch"),
    ("attention_dx", lambda do, q, k, v, o, lse, spans, scale: len(spans) == 1, "attention_dx: heads, batch"),
    ("attention_decode", lambda *_: True, "attention_decode: training row"),
    ("rmsnorm", many_rows, "rmsnorm: rows"),
    ("swiglu", many_rows, "swiglu: rows"),
    ("vocab_stats", many_rows, "vocab_stats: rows"),
    ("sample", lambda logits, uniforms: logits.shape[0] > 100, "sample: rows"),
    ("vocab_stats", lambda logits, leaves, *_: leaves == 1, "vocab_stats: leaves"),
]


@pytest.mark.parametrize(("method", "when", "name"), BROKEN, ids=[name for *_, name in BROKEN])
def test_one_wrong_bit_is_named(method: str, when: Callable[..., bool], name: str) -> None:
    found = failures(broken(method, when)("blocked"), SHAPES, torch.float32, CPU)
    assert name in found
    reads_it = {"attention_dx", "attention_decode"} if method == "attention" else set()
    assert {f.split(":")[0] for f in found} <= {method, *reads_it}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("model", "leaves"), [(MHA, 4), (MHA, 12), (GQA, 6)])
def test_the_portable_path_passes_where_it_is_forced(model, leaves, dtype) -> None:
    hardware = HardwareConfig(gemm="blocked")
    ops = op_table(hardware, "layout", [probe_shapes(model, leaves)], dtype, CPU)
    assert ops.name == "reference-blocked"


def test_bits_tell_negative_zero_and_equal_nans() -> None:
    nan = torch.tensor([torch.nan, 1.0])
    assert same_bits(nan, nan.clone()) and not torch.equal(nan, nan)
    assert not same_bits(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert not same_bits(torch.zeros(2), torch.zeros(2, 1))


# ---- the choice -------------------------------------------------------------------------------------
def replace_table(
    monkeypatch: pytest.MonkeyPatch, whole: type[ReferenceOps], blocked: type[ReferenceOps]
) -> None:
    classes = {"whole": whole, "blocked": blocked}
    monkeypatch.setattr(select, "ReferenceOps", lambda gemm: classes[gemm](gemm))


class RowDependent(ReferenceOps):
    """A BLAS that takes another kernel for many rows."""

    def _matmul(self, x: Tensor, b: Tensor, out: Tensor) -> None:
        super()._matmul(x, b, out)
        if x.shape[0] > 64:
            out.copy_(off_by_one_bit(out))


class Sound(ReferenceOps):
    """What a processor that holds the promise would have: whole by name, fixed shapes by nature."""

    def __init__(self, gemm: str) -> None:
        super().__init__("blocked")
        self.name = f"reference-{gemm}"


def chosen(gemm: str, mode: str = "layout") -> str:
    return op_table(HardwareConfig(gemm=gemm), mode, [SHAPES], torch.float32, CPU).name


def test_auto_takes_whole_matrices_where_they_hold(monkeypatch) -> None:
    replace_table(monkeypatch, Sound, RowDependent)
    assert chosen("auto") == "reference-whole"
    assert chosen("whole") == "reference-whole"


def test_auto_falls_back_to_row_blocks_where_whole_matrices_do_not_hold(monkeypatch) -> None:
    replace_table(monkeypatch, RowDependent, Sound)
    assert chosen("auto") == "reference-blocked"


@pytest.mark.parametrize("gemm", ["auto", "whole", "blocked"])
def test_a_platform_that_holds_nothing_stops_the_run_and_names_the_ops(monkeypatch, gemm) -> None:
    replace_table(monkeypatch, RowDependent, RowDependent)
    with pytest.raises(InvarianceError) as caught:
        chosen(gemm)
    text = str(caught.value)
    assert text.startswith("invariance.mode: got layout; this platform does not hold it")
    assert "linear: rows" in text and "row_linear_nodes: rows" in text and "hint:" in text
    assert "attention" not in text.split("hint:")[0]


def test_an_explicit_choice_is_checked_and_never_swapped(monkeypatch) -> None:
    replace_table(monkeypatch, RowDependent, Sound)
    with pytest.raises(InvarianceError, match="whole"):
        chosen("whole")


def test_mode_run_is_not_checked_and_mode_off_takes_the_fast_table(monkeypatch) -> None:
    replace_table(monkeypatch, RowDependent, RowDependent)
    assert chosen("blocked", mode="run") == "reference-blocked"
    assert isinstance(op_table(HardwareConfig(), "off", [SHAPES], torch.float32, CPU), FastOps)


def test_every_model_of_a_run_is_probed(monkeypatch) -> None:
    """A table that only fails at the second model's width is refused."""
    other = probe_shapes(GQA, 6)
    fails = broken("linear", lambda x, w, *_: x.shape[0] > 100 and w.shape[1] == other.widths[0])
    assert other.widths[0] not in SHAPES.widths
    replace_table(monkeypatch, fails, fails)
    assert op_table(HardwareConfig(), "layout", [SHAPES], torch.float32, CPU)
    with pytest.raises(InvarianceError, match="linear: rows"):
        op_table(HardwareConfig(), "layout", [SHAPES, other], torch.float32, CPU)
