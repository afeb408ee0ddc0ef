"""The Triton decode kernel over pages, in Triton's interpreter: the bits of its own training row.

Needs the package triton; tests/device holds the same for the compiled kernel. fp32 only: the interpreter
multiplies bf16 tiles as if they were integers. It covers addressing and order, not the tensor cores.
"""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before triton loads: its own library functions are decorated then
pytest.importorskip("triton")

from tests.unit.test_paged_attention import case, last_rows, paged
from unirl_scale.core.errors import ShapeError
from unirl_scale.kernels.check import same_bits
from unirl_scale.kernels.cuda import attention as kernels
from unirl_scale.kernels.cuda.device import Device
from unirl_scale.kernels.cuda.table import CudaOps
from unirl_scale.kernels.spans import Spans

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="tests/device runs the compiled kernel"),
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning"),
]
LENGTHS = [1, 33, 129, 64]


@pytest.fixture(scope="module")
def trained() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(q, k, v, training's o of the portable kernel)."""
    q, k, v, truth = case(torch.float32, LENGTHS)
    o, _ = kernels.attention(q, k, v, Spans.of(LENGTHS), 0.3)
    assert (o - truth).abs().max() < 1e-5
    return q, k, v, o


def decoded(q: Tensor, k_pages: Tensor, v_pages: Tensor, table: Tensor) -> Tensor:
    rows, lengths = q[last_rows(LENGTHS)], torch.tensor(LENGTHS)
    return CudaOps(Device()).attention_decode(rows, k_pages, v_pages, table, lengths, 0.3)


@pytest.mark.parametrize("page", [1, 16, 32, 64, 96])
def test_every_page_size_gives_trainings_rows(trained, page: int) -> None:
    q, k, v, o = trained
    (k_pages, table), (v_pages, _) = (paged(t, LENGTHS, page) for t in (k, v))
    assert same_bits(decoded(q, k_pages, v_pages, table), o[last_rows(LENGTHS)])


def test_a_wrong_table_entry_shows(trained) -> None:
    q, k, v, o = trained
    (k_pages, table), (v_pages, _) = (paged(t, LENGTHS, 16) for t in (k, v))
    table[2, 1] = table[2, 2]
    got = decoded(q, k_pages, v_pages, table)
    assert [same_bits(a, b) for a, b in zip(got, o[last_rows(LENGTHS)])] == [True, True, False, True]


def test_the_tile_is_the_one_of_the_dtype(trained) -> None:
    q, k, v, _ = (t.bfloat16() for t in trained)
    (k_pages, table), (v_pages, _) = (paged(t, LENGTHS, 96) for t in (k, v))
    with pytest.raises(ShapeError, match=r"KV tile of 128\nhint: 64 or 128"):
        decoded(q, k_pages, v_pages, table)
