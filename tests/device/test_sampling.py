"""Drawing tokens on the GPU: exact integers, one row without regard to another."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.device.conftest import Random
from unirl_scale.core.errors import ShapeError
from unirl_scale.kernels.reference import ReferenceOps

pytestmark = pytest.mark.cuda
COLUMNS = [1, 37, 4096, 4097, 32000]


def uniforms_of(rows: int) -> torch.Tensor:
    return torch.linspace(0, 1 - 2**-53, rows, dtype=torch.float64, device="cuda")


@pytest.mark.parametrize("columns", COLUMNS)
def test_equal_likelihoods_have_the_choices_of_the_truth(ops: Any, random: Random, columns: int) -> None:
    """exp(0) = 1 on every device, so integers and choices are the same."""
    uniforms = uniforms_of(999)
    logits = torch.where(random(999, columns, dtype=torch.float32) > 0, 0.0, -torch.inf)
    logits[:, columns // 2] = 0.0
    got = ops.sample(logits, uniforms)
    assert torch.equal(got, ReferenceOps().sample(logits, uniforms))
    assert columns == 1 or len(got.unique()) > 1


@pytest.mark.parametrize("columns", COLUMNS)
def test_rows_do_not_depend_on_each_other(ops: Any, random: Random, columns: int) -> None:
    wide = 3 * random(200, columns + 24, dtype=torch.float32)
    logits, uniforms = wide[:, :columns], uniforms_of(200)  # rows lie apart
    got = ops.sample(logits, uniforms)
    assert torch.equal(ops.sample(logits.contiguous(), uniforms), got)
    assert torch.equal(ops.sample(logits[63:128], uniforms[63:128]), got[63:128])
    assert torch.equal(ops.sample(logits[199:].clone(), uniforms[199:].clone()), got[199:])


def test_frequencies_follow_the_probabilities(ops: Any) -> None:
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0, -torch.inf], device="cuda")
    n = 100_000
    uniforms = (torch.arange(n, dtype=torch.float64, device="cuda") + 0.5) / n
    counts = ops.sample(logits.expand(n, 5).contiguous(), uniforms).bincount(minlength=5)
    assert (counts - n * logits.double().softmax(0)).abs().max() <= 2


def test_wrong_shapes_are_named(ops: Any) -> None:
    logits, uniforms = torch.zeros(2, 8, device="cuda"), uniforms_of(2)
    for wrong in ((logits.bfloat16(), uniforms), (logits, uniforms.float()), (logits.t(), uniforms_of(8))):
        with pytest.raises(ShapeError, match=r"sample: got .* uniforms fp64"):
            ops.sample(*wrong)
