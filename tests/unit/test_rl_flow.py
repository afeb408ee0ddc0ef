"""FlowGRPO's step, log-probability and noise."""

from __future__ import annotations

import itertools

import pytest
import torch

from unirl_scale.core.errors import ConfigError, ShapeError
from unirl_scale.rl.flow import flow_logprob, flow_noise, flow_policy, flow_step, sigma_schedule


def scalar(x: float) -> torch.Tensor:
    return torch.tensor(x, dtype=torch.float32)


def policy(sigma: float, sigma_next: float, n: int = 1, dims: int = 3, seed: int | None = None):  # type: ignore[no-untyped-def]
    g = torch.Generator().manual_seed(seed or 0)
    x = torch.ones(n, dims) if seed is None else torch.randn(n, dims, generator=g)
    v = torch.full((n, dims), 0.5) if seed is None else torch.randn(n, dims, generator=g)
    return flow_policy(x, v, scalar(sigma), scalar(sigma_next), eta=0.7, sigma_max=0.99)


def test_golden_step() -> None:
    got = policy(0.8, 0.6)
    assert torch.allclose(got.mean, torch.full((1, 3), 0.6305), atol=1e-6)
    assert got.std.item() == pytest.approx(0.6260990, abs=1e-6)
    assert flow_logprob(got.mean + got.std, got).item() == pytest.approx(-0.9506918, abs=1e-6)


def test_golden_first_step_uses_sigma_max() -> None:
    got = policy(1.0, 0.9)
    assert torch.allclose(got.mean, torch.full((1, 3), -1.5), atol=1e-5)
    assert got.std.item() == pytest.approx(2.2135944, abs=1e-5)


def test_maths_is_fp32_whatever_the_latents_are() -> None:
    x = torch.ones(1, 3, dtype=torch.bfloat16)
    got = flow_policy(x, x, scalar(0.8), scalar(0.6), eta=0.7, sigma_max=0.99)
    assert got.mean.dtype == got.std.dtype == torch.float32


def test_the_rounded_latent_is_the_one_scored() -> None:
    p = policy(0.8, 0.6, n=4, dims=37, seed=1)
    noise = flow_noise(0, range(4), 0, (37,))
    latents, logprobs = flow_step(p, noise, torch.bfloat16)
    assert latents.dtype == torch.bfloat16
    assert torch.equal(logprobs, flow_logprob(latents, p))
    assert not torch.equal(logprobs, flow_logprob(p.mean + noise * p.std, p))


def test_a_samples_bits_do_not_depend_on_its_chunk() -> None:
    p = policy(0.8, 0.6, n=6, dims=101, seed=2)
    noise = flow_noise(3, range(6), 5, (101,))
    latents, logprobs = flow_step(p, noise, torch.float32)
    for size in (1, 2, 4):
        for rows in torch.arange(6).split(size):
            part = flow_step(type(p)(p.mean[rows], p.std), noise[rows], torch.float32)
            assert torch.equal(part[0], latents[rows]) and torch.equal(part[1], logprobs[rows])


def test_logprob_gradient_is_the_gaussians() -> None:
    p = policy(0.8, 0.6, n=2, dims=5, seed=3)
    mean = p.mean.clone().requires_grad_()
    x = mean.detach() + 0.3
    flow_logprob(x, type(p)(mean, p.std)).sum().backward()
    assert mean.grad is not None
    assert torch.allclose(mean.grad, (x - mean.detach()) / p.std**2 / 5)


def test_noise_is_one_map_from_id_to_stream_for_every_chunking() -> None:
    """48 prompts x 16 samples on DP 1, 2 and 4 in chunks of 1, 4, 16 and all: 768 distinct streams."""
    ids = list(range(768))
    whole = flow_noise(0, ids, 2, (4,))
    assert len({tuple(row) for row in whole.tolist()}) == 768
    for dp, chunk in itertools.product((1, 2, 4), (1, 4, 16, 768)):
        for rank in range(dp):
            mine = ids[rank * 768 // dp : (rank + 1) * 768 // dp]
            for i in range(0, len(mine), chunk):
                part = mine[i : i + chunk]
                assert torch.equal(flow_noise(0, part, 2, (4,)), whole[part[0] : part[-1] + 1])


def test_noise_depends_on_seed_and_step_and_zero_is_a_seed() -> None:
    streams = [flow_noise(seed, [7], step, (4,)) for seed in (0, 1, -1) for step in (0, 1)]
    assert len({tuple(s.flatten().tolist()) for s in streams}) == 6
    assert torch.equal(flow_noise(0, [7], 0, (4,)), streams[0])


def test_noise_is_standard_normal() -> None:
    x = flow_noise(11, range(64), 0, (1000,))
    assert abs(x.mean().item()) < 0.02 and abs(x.std().item() - 1.0) < 0.02
    assert flow_noise(0, [], 0, (3, 2)).shape == (0, 3, 2)


def test_schedule_falls_from_one_to_zero_in_fp32() -> None:
    plain = sigma_schedule(4)
    assert plain.tolist() == [1.0, 0.75, 0.5, 0.25, 0.0] and plain.dtype == torch.float32
    shifted = sigma_schedule(4, shift=3.0)
    assert shifted[0] == 1.0 and shifted[-1] == 0.0 and shifted[2].item() == pytest.approx(0.75)
    assert (shifted.diff() < 0).all()


@pytest.mark.parametrize(
    "sigma, sigma_next, eta", [(0.6, 0.8, 0.7), (0.6, 0.6, 0.7), (0.8, 0.6, 0.0), (1.1, 0.5, 0.7)]
)
def test_a_step_without_a_density_is_refused(sigma: float, sigma_next: float, eta: float) -> None:
    x = torch.ones(1, 3)
    with pytest.raises(ConfigError, match="flow step"):
        flow_policy(x, x, scalar(sigma), scalar(sigma_next), eta=eta, sigma_max=0.99)


def test_noise_of_another_shape_is_refused() -> None:
    with pytest.raises(ShapeError, match=r"\(1, 4\).*\(1, 3\)"):
        flow_step(policy(0.8, 0.6), torch.zeros(1, 4), torch.float32)
