"""One op table and one random generator a test; every tensor an op allocates starts as NaN."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

Random = Callable[..., Tensor]


@pytest.fixture(scope="session")
def ops() -> Any:
    """The tuned table of the GPU at hand."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    from unirl_scale.kernels.cuda.table import CudaOps

    return CudaOps()


@pytest.fixture(scope="session")
def portable(ops: Any) -> Any:
    """The same table without any kernel made for one GPU."""
    from unirl_scale.kernels.cuda.device import Device
    from unirl_scale.kernels.cuda.table import CudaOps

    return CudaOps(Device())


@pytest.fixture(autouse=True)
def poison() -> Iterator[None]:
    """With this flag on, torch.empty fills what it returns with NaN: an unwritten output cannot pass."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def random(request: pytest.FixtureRequest) -> Random:
    """`random(*shape, dtype=..., spread=...)`: fresh normals, another stream for every test."""
    seed = sum(request.node.nodeid.encode()) * 2654435761 % 2**31
    generator = torch.Generator("cuda").manual_seed(seed)

    def draw(*shape: int, dtype: torch.dtype = torch.bfloat16, spread: float = 0.0) -> Tensor:
        x = torch.randn(shape, generator=generator, device="cuda")
        if spread:
            x = x * torch.exp(spread * torch.randn(shape, generator=generator, device="cuda"))
        return x.to(dtype)

    return draw
