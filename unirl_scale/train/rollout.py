"""Sampling responses on the rollout mesh and judging them; the result is the same on every rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from unirl_scale.comm.tree import split_contiguous
from unirl_scale.core.config import RolloutConfig
from unirl_scale.core.philox import sampling_uniforms
from unirl_scale.parallel.decode import Decoder, Response
from unirl_scale.parallel.sampling import SamplingOptions
from unirl_scale.train.roles import Roles

# (sample number, response token ids) -> reward, None when it cannot be judged.
Judge = Callable[[int, Sequence[int]], float | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """One sampled response."""

    tokens: tuple[int, ...]
    logprobs: NDArray[np.float32]
    truncated: bool
    reward: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """What to sample: the same on every rank.

    Attributes:
        prompts: token ids, one entry a sample (a group repeats its prompt).
        sample_ids: global ids, which key the noise.
        step: training step, which keys the noise too.
        greedy: take the likeliest token instead.
    """

    prompts: Sequence[Sequence[int]]
    sample_ids: Sequence[int]
    seed: int
    step: int
    greedy: bool = False


def sample(
    roles: Roles, draw: Draw, cfg: RolloutConfig, stops: Sequence[tuple[int, ...]], judge: Judge
) -> list[Judged]:
    """Generate one response a sample. The rollout mesh's data-parallel ranks take consecutive samples;
    rewards are computed where the responses are. Collective over the world."""
    mesh = roles.meshes["rollout"]
    parts = split_contiguous(len(draw.prompts), mesh.dp)
    mine: list[Judged] | None = None
    if roles.decoder is not None:
        at = roles.decoder.ctx.at
        responses = _generate(roles.decoder, draw, parts[at.dp], cfg, stops)
        if at.tp == 0:
            mine = [
                Judged(
                    tokens=r.tokens,
                    logprobs=r.logprobs.numpy(),
                    truncated=r.truncated,
                    reward=judge(number, r.tokens),
                )
                for number, r in zip(parts[at.dp], responses)
            ]
    gathered = roles.world.all_gather_object(mine)
    owners = [mesh.rank_at(tp=0, dp=dp, pp=0) for dp in range(mesh.dp)]
    return [judged for rank in owners for judged in gathered[rank]]


def _generate(
    decoder: Decoder, draw: Draw, numbers: range, cfg: RolloutConfig, stops: Sequence[tuple[int, ...]]
) -> list[Response]:
    options = SamplingOptions(
        temperature=0.0 if draw.greedy else cfg.temperature, top_k=cfg.top_k, top_p=cfg.top_p
    )
    ids = [draw.sample_ids[n] for n in numbers]
    uniforms = sampling_uniforms(draw.seed, draw.step, ids, cfg.max_response_tokens)
    prompts = [draw.prompts[n] for n in numbers]
    return decoder.generate(prompts, uniforms, options, stops, cfg.max_response_tokens)
