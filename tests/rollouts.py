"""Sampling on one rank and scoring with the training forward, on any device."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch

from unirl_scale.comm.groups import Group, GroupFactory
from unirl_scale.core.config import (
    HardwareConfig,
    InvarianceConfig,
    ModelConfig,
    ModelsConfig,
    RolloutConfig,
    RunConfig,
)
from unirl_scale.core.load import resolve
from unirl_scale.kernels.check import same_bits
from unirl_scale.kernels.table import OpTable
from unirl_scale.parallel.decode import Counts
from unirl_scale.parallel.samples import Sample
from unirl_scale.train.roles import Roles
from unirl_scale.train.rollout import Draw, Judged, sample

Tokens = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What came out, and for each sample whether the training forward gives the recorded bits."""

    judged: list[Judged]
    equal: list[bool]
    counts: Counts

    @property
    def bits(self) -> list[tuple[Tokens, bytes, bool]]:
        return [(j.tokens, j.logprobs.tobytes(), j.truncated) for j in self.judged]

    @property
    def tokens(self) -> int:
        return sum(len(j.tokens) for j in self.judged)


def prompts_of(vocab_size: int, longest: int, groups: int, size: int) -> list[Tokens]:
    """`groups` random prompts of 1 to longest - 1 tokens, `size` samples each."""
    rng = random.Random(3)
    lengths = [rng.randrange(1, longest) for _ in range(groups)]
    distinct = [tuple(rng.randrange(vocab_size) for _ in range(n)) for n in lengths]
    return [p for p in distinct for _ in range(size)]


def roles_of(
    model: ModelConfig, ops: OpTable, device: str, leaves: int, precision: str = "fp32", **rollout: object
) -> Roles:
    """Actor and decoder of fresh weights on one rank."""
    cfg = RunConfig(
        precision=precision,
        hardware=HardwareConfig(vendor=torch.device(device).type),
        model=ModelsConfig(actor=model),
        invariance=InvarianceConfig(model_leaves=leaves),
        rollout=RolloutConfig(**rollout),
    )
    factory = GroupFactory(Group.single(device=device), timedelta(minutes=1))
    with torch.no_grad():
        roles = Roles(resolve(cfg), factory, ops, torch.device(device))
        roles.refresh_rollout()
    return roles


def roll_out(
    roles: Roles,
    prompts: Sequence[Tokens],
    stops: Sequence[Tokens],
    *,
    ids: Sequence[int] = (),
    greedy: bool = False,
    lag: int | None = None,
    score: bool = True,
) -> Outcome:
    """Sample, then hold the recorded log-probs against the training forward's."""
    assert roles.decoder is not None
    if lag is not None:
        roles.decoder.lag = lag
    draw = Draw(prompts=prompts, sample_ids=ids or range(len(prompts)), seed=11, step=3, greedy=greedy)
    with torch.no_grad():
        judged = sample(roles, draw, roles.cfg.rollout, stops, lambda number, tokens: 0.0)
        samples = [Sample(p, j.tokens) for p, j in zip(prompts, judged)]
        scored = roles.actor.score(samples) if score else []
    equal = [same_bits(torch.from_numpy(j.logprobs), s.cpu()) for j, s in zip(judged, scored)]
    return Outcome(judged=judged, equal=equal, counts=roles.decoder.counts)
