"""FlowGRPO: the stochastic step of a rectified-flow sampler and its log-probability, in fp32.

Liu et al. 2025, "Flow-GRPO": the probability-flow ODE becomes an SDE with the same marginals, so that a
denoising step is a Gaussian policy. Sigma runs from 1 (noise) to 0 (data). Everything is elementwise but the
mean over latent dims, which is the canonical tree, so a sample's bits do not depend on the chunk it is in.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from unirl_scale.core.errors import ConfigError, ShapeError
from unirl_scale.rl.reduce import tree_sum

_HALF_LOG_TWO_PI = 0.5 * math.log(2.0 * math.pi)
_NOISE_DOMAIN = 0x466C6F77  # keeps these Philox streams apart from every other use of the run's seed


def sigma_schedule(num_steps: int, shift: float = 1.0) -> Tensor:
    """fp32 [num_steps + 1] from 1 down to 0: linear, then s -> shift s / (1 + (shift - 1) s)."""
    if num_steps < 1:
        raise ConfigError(f"num_steps: got {num_steps}, must be at least 1")
    linear = torch.arange(num_steps, -1, -1, dtype=torch.float32) / num_steps
    return linear * shift / (linear * (shift - 1.0) + 1.0)


class FlowPolicy(NamedTuple):
    """The Gaussian of one denoising step."""

    mean: Tensor  # fp32 [n, ...]
    std: Tensor  # fp32 scalar, shared by all latent dims


def flow_policy(
    latents: Tensor, velocity: Tensor, sigma: Tensor, sigma_next: Tensor, *, eta: float, sigma_max: float
) -> FlowPolicy:
    """Mean and std of the next latent.

    With dt = sigma' - sigma < 0 and s = eta sqrt(sigma / (1 - sigma)), where sigma_max stands in that
    denominator when sigma = 1:
    mean = x (1 + s^2 dt / (2 sigma)) + v (1 + s^2 (1 - sigma) / (2 sigma)) dt; std = s sqrt(-dt).

    Args:
        latents, velocity: [n, ...], cast to fp32.
        sigma, sigma_next: fp32 scalars, two neighbours of the schedule.
        eta: noise level, > 0.
        sigma_max: < 1, usually the schedule's second entry.

    Raises:
        ConfigError: eta, sigma_max or the order of the sigmas leaves the std zero or undefined.
    """
    if not (eta > 0.0 and 0.0 <= float(sigma_next) < float(sigma) <= 1.0 and 0.0 < sigma_max < 1.0):
        raise ConfigError(
            f"flow step: got eta {eta}, sigma {float(sigma)} -> {float(sigma_next)}, sigma_max {sigma_max};"
            " need eta > 0, 0 <= sigma' < sigma <= 1 and 0 < sigma_max < 1\n"
            "hint: sigmas fall; eta 0.7 is usual"
        )
    x, v = latents.float(), velocity.float()
    sigma, sigma_next = sigma.to(x.device, torch.float32), sigma_next.to(x.device, torch.float32)
    dt = sigma_next - sigma
    s = (sigma / (1.0 - torch.where(sigma == 1.0, sigma_max, sigma))).sqrt() * eta
    half = s * s / (sigma * 2.0)
    mean = x * (half * dt + 1.0) + v * ((half * (1.0 - sigma) + 1.0) * dt)
    return FlowPolicy(mean, s * (-dt).sqrt())


def flow_logprob(next_latents: Tensor, policy: FlowPolicy) -> Tensor:
    """Gaussian log-density, *mean* over latent dims: [n, ...] -> fp32 [n], nats a dim.

    The mean (not the sum) keeps ratios near one; clip ranges are then of the order of 1e-4.
    """
    deviation = (next_latents.float() - policy.mean) / policy.std
    per_dim = -(deviation * deviation * 0.5) - policy.std.log() - _HALF_LOG_TWO_PI
    flat = per_dim.reshape(per_dim.shape[0], -1)
    return tree_sum(flat, 1) / flat.shape[1]


def flow_step(policy: FlowPolicy, noise: Tensor, store_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Sample the next latent and score it.

    The latent is rounded to the dtype it will be stored in *before* it is scored: training reads the stored
    value, and a log-prob of the unrounded one would differ from it.

    Args:
        noise: fp32 [n, ...], standard normal, from `flow_noise`.

    Returns:
        next latents [n, ...] in store_dtype, log-probs fp32 [n].
    """
    if noise.shape != policy.mean.shape:
        raise ShapeError(f"flow noise: got shape {tuple(noise.shape)}, must be {tuple(policy.mean.shape)}")
    next_latents = (policy.mean + noise * policy.std).to(store_dtype)
    return next_latents, flow_logprob(next_latents, policy)


def flow_noise(seed: int, sample_ids: Sequence[int], step: int, shape: Sequence[int]) -> Tensor:
    """Standard normal noise keyed by (seed, global sample id, step): fp32 [len(sample_ids), *shape] on CPU.

    Each sample has its own Philox counter range, so chunking, data parallelism and order do not matter.

    Args:
        seed: any integer; 0 is a seed like any other. Taken modulo 2^64.
        sample_ids: global sample ids, >= 0.
        step: denoising step, >= 0; the initial noise may use step 0 with its own seed.
        shape: of one sample's latent.
    """
    # As a plain list a seed above 2^63 would go through float64 and lose its low bits.
    key = np.array([seed % 2**64, _NOISE_DOMAIN], dtype=np.uint64)
    rows = []
    for sample_id in sample_ids:
        counter = np.array([0, 0, step, sample_id], dtype=np.uint64)
        stream = np.random.Generator(np.random.Philox(key=key, counter=counter))
        rows.append(stream.standard_normal(tuple(shape), dtype=np.float32))
    return torch.from_numpy(np.stack(rows)) if rows else torch.empty((0, *shape))
